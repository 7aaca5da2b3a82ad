"""A Driver with a disk below its cache: it stores and gives back what the executor's host blocks hold, after a while,
and fails when it is told to."""

import random
from dataclasses import dataclass, field

from diptych.control.engine.kvcache.tier_records import (
    NO_PEER,
    CancelLoad,
    DiskContents,
    DiskState,
    LoadBlocks,
    RunLoaded,
    RunStored,
    ShareBlocks,
    StoreBlocks,
    TierEvent,
)
from diptych.control.step import SchedulerOutput
from tests.control.driver import Driver

BLOCK_NS = 100_000


@dataclass
class TieredDriver(Driver):
    """delay_ns: what a load or a store takes besides BLOCK_NS a block. faults: of a random number, how often a load
    gives less than was asked for. shared: host block -> (hash, content) that peers may read, until it is written again.
    peers: the same of other workers."""

    delay_ns: int = 1_000_000
    fault_share: float = 0.0
    contents: dict[bytes, list[object]] = field(default_factory=dict)  # the disk
    loads: list[LoadBlocks] = field(default_factory=list)  # all of them
    cancelled: set[int] = field(default_factory=set)
    shared: dict[int, tuple[bytes, list[object]]] = field(default_factory=dict)
    peers: dict[int, dict[int, tuple[bytes, list[object]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._due: list[tuple[int, int, TierEvent, LoadBlocks | None]] = []
        self._disk_rng = random.Random(self.seed)
        self._number = 0
        if self.contents:
            self.core.on_tier(DiskContents(added=tuple(self.contents)), self.now)

    def step(self) -> SchedulerOutput | None:
        """One step; when there is nothing to compute, the time goes on to what the disk does next."""
        while True:
            self.serve_disk()
            output = super().step()
            for _, host_block in output.swap_out if output is not None else ():
                self.shared.pop(host_block, None)
            self.act()
            if output is not None or not self._due:
                return output
            deadline_ns = self.core.next_expiry_ns
            due_ns = min(entry[0] for entry in self._due)
            self.now = max(self.now, due_ns if deadline_ns is None else min(due_ns, deadline_ns))

    def serve_disk(self) -> None:
        """Report what the disk has done by now."""
        self.act()
        self._due.sort(key=lambda entry: entry[:2])
        while self._due and self._due[0][0] <= self.now:
            _, _, event, load = self._due.pop(0)
            if load is not None and isinstance(event, RunLoaded):
                event = self._read(load, event)
            self.core.on_tier(event, self.now)
        self.core.expire(self.now)
        self.act()

    def act(self) -> None:
        """Begin what the core asks for."""
        for action in self.core.kv.tiers.take_actions():
            self._number += 1
            if isinstance(action, CancelLoad):
                self.cancelled.add(action.load_id)
                continue
            if isinstance(action, ShareBlocks):
                for block_hash, block in zip(action.hashes, action.host_blocks, strict=True):
                    self.shared[block] = block_hash, list(self.executor.host[block])
                continue
            end_ns = self.now + self.delay_ns + BLOCK_NS * len(action.hashes)
            if isinstance(action, StoreBlocks):
                for block_hash, block in zip(action.hashes, action.host_blocks, strict=True):
                    self.contents[block_hash] = list(self.executor.host[block])
                stored = RunStored(action.store_id, len(action.hashes))
                self._due.append((end_ns, self._number, stored, None))
                self._due.append((end_ns, self._number, DiskContents(added=action.hashes), None))
                continue
            self.loads.append(action)
            assert all(self.core.kv.host.references(block) for block in action.host_blocks)
            for block in action.host_blocks:
                self.shared.pop(block, None)
                self.executor.host[block] = ["half read"] * self.executor.block_size
            count = len(action.hashes)
            if self._disk_rng.random() < self.fault_share:
                count = self._disk_rng.randrange(len(action.hashes))
            self._due.append((end_ns, self._number, RunLoaded(action.load_id, count, BLOCK_NS * count), action))

    def _read(self, load: LoadBlocks, event: RunLoaded) -> RunLoaded:
        """As much of it as is there."""
        there = self.contents if load.peer == NO_PEER else dict(self.peers.get(load.peer, {}).values())
        count = 0
        while count < event.num_blocks and load.hashes[count] in there:
            self.executor.host[load.host_blocks[count]] = list(there[load.hashes[count]])
            count += 1
        return RunLoaded(load.load_id, count, BLOCK_NS * count)

    def lose(self, block_hash: bytes) -> None:
        """The disk does not have this content any more."""
        del self.contents[block_hash]
        self.core.on_tier(DiskContents(removed=(block_hash,)), self.now)

    def switch_off(self) -> None:
        """The disk has died."""
        self.core.on_tier(DiskState(False, "input/output error"), self.now)
