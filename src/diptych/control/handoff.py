"""The way of one request from the replica that prefills it to the one that decodes it.

    RESERVING   the decode replica looks for blocks; prefill has not begun      -> HandoffReserved
    PREFILLING  chunks are computed and, as each ends, sent (what the decode replica has cached is never sent)
                                                                                -> the last chunk: the first token
    SENDING     everything is computed and on its way                           -> the last byte has arrived
    DELIVERED   the decode replica goes on; the prefill replica's blocks are free

Reserve first: nothing is computed before there is a place for it. Owns what has been sent and has arrived; returns
what should be done and never does it. A handoff can be dropped in every state.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class HandoffState(StrEnum):
    """See the module's picture."""

    RESERVING = "reserving"
    PREFILLING = "prefilling"
    SENDING = "sending"
    DELIVERED = "delivered"


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask the decode replica for blocks."""

    replica: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """Give the request to the prefill replica, to be handed off."""

    replica: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """Send the KV of tokens [start, start + num_tokens)."""

    request_id: str
    source: int
    target: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Everything is there: the decode replica goes on."""

    replica: int
    request_id: str
    first_step_ns: int
    first_token_ns: int


@dataclass(frozen=True, slots=True)
class Release:
    """The prefill replica may forget the request."""

    replica: int
    request_id: str


Command = Reserve | Prefill | Transfer | Deliver | Release


@dataclass(slots=True)
class _Handoff:
    request_id: str
    num_tokens: int
    prefill: int
    decode: int
    state: HandoffState = HandoffState.RESERVING
    sent: int = 0  # leading tokens that are there, or on their way
    num_pending: int = 0  # transfers on their way
    first_step_ns: int = -1
    first_token_ns: int = -1


@dataclass(slots=True)
class Handoffs:
    """All handoffs under way. ``block_size``: chunks travel in whole blocks, except the last."""

    block_size: int
    _handoffs: dict[str, _Handoff] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._handoffs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._handoffs

    def state(self, request_id: str) -> HandoffState | None:
        """Where a handoff is; None when there is none."""
        handoff = self._handoffs.get(request_id)
        return handoff.state if handoff else None

    def replicas(self, request_id: str) -> tuple[int, int] | None:
        """(prefill replica, decode replica) of a handoff."""
        handoff = self._handoffs.get(request_id)
        return (handoff.prefill, handoff.decode) if handoff else None

    def begin(self, request_id: str, num_prompt_tokens: int, prefill: int, decode: int) -> list[Command]:
        """A request is to be prefilled here and decoded there."""
        self._handoffs[request_id] = _Handoff(request_id, num_prompt_tokens, prefill, decode)
        return [Reserve(decode, request_id)]

    def on_reserved(self, request_id: str, num_cached_tokens: int) -> list[Command]:
        """The decode replica has the blocks, and the KV of the leading ``num_cached_tokens`` already."""
        handoff = self._handoffs.get(request_id)
        if handoff is None or handoff.state is not HandoffState.RESERVING:
            return []
        handoff.state = HandoffState.PREFILLING
        handoff.sent = num_cached_tokens
        return [Prefill(handoff.prefill, request_id)]

    def on_started(self, request_id: str, now: int) -> None:
        """The prefill replica begins the step that computes its first chunk."""
        handoff = self._handoffs.get(request_id)
        if handoff is not None and handoff.first_step_ns < 0:
            handoff.first_step_ns = now

    def on_computed(self, request_id: str, num_tokens: int, now: int) -> list[Command]:
        """The prefill replica has the KV of the leading ``num_tokens``; with all of them it has the first token."""
        handoff = self._handoffs.get(request_id)
        if handoff is None or handoff.state is not HandoffState.PREFILLING:
            return []
        is_last = num_tokens >= handoff.num_tokens
        end = handoff.num_tokens if is_last else num_tokens - num_tokens % self.block_size
        commands: list[Command] = []
        if end > handoff.sent:
            commands.append(Transfer(request_id, handoff.prefill, handoff.decode, handoff.sent, end - handoff.sent))
            handoff.sent = end
            handoff.num_pending += 1
        if is_last:
            handoff.first_token_ns = now
            handoff.state = HandoffState.SENDING
            if not handoff.num_pending:
                commands += self._deliver(handoff)
        return commands

    def on_arrived(self, request_id: str) -> list[Command]:
        """One transfer has arrived."""
        handoff = self._handoffs.get(request_id)
        if handoff is None:
            return []
        handoff.num_pending -= 1
        if handoff.state is HandoffState.SENDING and not handoff.num_pending:
            return self._deliver(handoff)
        return []

    def drop(self, request_id: str) -> None:
        """The request ended, or is to be done otherwise: forget it (whoever drops tells both replicas)."""
        self._handoffs.pop(request_id, None)

    def _deliver(self, handoff: _Handoff) -> list[Command]:
        handoff.state = HandoffState.DELIVERED
        del self._handoffs[handoff.request_id]
        return [
            Deliver(handoff.decode, handoff.request_id, handoff.first_step_ns, handoff.first_token_ns),
            Release(handoff.prefill, handoff.request_id),
        ]
