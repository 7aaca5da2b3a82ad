"""Host blocks that the workers of a host read from each other, under virtual time: the same actions and events as the
live ones (runtime/tiers/peer_reader.py), at the pace of a copy.

What a peer has is looked up when a load is over: until then its owner may have written something else there.
"""

from collections.abc import Callable
from functools import partial

from diptych.control.engine.kvcache.block_pool import BlockPool
from diptych.control.engine.kvcache.tier_records import (
    NO_PEER,
    CancelLoad,
    LoadBlocks,
    RunLoaded,
    ShareBlocks,
    TierAction,
    TierEvent,
)
from diptych.simulation.environment import MESSAGE, Environment


class SharedContents:
    """What each worker of a fleet has said to hold."""

    def __init__(self) -> None:
        self._pools: dict[int, BlockPool] = {}
        self._contents: dict[int, dict[int, bytes]] = {}  # worker -> host block -> content

    def begin(self, worker: int, pool: BlockPool) -> None:
        """A process begins: nothing of the one before it can be found."""
        self._pools[worker] = pool
        self._contents[worker] = {}

    def share(self, worker: int, action: ShareBlocks) -> None:
        """The worker holds these from now on, until the blocks are given out again."""
        self._contents[worker].update(zip(action.host_blocks, action.hashes, strict=True))

    def has(self, worker: int, block_hash: bytes) -> bool:
        """Whether this content can be read there now."""
        block = self._pools[worker].prefix_cache.get(block_hash)
        return block is not None and self._contents[worker].get(block) == block_hash


class SimulatedPeerReader:
    """The reader of worker ``number``: one load after the other, ``block_ns`` for each block. ``report`` gets its
    events."""

    def __init__(
        self,
        number: int,
        shared: SharedContents,
        block_ns: int,
        environment: Environment,
        report: Callable[[TierEvent], None],
    ) -> None:
        self._number = number
        self._shared = shared
        self._block_ns = block_ns
        self._environment = environment
        self._report = report
        self._read_until = 0
        self._timers: dict[int, tuple[int, int, LoadBlocks]] = {}  # loads: (timer, begin, load)

    def restart(self, pool: BlockPool) -> None:
        """The process of the worker is another one, with these host blocks."""
        for timer, _, _ in self._timers.values():
            self._environment.cancel(timer)
        self._timers.clear()
        self._read_until = self._environment.now
        self._shared.begin(self._number, pool)

    def act(self, action: TierAction) -> None:
        """Begin to carry out an action; those for a disk are left alone."""
        now = self._environment.now
        if isinstance(action, ShareBlocks):
            self._shared.share(self._number, action)
        elif isinstance(action, LoadBlocks) and action.peer != NO_PEER:
            begin_ns = max(now, self._read_until)
            self._read_until = begin_ns + len(action.hashes) * self._block_ns
            timer = self._environment.at(self._read_until, MESSAGE, partial(self._loaded, action, begin_ns))
            self._timers[action.load_id] = (timer, begin_ns, action)
        elif isinstance(action, CancelLoad) and action.load_id in self._timers:
            timer, begin_ns, load = self._timers[action.load_id]
            self._environment.cancel(timer)
            self._environment.at(now, MESSAGE, partial(self._loaded, load, begin_ns))

    def _loaded(self, load: LoadBlocks, begin_ns: int) -> None:
        """As much of it as was read by now, and is there."""
        if self._timers.pop(load.load_id, None) is None:
            return
        duration_ns = max(0, self._environment.now - begin_ns)
        num_read = len(load.hashes)
        if self._block_ns:
            num_read = min(num_read, duration_ns // self._block_ns)
        count = 0
        while count < num_read and self._shared.has(load.peer, load.hashes[count]):
            count += 1
        self._report(RunLoaded(load.load_id, count, duration_ns))
