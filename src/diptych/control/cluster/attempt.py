"""One attempt to serve a request (a leg), on one worker or on two: who holds what of it, and who must be told what.

              Reserve            HandoffReserved        FirstToken           HandoffDelivered
    (begin) ----------> RESERVING ------------> PREFILLING -------> SENDING ----------------> DELIVERED --.
       |                    |        Prefill         |  (KV streams)   |         Release           |      |
       | Serve              |                        |                 |                           |      | the decode
       '--> SERVING --------+------------------------+-----------------+---------------------------'      | worker
                            |  cancelled, a worker lost, a lease expired, a transfer failed, the end      | finishes
                            v                                                                             v
                         CLOSING: whoever may hold something is told to drop it ----- acknowledged -----> gone

Reserve first: nothing is computed before there is a place for it. In DELIVERED the prefill worker matters no more.

Two ways to hand over. *Copied*: the prefill worker has blocks of its own and sends their content; the decode worker
fences by ignoring legs that it has forgotten. *Borrowed* (one pool of memory): the prefill worker computes into the
decode worker's blocks, so these must not be given to anybody else while it may still write: a dropped leg leaves the
decode worker only after the prefill worker has said that it forgot it, or is known to be dead.

Owns this picture for one leg; returns what should be done and never does it. Why a leg closes is the cluster's
business.
"""

from dataclasses import dataclass
from enum import StrEnum

from diptych.control.cluster.commands import Command, Drop, Prefill, Release, Reserve, Serve


class LegState(StrEnum):
    """See the module's picture."""

    SERVING = "serving"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    SENDING = "sending"
    DELIVERED = "delivered"
    CLOSING = "closing"


@dataclass(eq=False, slots=True)
class Leg:
    """One attempt. prefill == decode: one worker does all of it. ``lease_ns``: of both sides, when copied."""

    leg_id: str
    request_id: str
    prefill: int
    decode: int
    is_borrowed: bool
    lease_ns: int
    state: LegState = LegState.RESERVING
    is_at_prefill: bool = False  # that worker may hold something of this leg
    is_at_decode: bool = False

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
        """Whether the handoff is not over: leases must be renewed, and losing either worker loses the leg."""
        return self.state in (LegState.RESERVING, LegState.PREFILLING, LegState.SENDING)

    def needs(self, worker: int) -> bool:
        """Whether the leg is lost when this worker is."""
        return worker == self.decode or (worker == self.prefill and self.is_under_way)

    def begin(self) -> list[Command]:
        """The attempt starts."""
        self.is_at_decode = True
        if not self.is_handoff:
            self.state = LegState.SERVING
            return [Serve(self.decode, self.request_id, self.leg_id)]
        return [Reserve(self.decode, self.request_id, self.leg_id, self._lease_ns, self.is_borrowed)]

    def on_reserved(self, num_cached_tokens: int, block_ids: tuple[int, ...]) -> list[Command]:
        """The decode worker has the blocks, and the KV of the leading ``num_cached_tokens`` already."""
        if self.state is not LegState.RESERVING:
            return []
        self.state = LegState.PREFILLING
        self.is_at_prefill = True
        borrowed = block_ids if self.is_borrowed else ()
        return [
            Prefill(
                self.prefill, self.request_id, self.leg_id, self.decode, num_cached_tokens, borrowed, self._lease_ns
            )
        ]

    def on_first_token(self) -> None:
        """The prefill worker has computed everything."""
        if self.state is LegState.PREFILLING:
            self.state = LegState.SENDING

    def on_delivered(self) -> list[Command]:
        """The decode worker goes on with it."""
        if self.state not in (LegState.PREFILLING, LegState.SENDING):
            return []
        self.state = LegState.DELIVERED
        return [Release(self.prefill, self.leg_id)] if self.is_at_prefill else []

    def on_forgotten(self, worker: int) -> list[Command]:
        """This worker holds nothing of the leg any more (it said so, or it is dead)."""
        was_at_prefill = self.is_at_prefill
        if worker == self.prefill:
            self.is_at_prefill = False
        if worker == self.decode:
            self.is_at_decode = False
        if self.state is LegState.CLOSING and self.is_borrowed and was_at_prefill and not self.is_at_prefill:
            return self._drop_decode()
        return []

    def close(self) -> list[Command]:
        """The leg is over, whatever its state: tell whoever may hold something of it."""
        if self.state is LegState.CLOSING:
            return []
        self.state = LegState.CLOSING
        commands: list[Command] = [Drop(self.prefill, self.leg_id)] if self.is_at_prefill else []
        if not (self.is_borrowed and self.is_at_prefill):
            commands += self._drop_decode()
        return commands

    def _drop_decode(self) -> list[Command]:
        return [Drop(self.decode, self.leg_id)] if self.is_at_decode else []

    @property
    def _lease_ns(self) -> int:
        return 0 if self.is_borrowed else self.lease_ns
