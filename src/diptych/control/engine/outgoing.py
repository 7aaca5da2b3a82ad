"""The prefill worker's side of a handoff: which KV to send during and after a step.

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

    def in_step(self, prefills: Iterable[tuple[str, int, int]]) -> list[Chunk]:
        """What ``on_step`` will give when a step has computed these: its layers may be sent as they are computed."""
        chunks = []
        for leg_id, start, num_tokens in prefills:
            leg = self._legs.get(leg_id)
            if leg is None:
                continue
            end = start + num_tokens
            is_last = end >= leg.num_tokens
            end = leg.num_tokens if is_last else end - end % self._block_size
            count = 0 if leg.is_borrowed else max(0, end - leg.sent)
            if count or is_last:
                chunks.append(Chunk(leg_id, leg.sent if count else end, count, is_last))
        return chunks

    def on_step(self, prefills: Iterable[tuple[str, int, int]]) -> list[Chunk]:
        """What a step computed (StepFinished.prefills: leg id, start, tokens; a leg at most once): what may be sent
        now. A leg is forgotten with its last chunk."""
        chunks = self.in_step(prefills)
        for chunk in chunks:
            if chunk.is_last:
                del self._legs[chunk.leg_id]
            else:
                self._legs[chunk.leg_id].sent = chunk.start + chunk.num_tokens
        return chunks

    def drop(self, leg_id: str) -> None:
        """The leg ended otherwise."""
        self._legs.pop(leg_id, None)
