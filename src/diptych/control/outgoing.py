"""The prefill worker's side of a handoff: which KV to send after a step.

Owns how far each leg has been sent. Chunks travel in whole blocks, except the last one of a prompt; what the decode
worker has cached is never sent. Must never move a byte: the driver does.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Send the KV of tokens [start, start + num_tokens); ``is_last``: then the commit. num_tokens may be 0 with it."""

    leg_id: str
    start: int
    num_tokens: int
    is_last: bool


@dataclass(slots=True)
class _Leg:
    num_tokens: int
    sent: int
    is_borrowed: bool


class Outgoing:
    """Legs that are prefilled here for others."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._legs: dict[str, _Leg] = {}

    def __len__(self) -> int:
        return len(self._legs)

    def __contains__(self, leg_id: str) -> bool:
        return leg_id in self._legs

    def begin(self, leg_id: str, start: int, num_tokens: int, *, is_borrowed: bool = False) -> None:
        """A prompt of ``num_tokens`` whose first ``start`` tokens the other side has. Borrowed blocks are computed in
        place: nothing is sent but the commit."""
        self._legs[leg_id] = _Leg(num_tokens, start, is_borrowed)

    def on_step(self, prefills: Iterable[tuple[str, int, int]]) -> list[Chunk]:
        """What a step computed (StepFinished.prefills: leg id, start, tokens): what may be sent now. A leg is forgotten
        with its last chunk."""
        chunks = []
        for leg_id, start, num_tokens in prefills:
            leg = self._legs.get(leg_id)
            if leg is None:
                continue
            end = start + num_tokens
            is_last = end >= leg.num_tokens
            if is_last:
                end = leg.num_tokens
                del self._legs[leg_id]
            else:
                end -= end % self._block_size
            count = 0 if leg.is_borrowed else max(0, end - leg.sent)
            if count or is_last:
                chunks.append(Chunk(leg_id, leg.sent if count else end, count, is_last))
                leg.sent = max(leg.sent, end)
        return chunks

    def drop(self, leg_id: str) -> None:
        """The leg ended otherwise."""
        self._legs.pop(leg_id, None)
