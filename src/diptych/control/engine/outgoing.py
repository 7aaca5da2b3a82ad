"""The prefill worker's side of a handoff: which KV to send during and after a step.

Owns how far each attempt has been sent. Chunks travel in whole blocks, except the last one of a prompt; what the decode
worker has cached is never sent. Must never move a byte: the driver does.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Send the KV of tokens [start, start + num_tokens); ``is_last``: then the commit. num_tokens may be 0 with it."""

    attempt_id: str
    start: int
    num_tokens: int
    is_last: bool


@dataclass(slots=True)
class _Attempt:
    num_tokens: int
    sent: int
    is_borrowed: bool


class Outgoing:
    """AttemptTable that are prefilled here for others."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._attempts: dict[str, _Attempt] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._attempts

    def begin(self, attempt_id: str, start: int, num_tokens: int, *, is_borrowed: bool = False) -> None:
        """A prompt of ``num_tokens`` whose first ``start`` tokens the other side has. Borrowed blocks are computed in
        place: nothing is sent but the commit."""
        self._attempts[attempt_id] = _Attempt(num_tokens, start, is_borrowed)

    def in_step(self, prefills: Iterable[tuple[str, int, int]]) -> list[Chunk]:
        """What ``on_step`` will give when a step has computed these: its layers may be sent as they are computed."""
        chunks = []
        for attempt_id, start, num_tokens in prefills:
            attempt = self._attempts.get(attempt_id)
            if attempt is None:
                continue
            end = start + num_tokens
            is_last = end >= attempt.num_tokens
            end = attempt.num_tokens if is_last else end - end % self._block_size
            count = 0 if attempt.is_borrowed else max(0, end - attempt.sent)
            if count or is_last:
                chunks.append(Chunk(attempt_id, attempt.sent if count else end, count, is_last))
        return chunks

    def on_step(self, prefills: Iterable[tuple[str, int, int]]) -> list[Chunk]:
        """What a step computed (StepFinished.prefills: attempt id, start, tokens; an attempt at most once): what may be
        sent now. An attempt is forgotten with its last chunk."""
        chunks = self.in_step(prefills)
        for chunk in chunks:
            if chunk.is_last:
                del self._attempts[chunk.attempt_id]
            else:
                self._attempts[chunk.attempt_id].sent = chunk.start + chunk.num_tokens
        return chunks

    def drop(self, attempt_id: str) -> None:
        """The attempt ended otherwise."""
        self._attempts.pop(attempt_id, None)
