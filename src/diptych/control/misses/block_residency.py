"""Which worker's cache holds a block now, and how a block was lost: from the workers' KV events.

Unlike the router's index it predicts nothing, and it remembers what is gone: when, and for whose blocks.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """The content of a block left a cache. evicted_for: the request that needed the block ("": not known). is_crash:
    the worker ended, and its cache with it."""

    time_ns: int
    worker: int
    evicted_for: str = ""
    is_crash: bool = False


class BlockResidency:
    """All caches of a fleet. Memory: an entry for each block that is cached, and for the latest ``max_losses``."""

    def __init__(self, max_losses: int) -> None:
        self.max_losses = max_losses
        self._held: dict[bytes, int] = {}  # bit masks of workers
        self._lost: OrderedDict[bytes, BlockLoss] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def holders(self, block_hash: bytes) -> tuple[int, ...]:
        """The workers whose caches hold it."""
        mask = self._held.get(block_hash, 0)
        return tuple(worker for worker in range(mask.bit_length()) if mask >> worker & 1)

    def loss(self, block_hash: bytes) -> BlockLoss | None:
        """How it was lost last; None: it never was, or that is forgotten."""
        return self._lost.get(block_hash)

    def on_stored(self, worker: int, hashes: Iterable[bytes]) -> None:
        """The worker's cache holds these."""
        held, bit = self._held, 1 << worker
        for block_hash in hashes:
            held[block_hash] = held.get(block_hash, 0) | bit

    def on_evicted(
        self, worker: int, hashes: Sequence[bytes], evicted_for: Sequence[tuple[str, int]], time_ns: int
    ) -> None:
        """The worker's cache has given these up. evicted_for: (request, how many of them), in their order; empty: not
        known."""
        names = [name for name, count in evicted_for for _ in range(count)] or [""] * len(hashes)
        for block_hash, name in zip(hashes, names, strict=True):
            self._lose(block_hash, BlockLoss(time_ns, worker, name))

    def on_snapshot(self, worker: int, hashes: Iterable[bytes], time_ns: int) -> None:
        """The worker's cache holds these and nothing else."""
        now = set(hashes)
        for block_hash in self._held_by(worker):
            if block_hash not in now:
                self._lose(block_hash, BlockLoss(time_ns, worker))
        self.on_stored(worker, now)

    def on_worker_down(self, worker: int, time_ns: int) -> None:
        """The worker has ended."""
        for block_hash in self._held_by(worker):
            self._lose(block_hash, BlockLoss(time_ns, worker, is_crash=True))

    def _held_by(self, worker: int) -> list[bytes]:
        return [block_hash for block_hash, mask in self._held.items() if mask >> worker & 1]

    def _lose(self, block_hash: bytes, loss: BlockLoss) -> None:
        mask = self._held.get(block_hash, 0) & ~(1 << loss.worker)
        if mask:
            self._held[block_hash] = mask
        else:
            self._held.pop(block_hash, None)
        self._lost[block_hash] = loss
        self._lost.move_to_end(block_hash)
        if len(self._lost) > self.max_losses:
            self._lost.popitem(last=False)
