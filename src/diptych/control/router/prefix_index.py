"""Which replica holds which blocks: an exact index from the replicas' own events, and predictions for what is coming.

One dictionary from block hash to a bit mask of replicas: a lookup walks the prompt once, however many replicas there
are. Owns sequence numbers and gaps: a replica whose events do not follow each other is known to be unknown until a
snapshot comes. Must never guess silently: predicted entries are kept apart, and are believed for one to two periods.
"""

from collections.abc import Iterable, Sequence
from itertools import islice, repeat, takewhile

from diptych.control.slo import NS_PER_S

PERIOD_NS = 15 * NS_PER_S  # a prediction is believed for one to two of these


class _Beliefs:
    """What was predicted in one period. heads: masks of the replicas that may hold a prompt from its first block.

    A prediction lies in ``chains`` under its first block until somebody asks for that, or its replica says something
    of it: most prompts are like no other, and are never looked at again.
    """

    __slots__ = ("blocks", "chains", "heads")

    def __init__(self, num_replicas: int) -> None:
        self.blocks: list[set[bytes]] = [set() for _ in range(num_replicas)]
        self.chains: list[dict[bytes, list[Sequence[bytes]]]] = [{} for _ in range(num_replicas)]
        self.heads: dict[bytes, int] = {}

    def add(self, replica: int, hashes: Sequence[bytes]) -> None:
        """A prediction."""
        head = hashes[0]
        self.chains[replica].setdefault(head, []).append(hashes)
        self.heads[head] = self.heads.get(head, 0) | 1 << replica

    def has(self, replica: int, block_hash: bytes) -> bool:
        """Whether the block is predicted (as the first one that is not known)."""
        return self.begins(replica, block_hash) or block_hash in self.blocks[replica]

    def begins(self, replica: int, block_hash: bytes) -> bool:
        """Whether predictions begin with the block; they become sets of blocks."""
        if block_hash not in self.chains[replica]:
            return False
        self.open(replica, block_hash)
        return True

    def open(self, replica: int, head: bytes) -> None:
        """The predictions that begin with this block become sets of blocks."""
        for hashes in self.chains[replica].pop(head, ()):
            self.blocks[replica].update(hashes)

    def open_all(self, replica: int) -> None:
        """All predictions of a replica become sets of blocks."""
        for head in list(self.chains[replica]):
            self.open(replica, head)

    def clear(self, replica: int) -> None:
        """The replica is gone (heads are only hints)."""
        self.blocks[replica].clear()
        self.chains[replica].clear()


class PrefixIndex:
    """Replicas 0 .. num_replicas - 1. Memory: one dictionary entry per distinct block."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._masks: dict[bytes, int] = {}
        self._blocks: list[set[bytes]] = [set() for _ in range(num_replicas)]  # what each replica has said it holds
        self._sequence = [0] * num_replicas  # of the last event heard
        self._has_gap = [False] * num_replicas
        self._believed = (_Beliefs(num_replicas), _Beliefs(num_replicas))  # of this period, of the one before
        self._period_end_ns = 0

    def on_events(
        self, replica: int, sequence: int, stored: Iterable[bytes] = (), evicted: Sequence[bytes] = ()
    ) -> bool:
        """One publication of a replica, numbered from 1. Evictions count before what is stored, as they happen.

        Returns False when publications are missing in between: the index then says nothing of this replica until
        ``on_snapshot``. A publication that was heard before is ignored.
        """
        if sequence <= self._sequence[replica]:
            return not self._has_gap[replica]
        if self._has_gap[replica] or sequence != self._sequence[replica] + 1:
            self._forget_blocks(replica)
            self._has_gap[replica] = True
            return False
        self._sequence[replica] = sequence
        if evicted:
            for beliefs in self._believed:
                beliefs.open_all(replica)
        for block_hash in evicted:
            self._discard(replica, block_hash)
        for block_hash in stored:
            self._add(replica, block_hash)
        return True

    def on_snapshot(self, replica: int, sequence: int, hashes: Iterable[bytes]) -> None:
        """All that the replica holds, as of its publication ``sequence``. An older one than was heard is ignored."""
        if sequence < self._sequence[replica]:
            return
        self._forget_blocks(replica)
        self._sequence[replica] = sequence
        self._has_gap[replica] = False
        for block_hash in hashes:
            self._add(replica, block_hash)

    def predict(self, replica: int, hashes: Sequence[bytes], now: int) -> None:
        """A prompt was just sent there: its blocks will soon be. Believed until they are evicted, or for a while."""
        if not hashes:
            return
        self._pass_time(now)
        self._believed[0].add(replica, hashes)

    def matches(self, hashes: Sequence[bytes], now: int) -> list[int]:
        """For each replica, how many leading blocks of the prompt it holds or is about to hold."""
        self._pass_time(now)
        if not hashes:
            return [0] * self.num_replicas
        new, old = self._believed
        first, end = hashes[0], len(hashes)
        lengths = self._known(hashes)
        begins = self._masks.get(first, 0) | new.heads.get(first, 0) | old.heads.get(first, 0)
        while begins:
            low = begins & -begins
            replica = low.bit_length() - 1
            length = lengths[replica]
            is_there = length < end and (new.has(replica, hashes[length]) or old.has(replica, hashes[length]))
            while is_there:
                lengths[replica] = length = self._follow(replica, hashes, length)
                is_there = length < end and (new.begins(replica, hashes[length]) or old.begins(replica, hashes[length]))
            begins ^= low
        return lengths

    def _known(self, hashes: Sequence[bytes]) -> list[int]:
        """Leading blocks that each replica has said it holds: one walk for all, until a single one is left."""
        lengths = [0] * self.num_replicas
        mask = (1 << self.num_replicas) - 1
        for index, held in enumerate(map(self._masks.get, hashes, repeat(0))):
            held &= mask
            if held == mask:
                continue
            if index:  # (at the first block, nothing is their length already)
                _mark(lengths, mask ^ held, index)
            mask = held
            if not mask & (mask - 1):
                if mask:
                    replica = mask.bit_length() - 1
                    lengths[replica] = index + _leading(self._blocks[replica], hashes, index)
                return lengths
        _mark(lengths, mask, len(hashes))
        return lengths

    def _follow(self, replica: int, hashes: Sequence[bytes], length: int) -> int:
        """Leading blocks of one replica, known or predicted, when block ``length`` is predicted. By halving: what is
        predicted has no gaps, unless a block was evicted out of its middle meanwhile."""
        new, old, known = self._believed[0].blocks[replica], self._believed[1].blocks[replica], self._blocks[replica]
        low, high = length, len(hashes)  # block ``low`` is there, block ``high`` is not
        while high - low > 1:
            middle = (low + high) // 2
            block_hash = hashes[middle]
            if block_hash in new or block_hash in old or block_hash in known:
                low = middle
            else:
                high = middle
        return high

    def remove(self, replica: int) -> None:
        """The replica is gone, and a later one of this number starts empty, with publication 1."""
        self._forget_blocks(replica)
        self._sequence[replica] = 0
        self._has_gap[replica] = False
        for beliefs in self._believed:
            beliefs.clear(replica)

    def check(self) -> None:
        """Assert that the masks are the union of what each replica holds (for tests)."""
        union: dict[bytes, int] = {}
        for replica, blocks in enumerate(self._blocks):
            for block_hash in blocks:
                union[block_hash] = union.get(block_hash, 0) | 1 << replica
        assert union == self._masks

    def _add(self, replica: int, block_hash: bytes) -> None:
        self._blocks[replica].add(block_hash)
        for beliefs in self._believed:
            if block_hash in beliefs.chains[replica]:
                beliefs.open(replica, block_hash)
        self._masks[block_hash] = self._masks.get(block_hash, 0) | 1 << replica

    def _discard(self, replica: int, block_hash: bytes) -> None:
        for beliefs in self._believed:
            beliefs.blocks[replica].discard(block_hash)
        if block_hash not in self._blocks[replica]:
            return
        self._blocks[replica].discard(block_hash)
        mask = self._masks[block_hash] & ~(1 << replica)
        if mask:
            self._masks[block_hash] = mask
        else:
            del self._masks[block_hash]

    def _forget_blocks(self, replica: int) -> None:
        for beliefs in self._believed:
            beliefs.open_all(replica)
        for block_hash in list(self._blocks[replica]):
            self._discard(replica, block_hash)

    def _pass_time(self, now: int) -> None:
        """Forget what was predicted in the period before the last one."""
        if now >= self._period_end_ns:
            is_recent = now < self._period_end_ns + PERIOD_NS
            before = self._believed[0] if is_recent else _Beliefs(self.num_replicas)
            self._believed = (_Beliefs(self.num_replicas), before)
            self._period_end_ns = now + PERIOD_NS


def _leading(held: set[bytes], hashes: Sequence[bytes], start: int) -> int:
    """How many blocks from ``start`` on are held without a gap."""
    return len(list(takewhile(held.__contains__, islice(hashes, start, None))))


def _mark(lengths: list[int], lost: int, length: int) -> None:
    """This is the length of the replicas in ``lost``."""
    while lost:
        low = lost & -lost
        lengths[low.bit_length() - 1] = length
        lost ^= low
