"""Host blocks that the workers of a host read from each other, under virtual time: the same actions and events as the
live ones (runtime/tiers/tier_io.py), at the pace of a copy.
"""

from collections.abc import Callable

from diptych.control.engine.kvcache.block_pool import BlockPool
from diptych.control.engine.kvcache.tier_records import (
    NO_PEER,
    CancelLoad,
    LoadBlocks,
    ShareBlocks,
    TierAction,
    TierEvent,
)
from diptych.simulation.environment import Environment
from diptych.simulation.fleet.simulated_loads import SimulatedLoads


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
        self._loads = SimulatedLoads(block_ns, 0, environment, self._has, report)

    def restart(self, pool: BlockPool) -> None:
        """The process of the worker is another one, with these host blocks."""
        self._loads.restart()
        self._shared.begin(self._number, pool)

    def act(self, action: TierAction) -> None:
        """Begin to carry out an action; those for a disk are left alone."""
        if isinstance(action, ShareBlocks):
            self._shared.share(self._number, action)
        elif isinstance(action, LoadBlocks) and action.peer != NO_PEER:
            self._loads.begin(action)
        elif isinstance(action, CancelLoad):
            self._loads.cancel(action.load_id)

    def _has(self, load: LoadBlocks, block_hash: bytes) -> bool:
        return self._shared.has(load.peer, block_hash)
