"""Which replica holds which blocks: an exact index from the replicas' own events, and predictions for what is coming.

One dictionary from block hash to a bit mask of replicas: a lookup walks the prompt once, however many replicas there
are. Owns sequence numbers and gaps: a replica whose events do not follow each other is known to be unknown until a
snapshot comes. Must never guess silently: predicted entries are kept apart, and are believed for one to two periods.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat

from diptych.control.slo import NS_PER_S

PERIOD_NS = 15 * NS_PER_S  # a prediction is believed for one to two of these


class PrefixIndex:
    """Replicas 0 .. num_replicas - 1. Memory: one dictionary entry per distinct block."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._masks: dict[bytes, int] = {}
        self._blocks: list[set[bytes]] = [set() for _ in range(num_replicas)]  # what each replica has said it holds
        self._host: dict[bytes, int] = {}  # masks of the host tiers
        self._sequence = [0] * num_replicas  # of the last event heard
        self._has_gap = [False] * num_replicas
        self._believed: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})  # masks of this period, of the one before
        self._period_end_ns = 0

    def has_gap(self, replica: int) -> bool:
        """Whether events of this replica were missed: ask it for a snapshot."""
        return self._has_gap[replica]

    def num_blocks(self, replica: int) -> int:
        """Blocks that the replica is known to hold."""
        return len(self._blocks[replica])

    @property
    def has_host_blocks(self) -> bool:
        """Whether any replica has said that blocks lie in its host tier."""
        return bool(self._host)

    def on_events(
        self, replica: int, sequence: int, stored: Iterable[bytes] = (), evicted: Iterable[bytes] = ()
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

    def on_host_events(self, replica: int, stored: Iterable[bytes] = (), evicted: Iterable[bytes] = ()) -> None:
        """Blocks came into the replica's host tier, or left it (in order, like ``on_events``; they have no numbers of
        their own)."""
        bit = 1 << replica
        for block_hash in evicted:
            _clear(self._host, block_hash, bit)
        for block_hash in stored:
            self._host[block_hash] = self._host.get(block_hash, 0) | bit

    def predict(self, replica: int, hashes: Sequence[bytes], now: int) -> None:
        """A prompt was just sent there: its blocks will soon be. Believed until they are evicted, or for a while."""
        self._pass_time(now)
        masks, bit = self._believed[0], 1 << replica
        if masks.keys().isdisjoint(hashes):  # mostly, and then twice as fast
            masks.update(dict.fromkeys(hashes, bit))
            return
        for block_hash in hashes:
            masks[block_hash] = masks.get(block_hash, 0) | bit

    def matches(self, hashes: Sequence[bytes], now: int) -> list[int]:
        """For each replica, how many leading blocks of the prompt it holds or is about to hold."""
        self._pass_time(now)
        return self._leading(hashes, self._masks, self._believed)

    def host_matches(self, hashes: Sequence[bytes]) -> list[int]:
        """For each replica, how many leading blocks of the prompt it holds on the device or in its host tier."""
        return self._leading(hashes, self._masks, (self._host,))

    def _leading(
        self, hashes: Sequence[bytes], first: dict[bytes, int], others: tuple[dict[bytes, int], ...]
    ) -> list[int]:
        """For each replica, how many leading blocks any of the tables gives it; ``first`` suffices mostly."""
        lengths = [0] * self.num_replicas
        mask = (1 << self.num_replicas) - 1
        for index, held in enumerate(map(first.get, hashes, repeat(0))):
            held &= mask
            if held == mask:
                continue
            for table in others:
                held |= table.get(hashes[index], 0) & mask
            lost = mask ^ held
            mask = held
            while lost and index:  # (at the first block, nothing is their length already)
                low = lost & -lost
                lengths[low.bit_length() - 1] = index
                lost ^= low
            if not mask:
                return lengths
        while mask:
            low = mask & -mask
            lengths[low.bit_length() - 1] = len(hashes)
            mask ^= low
        return lengths

    def remove(self, replica: int) -> None:
        """The replica is gone, and a later one of this number starts empty, with publication 1."""
        self._forget_blocks(replica)
        self._sequence[replica] = 0
        self._has_gap[replica] = False
        for masks in self._believed:
            for block_hash in masks:
                masks[block_hash] &= ~(1 << replica)
        for block_hash in list(self._host):
            _clear(self._host, block_hash, 1 << replica)

    def check(self) -> None:
        """Assert that the masks are the union of what each replica holds (for tests)."""
        union: dict[bytes, int] = {}
        for replica, blocks in enumerate(self._blocks):
            for block_hash in blocks:
                union[block_hash] = union.get(block_hash, 0) | 1 << replica
        assert union == self._masks

    def _add(self, replica: int, block_hash: bytes) -> None:
        self._blocks[replica].add(block_hash)
        self._masks[block_hash] = self._masks.get(block_hash, 0) | 1 << replica

    def _discard(self, replica: int, block_hash: bytes) -> None:
        for masks in self._believed:
            if block_hash in masks:
                masks[block_hash] &= ~(1 << replica)
        if block_hash not in self._blocks[replica]:
            return
        self._blocks[replica].discard(block_hash)
        _clear(self._masks, block_hash, 1 << replica)

    def _forget_blocks(self, replica: int) -> None:
        for block_hash in list(self._blocks[replica]):
            self._discard(replica, block_hash)

    def _pass_time(self, now: int) -> None:
        """Forget what was predicted in the period before the last one."""
        if now >= self._period_end_ns:
            is_recent = now < self._period_end_ns + PERIOD_NS
            self._believed = ({}, self._believed[0] if is_recent else {})
            self._period_end_ns = now + PERIOD_NS


def _clear(masks: dict[bytes, int], block_hash: bytes, bit: int) -> None:
    """Take one replica out of a block's mask."""
    mask = masks.get(block_hash, 0) & ~bit
    if mask:
        masks[block_hash] = mask
    else:
        masks.pop(block_hash, None)
