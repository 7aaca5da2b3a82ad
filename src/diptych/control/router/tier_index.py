"""What lies in one tier below the workers' KV caches: who can bring up which blocks, from the workers' own reports.

Nothing is predicted: what comes to a tier comes there long before it is asked for. One dictionary from block hash to a
bit mask of workers, so that what many workers find in one folder is one entry. Bounded: with ``max_blocks`` entries
nothing is added until others leave. So the index may know too little, never more than was reported.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from diptych.control.router.event_order import EventOrder

MAX_BLOCKS = 1 << 19  # about 100 MB of memory; at 32 tokens a block, 16 million tokens


class TierIndex:
    """Workers 0, 1, ... Beyond ``max_blocks``, further blocks are left out."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._masks: dict[bytes, int] = {}
        self._order = EventOrder()

    def __len__(self) -> int:
        return len(self._masks)

    def add_worker(self) -> None:
        """One more, with the next number."""
        self._order.add_worker()

    def on_events(
        self, worker: int, sequence: int, stored: Iterable[bytes] = (), evicted: Iterable[bytes] = ()
    ) -> bool:
        """Take in events as PrefixIndex.on_events does."""
        if not self._order.take(worker, sequence):
            if not self._order.is_complete(worker):
                self._forget(worker)
            return self._order.is_complete(worker)
        for block_hash in evicted:
            self._discard(worker, block_hash)
        self._add(worker, stored)
        return True

    def on_snapshot(self, worker: int, sequence: int, hashes: Iterable[bytes]) -> None:
        """Take in a snapshot as PrefixIndex.on_snapshot does."""
        if self._order.begin_at(worker, sequence):
            self._forget(worker)
            self._add(worker, hashes)

    def remove(self, worker: int) -> None:
        """The worker is gone, and a later one of this number starts with event 1."""
        self._forget(worker)
        self._order.begin_again(worker)

    def run(self, worker: int, hashes: Sequence[bytes], start: int) -> int:
        """How many blocks of the prompt, from the block ``start`` on, lie there without a gap."""
        bit, masks, count = 1 << worker, self._masks, 0
        for block_hash in islice(hashes, start, None):
            if not masks.get(block_hash, 0) & bit:
                break
            count += 1
        return count

    def shared_run(self, workers: int, hashes: Sequence[bytes], start: int) -> tuple[int, int]:
        """How many blocks of the prompt, from the block ``start`` on, one of these ``workers`` (a bit mask) has at
        most without a gap, and the first worker that has them (-1: none has any)."""
        holders, masks, count = workers, self._masks, 0
        for block_hash in islice(hashes, start, None):
            left = masks.get(block_hash, 0) & holders
            if not left:
                break
            holders = left
            count += 1
        return count, (holders & -holders).bit_length() - 1 if count else -1

    def _add(self, worker: int, hashes: Iterable[bytes]) -> None:
        bit, masks = 1 << worker, self._masks
        for block_hash in hashes:
            mask = masks.get(block_hash, 0)
            if mask or len(masks) < self._max_blocks:
                masks[block_hash] = mask | bit

    def _discard(self, worker: int, block_hash: bytes) -> None:
        mask = self._masks.get(block_hash, 0) & ~(1 << worker)
        if mask:
            self._masks[block_hash] = mask
        else:
            self._masks.pop(block_hash, None)

    def _forget(self, worker: int) -> None:
        bit = 1 << worker
        for block_hash in [block_hash for block_hash, mask in self._masks.items() if mask & bit]:
            self._discard(worker, block_hash)
