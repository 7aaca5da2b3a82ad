"""Attempts to serve requests, each on one worker or on two: which worker holds what of it, and which commands it gets.

          Reserve, Prefill*      HandoffReserved        FirstToken           HandoffDelivered
    (begin) ----------> RESERVING ------------> PREFILLING -------> SENDING ----------------> DELIVERED --.
       |                    |    Send, Prefill**     |  (KV streams)   |         Release           |      |
       | Serve              |                        |                 |                           |      | the decode
       '--> SERVING --------+------------------------+-----------------+---------------------------'      | worker
                            |  cancelled, recalled, a worker lost, a lease expired, a transfer failed,    | finishes
                            |  the end                                                                    |
                            v                                                                             v
                         CLOSING: a worker that may hold something is told to drop it --- acknowledged --> gone

Reserve first: no KV travels and no token is given before there is a place for them, so that no stream waits for one. In
DELIVERED the prefill worker is not needed any more.

A decode worker recalls a reservation when a stream there has no blocks (HandoffRevoked): the attempt closes, unless
its prompt is computed, and the request begins another.

Two ways to hand over. *Copied* (* in the picture): the prefill worker has blocks of its own and sends their content. It
begins at once, because a decode worker answers between two steps only, and sends when it may; unless the prompt is a
stream that another worker lost, which begins when it has its place. The decode worker fences by ignoring attempts that
it has forgotten. *Borrowed* (**, one memory domain): the prefill worker computes into the
decode worker's blocks, so these must not be given to another request while it may still write: a dropped attempt leaves
the decode worker only after the prefill worker has reported that it forgot it, or is known to be dead.

A reservation holds blocks of its decode worker until the prefill worker has computed the prompt, and a prompt may wait
there for blocks that other reservations hold. Workers that wait for one another in a circle would wait for ever: no
attempt begins that closes such a circle (``closes_circle``).

ClusterCore decides why an attempt closes and what follows for its request.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from diptych.control.commands import NOT_RESERVED, Command, Drop, Prefill, Release, Renew, Reserve, Send, Serve
from diptych.control.request import BlockTables, FinishReason, PeerRun


class AttemptState(StrEnum):
    """A state in the module's diagram."""

    SERVING = "serving"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    SENDING = "sending"
    DELIVERED = "delivered"
    CLOSING = "closing"


@dataclass(eq=False, slots=True)
class Attempt:
    """One attempt. prefill == decode: one worker does all of it. num_output_tokens: see commands.Serve. lease_ns: of
    both sides, when copied. prefill_peer, decode_peer: from whom these workers may read a part of the prompt."""

    attempt_id: str
    request_id: str
    num_output_tokens: int
    prefill: int
    decode: int
    is_borrowed: bool
    lease_ns: int
    prefill_peer: PeerRun | None = None
    decode_peer: PeerRun | None = None
    state: AttemptState = AttemptState.RESERVING
    is_at_prefill: bool = False  # that worker may hold something of this attempt
    is_at_decode: bool = False
    reason: FinishReason = FinishReason.ABORT  # why it closes

    @property
    def is_handoff(self) -> bool:
        """Whether two workers share it."""
        return self.prefill != self.decode

    @property
    def is_gone(self) -> bool:
        """Whether no worker holds anything of it."""
        return not (self.is_at_prefill or self.is_at_decode)

    @property
    def is_under_way(self) -> bool:
        """Whether the handoff is not over: leases must be renewed, and losing either worker loses the attempt."""
        return self.state in (AttemptState.RESERVING, AttemptState.PREFILLING, AttemptState.SENDING)

    @property
    def is_decoding(self) -> bool:
        """Whether the decode worker has all that there is, as far as the cluster knows."""
        return self.state in (AttemptState.SERVING, AttemptState.DELIVERED)

    @property
    def awaits_prefill(self) -> bool:
        """Whether blocks of the decode worker are, or will be, held until the other worker has computed the prompt."""
        return self.is_handoff and self.state in (AttemptState.RESERVING, AttemptState.PREFILLING)

    def needs(self, worker: int) -> bool:
        """Whether the attempt is lost when this worker is."""
        return worker == self.decode or (worker == self.prefill and self.is_under_way)

    def involves(self, worker: int) -> bool:
        """Whether this worker may hold something of it, or will be asked to compute its prompt."""
        if worker == self.prefill and (self.is_at_prefill or self.state is AttemptState.RESERVING):
            return True
        return worker == self.decode and self.is_at_decode

    def begin(self) -> list[Command]:
        """The attempt starts."""
        self.is_at_decode = True
        names = (self.request_id, self.attempt_id, self.num_output_tokens)
        if not self.is_handoff:
            self.state = AttemptState.SERVING
            return [Serve(self.decode, *names, self.decode_peer)]
        reserve = Reserve(self.decode, *names, self._lease_ns, self.is_borrowed, self.decode_peer)
        runs_ahead = not self.is_borrowed and not self.num_output_tokens  # a stream waits for no prompt, so for no room
        return [reserve, self._prefill(NOT_RESERVED)] if runs_ahead else [reserve]

    def on_reserved(self, num_cached_tokens: int, block_tables: BlockTables) -> list[Command]:
        """The decode worker has the blocks, and the KV of the leading ``num_cached_tokens`` already."""
        if self.state is not AttemptState.RESERVING:
            return []
        self.state = AttemptState.PREFILLING
        if self.is_at_prefill:
            return [Send(self.prefill, self.attempt_id, num_cached_tokens)]
        return [self._prefill(num_cached_tokens, block_tables if self.is_borrowed else ())]

    def _prefill(self, num_cached_tokens: int, block_tables: BlockTables = ()) -> Prefill:
        self.is_at_prefill = True
        names = (self.request_id, self.attempt_id, self.num_output_tokens)
        at_target = (self.decode, num_cached_tokens, block_tables)
        return Prefill(self.prefill, *names, *at_target, self._lease_ns, self.prefill_peer)

    def on_first_token(self) -> None:
        """The prefill worker has computed everything."""
        if self.state is AttemptState.PREFILLING:
            self.state = AttemptState.SENDING

    def on_delivered(self) -> list[Command]:
        """The decode worker goes on with it."""
        if self.state not in (AttemptState.PREFILLING, AttemptState.SENDING):
            return []
        self.state = AttemptState.DELIVERED
        return [Release(self.prefill, self.attempt_id)] if self.is_at_prefill else []

    def on_forgotten(self, worker: int) -> list[Command]:
        """This worker holds nothing of the attempt any more (it reported so, or it is dead)."""
        was_at_prefill = self.is_at_prefill
        if worker == self.prefill:
            self.is_at_prefill = False
        if worker == self.decode:
            self.is_at_decode = False
        is_released = was_at_prefill and not self.is_at_prefill
        if self.state is AttemptState.CLOSING and self.is_borrowed and is_released:
            return self._drop_decode()
        return []

    def close(self, reason: FinishReason) -> list[Command]:
        """The attempt is over, whatever its state: each worker that may hold something of it is to drop it."""
        if self.state is AttemptState.CLOSING:
            return []
        self.state, self.reason = AttemptState.CLOSING, reason
        commands: list[Command] = [Drop(self.prefill, self.attempt_id, reason)] if self.is_at_prefill else []
        # Borrowed blocks are given back when their writer has let go, and not before: it may be computing into them.
        if not (self.is_borrowed and self.is_at_prefill):
            commands += self._drop_decode()
        return commands

    def _drop_decode(self) -> list[Command]:
        return [Drop(self.decode, self.attempt_id, self.reason)] if self.is_at_decode else []

    @property
    def _lease_ns(self) -> int:
        return 0 if self.is_borrowed else self.lease_ns


class AttemptTable:
    """All attempts that some worker may still hold something of: by id and by worker; their leases are renewed here."""

    def __init__(self, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._attempts: dict[str, Attempt] = {}
        self._attempts_of: dict[int, dict[str, Attempt]] = {}
        self._leased: dict[str, Attempt] = {}  # copied handoffs under way
        self._renew_at = 0
        self._awaited: dict[int, Counter[int]] = {}  # decode worker -> prefill workers whose prompts it awaits

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts.values())

    @property
    def num_leased(self) -> int:
        """Attempts whose leases are renewed."""
        return len(self._leased)

    def count_in(self, state: AttemptState) -> int:
        """How many are in this state."""
        return sum(attempt.state is state for attempt in self._attempts.values())

    def get(self, attempt_id: str) -> Attempt | None:
        """The attempt of this id, if a worker may hold something of it."""
        return self._attempts.get(attempt_id)

    def of_worker(self, worker: int) -> list[Attempt]:
        """Attempts that this worker has a part in, oldest first."""
        return list(self._attempts_of.get(worker, {}).values())

    def count_of(self, worker: int) -> int:
        """How many of them it holds a part of, or will."""
        return sum(attempt.involves(worker) for attempt in self._attempts_of.get(worker, {}).values())

    @property
    def next_renewal_ns(self) -> int | None:
        """When leases are to be renewed; None while there are none."""
        return self._renew_at if self._leased else None

    def closes_circle(self, prefill: int, decode: int) -> bool:
        """Whether an attempt on these would make workers wait for one another in a circle."""
        if prefill == decode:
            return False
        seen, reached = {prefill}, [prefill]
        while reached:
            for worker in self._awaited.get(reached.pop(), ()):
                if worker == decode:
                    return True
                if worker not in seen:
                    seen.add(worker)
                    reached.append(worker)
        return False

    def begin(self, attempt: Attempt, now: int) -> list[Command]:
        """A new attempt."""
        if attempt.is_handoff:
            self._awaited.setdefault(attempt.decode, Counter())[attempt.prefill] += 1
        self._attempts[attempt.attempt_id] = attempt
        for worker in (attempt.prefill, attempt.decode):
            self._attempts_of.setdefault(worker, {})[attempt.attempt_id] = attempt
        if self._lease_ns and attempt.is_handoff and not attempt.is_borrowed:
            if not self._leased:
                self._renew_at = now + self._lease_ns // 3
            self._leased[attempt.attempt_id] = attempt
        return attempt.begin()

    def computed(self, attempt: Attempt) -> None:
        """Note that the attempt's prompt is computed."""
        self._stop_awaiting(attempt)
        attempt.on_first_token()

    def delivered(self, attempt: Attempt) -> list[Command]:
        """The decode worker goes on with it."""
        self._stop_awaiting(attempt)
        self._leased.pop(attempt.attempt_id, None)
        return attempt.on_delivered()

    def forgotten(self, attempt: Attempt, worker: int) -> list[Command]:
        """Note that a worker holds nothing of the attempt any more."""
        commands = attempt.on_forgotten(worker)
        self._bury(attempt)
        return commands

    def close(self, attempt: Attempt, reason: FinishReason = FinishReason.ABORT) -> list[Command]:
        """The attempt is over, whatever its state."""
        self._stop_awaiting(attempt)
        self._leased.pop(attempt.attempt_id, None)
        commands = attempt.close(reason)
        self._bury(attempt)
        return commands

    def renew(self, now: int) -> list[Command]:
        """The renewals that keep the leases of handoffs under way."""
        if not self._leased or now < self._renew_at:
            return []
        # A third of a lease: one renewal may be lost before it runs out.
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
        assert not self._leased and not any(self._attempts_of.values()) and not self._awaited

    def _stop_awaiting(self, attempt: Attempt) -> None:
        """Called before its state says so."""
        if not attempt.awaits_prefill:
            return
        awaited = self._awaited[attempt.decode]
        awaited[attempt.prefill] -= 1
        if not awaited[attempt.prefill]:
            del awaited[attempt.prefill]
        if not awaited:
            del self._awaited[attempt.decode]

    def _bury(self, attempt: Attempt) -> None:
        """Forget an attempt that is over and that no worker holds."""
        if attempt.is_gone and attempt.state is AttemptState.CLOSING and attempt.attempt_id in self._attempts:
            del self._attempts[attempt.attempt_id]
            for worker in (attempt.prefill, attempt.decode):
                self._attempts_of[worker].pop(attempt.attempt_id, None)
