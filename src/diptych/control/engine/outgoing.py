"""The prefill worker's side of handoffs: which KV to send during and after a step.

KV leaves in whole blocks, except the last chunk of a prompt; what the decode worker has cached is never sent, nor what
windows have left when the prompt ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from diptych.control.kv_layout import KVLayout
from diptych.control.request import BlockTables
from diptych.control.step import ScheduledPrefill


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Send the KV of tokens [start, start + num_tokens), which lies in ``block_tables`` (the whole ones). is_last: the
    commit follows it (num_tokens may then be 0). first_blocks: by group, the index of the first block in its table;
    what lies before it is not sent, in that group ((): 0, in all)."""

    attempt_id: str
    start: int
    num_tokens: int
    block_tables: BlockTables
    is_last: bool
    first_blocks: tuple[int, ...] = ()


@dataclass(slots=True)
class _Progress:
    num_tokens: int
    sent: int
    is_borrowed: bool


class Outgoing:
    """How far each attempt that is prefilled here for another worker has been sent."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._block_size = layout.hash_tokens
        self._progress: dict[str, _Progress] = {}

    def __len__(self) -> int:
        return len(self._progress)

    def begin(self, attempt_id: str, start: int, num_tokens: int, *, is_borrowed: bool = False) -> None:
        """A prompt of ``num_tokens`` whose first ``start`` tokens the other side has. Borrowed blocks are computed in
        place: nothing is sent but the commit."""
        self._progress[attempt_id] = _Progress(num_tokens, start, is_borrowed)

    def in_step(self, prefills: Iterable[ScheduledPrefill]) -> list[SendChunk]:
        """What ``on_step`` will give when a step has computed these: its layers may be sent as they are computed."""
        chunks = []
        for prefill in prefills:
            end = prefill.start + prefill.num_tokens
            chunks.append(self._chunk(prefill.request_id, end, prefill.block_tables, prefill.first_blocks))
        return [chunk for chunk in chunks if chunk is not None]

    def on_step(self, prefills: Iterable[ScheduledPrefill]) -> list[SendChunk]:
        """What may be sent now that a step has computed these. An attempt is forgotten with its last chunk."""
        chunks = self.in_step(prefills)
        for chunk in chunks:
            self._sent(chunk)
        return chunks

    def catch_up(
        self, attempt_id: str, end: int, block_tables: BlockTables, first_blocks: tuple[int, ...] = ()
    ) -> SendChunk | None:
        """What may be sent of the first ``end`` tokens, which were computed before ``begin``."""
        chunk = self._chunk(attempt_id, end, block_tables, first_blocks)
        if chunk is not None:
            self._sent(chunk)
        return chunk

    def _chunk(
        self, attempt_id: str, end: int, block_tables: BlockTables, first_blocks: tuple[int, ...]
    ) -> SendChunk | None:
        """The chunk to send once ``end`` tokens are computed; None if there is none."""
        progress = self._progress.get(attempt_id)
        if progress is None:
            return None
        is_last = end >= progress.num_tokens
        end = progress.num_tokens if is_last else end - end % self._block_size
        count = 0 if progress.is_borrowed else max(0, end - progress.sent)
        if not count and not is_last:
            return None
        if first_blocks and count:
            handed_over = self._layout.first_handed_over(progress.num_tokens)
            cuts = zip(block_tables, first_blocks, handed_over, strict=True)
            block_tables, first_blocks = tuple([ids[begin - first :] for ids, first, begin in cuts]), handed_over
        return SendChunk(attempt_id, progress.sent if count else end, count, block_tables, is_last, first_blocks)

    def _sent(self, chunk: SendChunk) -> None:
        if chunk.is_last:
            del self._progress[chunk.attempt_id]
        else:
            self._progress[chunk.attempt_id].sent = chunk.start + chunk.num_tokens

    def drop(self, attempt_id: str) -> None:
        """The attempt ended otherwise."""
        self._progress.pop(attempt_id, None)
