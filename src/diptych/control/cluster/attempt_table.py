"""All attempts that some worker may still hold something of: found by name and by worker, renewed, and buried.

Owns the tables; what an attempt's change of state means is handoff.py's business, and what follows for the request is
the cluster's.
"""

from diptych.control.cluster.attempt import Attempt, AttemptState
from diptych.control.cluster.commands import Command, Renew


class AttemptTable:
    """AttemptTable of workers 0 .. num_workers - 1."""

    def __init__(self, num_workers: int, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._attempts: dict[str, Attempt] = {}
        self._attempts_of: list[dict[str, Attempt]] = [{} for _ in range(num_workers)]
        self._leased: dict[str, Attempt] = {}  # copied handoffs under way
        self._renew_at = 0

    def __len__(self) -> int:
        return len(self._attempts)

    def get(self, attempt_id: str) -> Attempt | None:
        """The attempt of this name, if anybody may hold something of it."""
        return self._attempts.get(attempt_id)

    def of_worker(self, worker: int) -> list[Attempt]:
        """AttemptTable that this worker has a part in, oldest first."""
        return list(self._attempts_of[worker].values())

    @property
    def next_renewal_ns(self) -> int | None:
        """When leases are to be renewed; None while there are none."""
        return self._renew_at if self._leased else None

    def begin(self, attempt: Attempt, now: int) -> list[Command]:
        """A new attempt."""
        self._attempts[attempt.attempt_id] = attempt
        self._attempts_of[attempt.prefill][attempt.attempt_id] = attempt
        self._attempts_of[attempt.decode][attempt.attempt_id] = attempt
        if self._lease_ns and attempt.is_handoff and not attempt.is_borrowed:
            if not self._leased:
                self._renew_at = now + self._lease_ns // 3
            self._leased[attempt.attempt_id] = attempt
        return attempt.begin()

    def delivered(self, attempt: Attempt) -> list[Command]:
        """The decode worker goes on with it."""
        self._leased.pop(attempt.attempt_id, None)
        return attempt.on_delivered()

    def forgotten(self, attempt: Attempt, worker: int) -> list[Command]:
        """That worker holds nothing of the attempt any more."""
        commands = attempt.on_forgotten(worker)
        self._bury(attempt)
        return commands

    def close(self, attempt: Attempt) -> list[Command]:
        """The attempt is over, whatever its state."""
        self._leased.pop(attempt.attempt_id, None)
        commands = attempt.close()
        self._bury(attempt)
        return commands

    def renew(self, now: int) -> list[Command]:
        """What to tell the workers so that no lease of a handoff under way runs out."""
        if not self._leased or now < self._renew_at:
            return []
        self._renew_at = now + self._lease_ns // 3
        by_worker: dict[int, list[str]] = {}
        for attempt in self._leased.values():
            by_worker.setdefault(attempt.decode, []).append(attempt.attempt_id)
            if attempt.is_at_prefill:
                by_worker.setdefault(attempt.prefill, []).append(attempt.attempt_id)
        return [Renew(worker, tuple(attempt_ids)) for worker, attempt_ids in by_worker.items()]

    def check_idle(self) -> None:
        """Assert that no attempt is left (for tests)."""
        assert not self._attempts, f"attempts left behind: {list(self._attempts.values())[:5]}"
        assert not self._leased and not any(self._attempts_of)

    def _bury(self, attempt: Attempt) -> None:
        """Forget an attempt that is over and that nobody holds."""
        if attempt.is_gone and attempt.state is AttemptState.CLOSING and attempt.attempt_id in self._attempts:
            del self._attempts[attempt.attempt_id]
            del self._attempts_of[attempt.prefill][attempt.attempt_id]
            self._attempts_of[attempt.decode].pop(attempt.attempt_id, None)
