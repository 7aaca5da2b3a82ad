"""All legs that some worker may still hold something of: found by name and by worker, renewed, and buried.

Owns the tables; what a leg's change of state means is handoff.py's business, and what follows for the request is the
cluster's.
"""

from diptych.control.cluster.attempt import Leg, LegState
from diptych.control.cluster.commands import Command, Renew


class Legs:
    """Legs of workers 0 .. num_workers - 1."""

    def __init__(self, num_workers: int, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._legs: dict[str, Leg] = {}
        self._legs_of: list[dict[str, Leg]] = [{} for _ in range(num_workers)]
        self._leased: dict[str, Leg] = {}  # copied handoffs under way
        self._renew_at = 0

    def __len__(self) -> int:
        return len(self._legs)

    def get(self, leg_id: str) -> Leg | None:
        """The leg of this name, if anybody may hold something of it."""
        return self._legs.get(leg_id)

    def of_worker(self, worker: int) -> list[Leg]:
        """Legs that this worker has a part in, oldest first."""
        return list(self._legs_of[worker].values())

    @property
    def next_renewal_ns(self) -> int | None:
        """When leases are to be renewed; None while there are none."""
        return self._renew_at if self._leased else None

    def begin(self, leg: Leg, now: int) -> list[Command]:
        """A new attempt."""
        self._legs[leg.leg_id] = leg
        self._legs_of[leg.prefill][leg.leg_id] = leg
        self._legs_of[leg.decode][leg.leg_id] = leg
        if self._lease_ns and leg.is_handoff and not leg.is_borrowed:
            if not self._leased:
                self._renew_at = now + self._lease_ns // 3
            self._leased[leg.leg_id] = leg
        return leg.begin()

    def delivered(self, leg: Leg) -> list[Command]:
        """The decode worker goes on with it."""
        self._leased.pop(leg.leg_id, None)
        return leg.on_delivered()

    def forgotten(self, leg: Leg, worker: int) -> list[Command]:
        """That worker holds nothing of the leg any more."""
        commands = leg.on_forgotten(worker)
        self._bury(leg)
        return commands

    def close(self, leg: Leg) -> list[Command]:
        """The leg is over, whatever its state."""
        self._leased.pop(leg.leg_id, None)
        commands = leg.close()
        self._bury(leg)
        return commands

    def renew(self, now: int) -> list[Command]:
        """What to tell the workers so that no lease of a handoff under way runs out."""
        if not self._leased or now < self._renew_at:
            return []
        self._renew_at = now + self._lease_ns // 3
        by_worker: dict[int, list[str]] = {}
        for leg in self._leased.values():
            by_worker.setdefault(leg.decode, []).append(leg.leg_id)
            if leg.is_at_prefill:
                by_worker.setdefault(leg.prefill, []).append(leg.leg_id)
        return [Renew(worker, tuple(leg_ids)) for worker, leg_ids in by_worker.items()]

    def check_idle(self) -> None:
        """Assert that no leg is left (for tests)."""
        assert not self._legs, f"legs left behind: {list(self._legs.values())[:5]}"
        assert not self._leased and not any(self._legs_of)

    def _bury(self, leg: Leg) -> None:
        """Forget a leg that is over and that nobody holds."""
        if leg.is_gone and leg.state is LegState.CLOSING and leg.leg_id in self._legs:
            del self._legs[leg.leg_id]
            del self._legs_of[leg.prefill][leg.leg_id]
            self._legs_of[leg.decode].pop(leg.leg_id, None)
