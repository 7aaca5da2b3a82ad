"""Which worker holds which blocks: an exact index from the workers' own events, and predictions for what is coming.

One dictionary from block hash to a bit mask of workers: a lookup walks the prompt once, however many workers there are.
Of a worker with a missing event nothing is known until a snapshot comes. Predictions are kept apart from what workers
reported, and count for one to two periods. Workers whose layers attend to windows report boundaries alone: of those the
deepest counts.
"""

from collections.abc import Iterable, Sequence
from itertools import islice, repeat, takewhile

from diptych.control.router.event_order import EventOrder
from diptych.control.slo import NS_PER_S

PERIOD_NS = 15 * NS_PER_S  # a prediction is believed for one to two of these


class _Beliefs:
    """What was predicted in one period. heads: masks of the workers that may hold a prompt from its first block.

    A prediction lies in ``chains`` under its first block until that block is looked up, or its worker reports it: most
    prompts are like no other, and are never looked at again.
    """

    __slots__ = ("blocks", "chains", "heads")

    def __init__(self, num_workers: int) -> None:
        self.blocks: list[set[bytes]] = [set() for _ in range(num_workers)]
        self.chains: list[dict[bytes, list[Sequence[bytes]]]] = [{} for _ in range(num_workers)]
        self.heads: dict[bytes, int] = {}

    def add_worker(self) -> None:
        """One more."""
        self.blocks.append(set())
        self.chains.append({})

    def add(self, worker: int, hashes: Sequence[bytes]) -> None:
        """A prediction."""
        head = hashes[0]
        self.chains[worker].setdefault(head, []).append(hashes)
        self.heads[head] = self.heads.get(head, 0) | 1 << worker

    def has(self, worker: int, block_hash: bytes) -> bool:
        """Whether the block is predicted (as the first one that is not known)."""
        return self.begins(worker, block_hash) or block_hash in self.blocks[worker]

    def begins(self, worker: int, block_hash: bytes) -> bool:
        """Whether predictions begin with the block; they become sets of blocks."""
        if block_hash not in self.chains[worker]:
            return False
        self.open(worker, block_hash)
        return True

    def open(self, worker: int, head: bytes) -> None:
        """The predictions that begin with this block become sets of blocks."""
        for hashes in self.chains[worker].pop(head, ()):
            self.blocks[worker].update(hashes)

    def open_all(self, worker: int) -> None:
        """All predictions of a worker become sets of blocks."""
        for head in list(self.chains[worker]):
            self.open(worker, head)

    def clear(self, worker: int) -> None:
        """The worker is gone (heads are only hints)."""
        self.blocks[worker].clear()
        self.chains[worker].clear()


class PrefixIndex:
    """Workers 0 .. num_workers - 1. Memory: one dictionary entry per distinct block."""

    def __init__(self, num_workers: int = 0) -> None:
        self.num_workers = 0
        self._masks: dict[bytes, int] = {}
        self._blocks: list[set[bytes]] = []  # what each worker has reported
        self._order = EventOrder()
        self._at_boundaries = 0  # mask of the workers that report boundaries alone
        self._believed = (_Beliefs(0), _Beliefs(0))  # of this period, of the one before
        self._period_end_ns = 0
        for _ in range(num_workers):
            self.add_worker()

    def add_worker(self) -> None:
        """One more, with the next number."""
        self.num_workers += 1
        self._blocks.append(set())
        self._order.add_worker()
        for beliefs in self._believed:
            beliefs.add_worker()

    def set_boundaries(self, worker: int, *, only: bool) -> None:
        """Whether what this worker reports are boundaries: prefixes of prompts behind which computing may go on, while
        nothing is said of the blocks before."""
        bit = 1 << worker
        self._at_boundaries = self._at_boundaries | bit if only else self._at_boundaries & ~bit

    def on_events(
        self, worker: int, sequence: int, stored: Iterable[bytes] = (), evicted: Sequence[bytes] = ()
    ) -> bool:
        """One KV event of a worker, numbered from 1. Evictions count before stored blocks, as they happen.

        Returns False when events are missing in between: the index then knows nothing of this worker until
        ``on_snapshot``. An event that came before is ignored.
        """
        if not self._order.take(worker, sequence):
            if not self._order.is_complete(worker):
                self._forget_blocks(worker)
            return self._order.is_complete(worker)
        if evicted:
            for beliefs in self._believed:
                beliefs.open_all(worker)
        self._discard(worker, evicted)
        self._add(worker, stored)
        return True

    def on_snapshot(self, worker: int, sequence: int, hashes: Iterable[bytes]) -> None:
        """All that the worker holds, as of its event ``sequence``. A snapshot older than the last event is ignored."""
        if not self._order.begin_at(worker, sequence):
            return
        self._forget_blocks(worker)
        self._add(worker, hashes)

    def predict(self, worker: int, hashes: Sequence[bytes], now: int) -> None:
        """A prompt was just sent there: its blocks will soon be. Believed until they are evicted, or for a while."""
        if not hashes:
            return
        self._pass_time(now)
        self._believed[0].add(worker, hashes)

    def matches(self, hashes: Sequence[bytes], now: int) -> list[int]:
        """Leading blocks of the prompt that each worker holds or is about to hold."""
        self._pass_time(now)
        if not hashes:
            return [0] * self.num_workers
        new, old = self._believed
        first, end = hashes[0], len(hashes)
        lengths = self._known(hashes)
        begins = self._masks.get(first, 0) | new.heads.get(first, 0) | old.heads.get(first, 0)
        if self._at_boundaries:
            begins |= self._find_boundaries(hashes, lengths)
        while begins:
            low = begins & -begins
            worker = low.bit_length() - 1
            length = lengths[worker]
            is_there = length < end and (new.has(worker, hashes[length]) or old.has(worker, hashes[length]))
            while is_there:
                lengths[worker] = length = self._follow(worker, hashes, length)
                is_there = length < end and (new.begins(worker, hashes[length]) or old.begins(worker, hashes[length]))
            begins ^= low
        return lengths

    def _find_boundaries(self, hashes: Sequence[bytes], lengths: list[int]) -> int:
        """Set the lengths of workers that report boundaries alone to the deepest of each; returns the mask of those
        that have one."""
        left, masks, found = self._at_boundaries, self._masks, 0
        _mark(lengths, left, 0)
        for index in range(len(hashes), 0, -1):
            held = masks.get(hashes[index - 1], 0) & left
            if held:
                _mark(lengths, held, index)
                found |= held
                left ^= held
                if not left:
                    break
        return found

    def _known(self, hashes: Sequence[bytes]) -> list[int]:
        """Leading blocks that each worker has reported: one walk for all, until a single worker is left."""
        lengths = [0] * self.num_workers
        mask = (1 << self.num_workers) - 1
        for index, held in enumerate(map(self._masks.get, hashes, repeat(0))):
            held &= mask
            if held == mask:
                continue
            if index:  # (at the first block, nothing is their length already)
                _mark(lengths, mask ^ held, index)
            mask = held
            if not mask & (mask - 1):
                if mask:
                    worker = mask.bit_length() - 1
                    lengths[worker] = index + _leading(self._blocks[worker], hashes, index)
                return lengths
        _mark(lengths, mask, len(hashes))
        return lengths

    def _follow(self, worker: int, hashes: Sequence[bytes], length: int) -> int:
        """Leading blocks of one worker, known or predicted, when block ``length`` is predicted. By halving: what is
        predicted has no gaps, unless a block was evicted out of its middle meanwhile."""
        new, old, known = self._believed[0].blocks[worker], self._believed[1].blocks[worker], self._blocks[worker]
        low, high = length, len(hashes)  # block ``low`` is there, block ``high`` is not
        while high - low > 1:
            middle = (low + high) // 2
            block_hash = hashes[middle]
            if block_hash in new or block_hash in old or block_hash in known:
                low = middle
            else:
                high = middle
        return high

    def remove(self, worker: int) -> None:
        """The worker is gone, and a later one of this number starts empty, with event 1."""
        self._forget_blocks(worker)
        self._order.begin_again(worker)
        for beliefs in self._believed:
            beliefs.clear(worker)

    def check(self) -> None:
        """Assert that the masks are the union of what each worker holds (for tests)."""
        union: dict[bytes, int] = {}
        for worker, blocks in enumerate(self._blocks):
            for block_hash in blocks:
                union[block_hash] = union.get(block_hash, 0) | 1 << worker
        assert union == self._masks

    def _add(self, worker: int, hashes: Iterable[bytes]) -> None:
        held, masks, bit = self._blocks[worker], self._masks, 1 << worker
        new, old = self._believed[0].chains[worker], self._believed[1].chains[worker]
        for block_hash in hashes:
            held.add(block_hash)
            masks[block_hash] = masks.get(block_hash, 0) | bit
            if block_hash in new:
                self._believed[0].open(worker, block_hash)
            if block_hash in old:
                self._believed[1].open(worker, block_hash)

    def _discard(self, worker: int, hashes: Sequence[bytes]) -> None:
        held, masks, rest = self._blocks[worker], self._masks, ~(1 << worker)
        for beliefs in self._believed:
            beliefs.blocks[worker].difference_update(hashes)
        for block_hash in hashes:
            if block_hash in held:
                held.remove(block_hash)
                mask = masks[block_hash] & rest
                if mask:
                    masks[block_hash] = mask
                else:
                    del masks[block_hash]

    def _forget_blocks(self, worker: int) -> None:
        for beliefs in self._believed:
            beliefs.open_all(worker)
        self._discard(worker, list(self._blocks[worker]))

    def _pass_time(self, now: int) -> None:
        """Forget what was predicted in the period before the last one."""
        if now >= self._period_end_ns:
            is_recent = now < self._period_end_ns + PERIOD_NS
            before = self._believed[0] if is_recent else _Beliefs(self.num_workers)
            self._believed = (_Beliefs(self.num_workers), before)
            self._period_end_ns = now + PERIOD_NS


def _leading(held: set[bytes], hashes: Sequence[bytes], start: int) -> int:
    """How many blocks from ``start`` on are held without a gap."""
    return len(list(takewhile(held.__contains__, islice(hashes, start, None))))


def _mark(lengths: list[int], lost: int, length: int) -> None:
    """This is the length of the workers in ``lost``."""
    while lost:
        low = lost & -lost
        lengths[low.bit_length() - 1] = length
        lost ^= low
