"""The disk tier of a worker under virtual time: the same actions and events as the live one, at the pace of a disk.

Loads are read one after the other, stores written one after the other, each in whole blocks. Content lies in segments
like the live ones; when the capacity is reached, the segment that was least recently read or written goes.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from diptych.control.engine.kvcache.tier_records import (
    NO_PEER,
    CancelLoad,
    DiskContents,
    LoadBlocks,
    RunStored,
    StoreBlocks,
    TierAction,
    TierEvent,
)
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S
from diptych.simulation.environment import MESSAGE, Environment
from diptych.simulation.fleet.simulated_loads import SimulatedLoads

SEGMENT_BYTES, EXTENT_BLOCKS, MIN_SEGMENTS = 64 << 20, 64, 4  # as runtime/tiers has them
PAGE_BYTES = 4096
MEASURED_BLOCK_BYTES, ENDLESS_BYTES = 1 << 20, 1 << 50  # of a disk of which only the time of a block is known

# Bytes per second read and written, and the latency of a load. nvme4, nvme3: the rate of PCIe x4 times 0.8; sata: its
# line rate times 0.9; virtual: measured on the virtual disk of a cloud machine with direct input and output.
DISKS: dict[str, tuple[int, int, int]] = {
    "nvme4": (6_300_000_000, 6_300_000_000, 100_000),
    "nvme3": (3_150_000_000, 3_150_000_000, 100_000),
    "sata": (540_000_000, 540_000_000, 200_000),
    "virtual": (700_000_000, 640_000_000, 500_000),
}


@dataclass(frozen=True, slots=True)
class DiskModel:
    """capacity_bytes: the cap, as --kv-disk-gb gives it. block_bytes: of one block of a worker."""

    capacity_bytes: int
    block_bytes: int
    read_bytes_per_s: int
    write_bytes_per_s: int
    latency_ns: int = 0

    @classmethod
    def named(cls, name: str, capacity_bytes: int, block_bytes: int) -> "DiskModel":
        """A disk of the catalogue above. Raises ConfigError with the names there are."""
        if name not in DISKS:
            raise ConfigError(f"disk is {name!r}; one of {', '.join(DISKS)}", param="disk")
        return cls(capacity_bytes, block_bytes, *DISKS[name])

    @classmethod
    def measured(cls, read_block_ns: int) -> "DiskModel":
        """The disk of a worker of which is known what reading a block takes, and nothing else: it has room for
        everything, and writes as fast as it reads."""
        bytes_per_s = MEASURED_BLOCK_BYTES * NS_PER_S // max(1, read_block_ns)
        return cls(ENDLESS_BYTES, MEASURED_BLOCK_BYTES, bytes_per_s, bytes_per_s)

    @property
    def read_block_ns(self) -> int:
        """Reading one block."""
        return self.block_bytes * NS_PER_S // self.read_bytes_per_s

    @property
    def write_block_ns(self) -> int:
        """Writing one block."""
        return self.block_bytes * NS_PER_S // self.write_bytes_per_s


class SimulatedDisk:
    """One disk. ``report`` gets its events."""

    def __init__(self, model: DiskModel, environment: Environment, report: Callable[[TierEvent], None]) -> None:
        self._model = model
        self._environment = environment
        self._report = report
        segment = min(max(SEGMENT_BYTES, EXTENT_BLOCKS * model.block_bytes), model.capacity_bytes // MIN_SEGMENTS)
        self._segment_bytes = segment
        self._max_segments = model.capacity_bytes // segment if segment else 0
        self._segments: OrderedDict[int, list[bytes]] = OrderedDict()  # least recently used first
        self._used_bytes = 0  # of the open one, which is the newest
        self._open = 0
        self._segment_of: dict[bytes, int] = {}
        self._loads = SimulatedLoads(model.read_block_ns, model.latency_ns, environment, self._take, report)
        self._written_until = 0
        self._stores: list[int] = []  # their timers

    def restart(self) -> None:
        """The process of the worker is another one: nothing is under way any more, and it finds what is there."""
        self._loads.restart()
        for timer in self._stores:
            self._environment.cancel(timer)
        self._stores.clear()
        self._written_until = self._environment.now
        if self._segment_of:
            self._report(DiskContents(added=tuple(self._segment_of)))

    def act(self, action: TierAction) -> None:
        """Begin to carry out an action; those for peers are left alone."""
        if isinstance(action, LoadBlocks) and action.peer == NO_PEER:
            self._loads.begin(action)
        elif isinstance(action, StoreBlocks):
            begin_ns = max(self._environment.now, self._written_until)
            self._written_until = begin_ns + len(action.hashes) * self._model.write_block_ns
            self._stores.append(self._environment.at(self._written_until, MESSAGE, partial(self._stored, action)))
        elif isinstance(action, CancelLoad):
            self._loads.cancel(action.load_id)

    def _take(self, load: LoadBlocks, block_hash: bytes) -> bool:
        segment = self._segment_of.get(block_hash)
        if segment is not None:
            self._segments.move_to_end(segment)
        return segment is not None

    def _stored(self, store: StoreBlocks) -> None:
        self._stores.pop(0)  # they end in their order
        new = [block_hash for block_hash in store.hashes if block_hash not in self._segment_of]
        count = len(store.hashes)
        removed: tuple[bytes, ...] = ()
        if new:
            needed = PAGE_BYTES + len(new) * self._model.block_bytes
            if needed > self._segment_bytes:
                self._report(RunStored(store.store_id, len(store.hashes) - len(new)))
                return
            removed = self._make_room(needed)
            self._used_bytes += needed
            self._segments[self._open] += new
            self._segments.move_to_end(self._open)
            self._segment_of.update(dict.fromkeys(new, self._open))
        if new or removed:
            self._report(DiskContents(tuple(new), removed))
        self._report(RunStored(store.store_id, count))

    def _make_room(self, num_bytes: int) -> tuple[bytes, ...]:
        """A segment with room is open; what was deleted for it."""
        removed: list[bytes] = []
        if self._open not in self._segments or self._used_bytes + num_bytes > self._segment_bytes:
            self._open += 1
            self._segments[self._open], self._used_bytes = [], 0
            while len(self._segments) > self._max_segments:
                _, hashes = self._segments.popitem(last=False)
                removed += hashes
                for block_hash in hashes:
                    del self._segment_of[block_hash]
        return tuple(removed)
