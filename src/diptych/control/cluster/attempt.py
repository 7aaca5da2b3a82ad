"""One attempt to serve a request (an attempt), on one worker or on two: who holds what of it, and who must be told
what.

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
fences by ignoring attempts that it has forgotten. *Borrowed* (one pool of memory): the prefill worker computes into the
decode worker's blocks, so these must not be given to anybody else while it may still write: a dropped attempt leaves
the decode worker only after the prefill worker has said that it forgot it, or is known to be dead.

Owns this picture for one attempt; returns what should be done and never does it. Why an attempt closes is the cluster's
business.
"""

from dataclasses import dataclass
from enum import StrEnum

from diptych.control.cluster.commands import Command, Drop, Prefill, Release, Reserve, Serve


class AttemptState(StrEnum):
    """See the module's picture."""

    SERVING = "serving"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    SENDING = "sending"
    DELIVERED = "delivered"
    CLOSING = "closing"


@dataclass(eq=False, slots=True)
class Attempt:
    """One attempt. prefill == decode: one worker does all of it. ``lease_ns``: of both sides, when copied."""

    attempt_id: str
    request_id: str
    prefill: int
    decode: int
    is_borrowed: bool
    lease_ns: int
    state: AttemptState = AttemptState.RESERVING
    is_at_prefill: bool = False  # that worker may hold something of this attempt
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
        """Whether the handoff is not over: leases must be renewed, and losing either worker loses the attempt."""
        return self.state in (AttemptState.RESERVING, AttemptState.PREFILLING, AttemptState.SENDING)

    def needs(self, worker: int) -> bool:
        """Whether the attempt is lost when this worker is."""
        return worker == self.decode or (worker == self.prefill and self.is_under_way)

    def begin(self) -> list[Command]:
        """The attempt starts."""
        self.is_at_decode = True
        if not self.is_handoff:
            self.state = AttemptState.SERVING
            return [Serve(self.decode, self.request_id, self.attempt_id)]
        return [Reserve(self.decode, self.request_id, self.attempt_id, self._lease_ns, self.is_borrowed)]

    def on_reserved(self, num_cached_tokens: int, block_ids: tuple[int, ...]) -> list[Command]:
        """The decode worker has the blocks, and the KV of the leading ``num_cached_tokens`` already."""
        if self.state is not AttemptState.RESERVING:
            return []
        self.state = AttemptState.PREFILLING
        self.is_at_prefill = True
        borrowed = block_ids if self.is_borrowed else ()
        return [
            Prefill(
                self.prefill, self.request_id, self.attempt_id, self.decode, num_cached_tokens, borrowed, self._lease_ns
            )
        ]

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
        """This worker holds nothing of the attempt any more (it said so, or it is dead)."""
        was_at_prefill = self.is_at_prefill
        if worker == self.prefill:
            self.is_at_prefill = False
        if worker == self.decode:
            self.is_at_decode = False
        if self.state is AttemptState.CLOSING and self.is_borrowed and was_at_prefill and not self.is_at_prefill:
            return self._drop_decode()
        return []

    def close(self) -> list[Command]:
        """The attempt is over, whatever its state: tell whoever may hold something of it."""
        if self.state is AttemptState.CLOSING:
            return []
        self.state = AttemptState.CLOSING
        commands: list[Command] = [Drop(self.prefill, self.attempt_id)] if self.is_at_prefill else []
        if not (self.is_borrowed and self.is_at_prefill):
            commands += self._drop_decode()
        return commands

    def _drop_decode(self) -> list[Command]:
        return [Drop(self.decode, self.attempt_id)] if self.is_at_decode else []

    @property
    def _lease_ns(self) -> int:
        return 0 if self.is_borrowed else self.lease_ns
