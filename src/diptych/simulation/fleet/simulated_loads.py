"""Loads of KV blocks under virtual time, one after the other at a constant pace: from a disk, or from other workers.

What is there is looked up when a load is over: until then it may have been overwritten.
"""

from collections.abc import Callable
from functools import partial

from diptych.control.engine.kvcache.tier_records import LoadBlocks, RunLoaded, TierEvent
from diptych.simulation.environment import MESSAGE, Environment


class SimulatedLoads:
    """block_ns: of one block. latency_ns: of a load, before its first block. take(load, block hash): whether this block
    is there, as it is read. report: gets the events."""

    def __init__(
        self,
        block_ns: int,
        latency_ns: int,
        environment: Environment,
        take: Callable[[LoadBlocks, bytes], bool],
        report: Callable[[TierEvent], None],
    ) -> None:
        self._block_ns = block_ns
        self._latency_ns = latency_ns
        self._environment = environment
        self._take = take
        self._report = report
        self._read_until = 0
        self._timers: dict[int, tuple[int, int, LoadBlocks]] = {}  # (timer, begin, load)

    def restart(self) -> None:
        """The process that asked is another one: nothing is under way any more."""
        for timer, _, _ in self._timers.values():
            self._environment.cancel(timer)
        self._timers.clear()
        self._read_until = self._environment.now

    def begin(self, load: LoadBlocks) -> None:
        """Read a load behind those that were begun before."""
        begin_ns = max(self._environment.now, self._read_until) + self._latency_ns
        self._read_until = begin_ns + len(load.hashes) * self._block_ns
        timer = self._environment.at(self._read_until, MESSAGE, partial(self._loaded, load, begin_ns))
        self._timers[load.load_id] = (timer, begin_ns, load)

    def cancel(self, load_id: int) -> None:
        """End a load now, if it is under way."""
        if load_id in self._timers:
            timer, begin_ns, load = self._timers[load_id]
            self._environment.cancel(timer)
            self._environment.at(self._environment.now, MESSAGE, partial(self._loaded, load, begin_ns))

    def _loaded(self, load: LoadBlocks, begin_ns: int) -> None:
        """Deliver as much of a load as was read by now, and is there."""
        if self._timers.pop(load.load_id, None) is None:
            return
        duration_ns = max(0, self._environment.now - begin_ns)
        num_read = len(load.hashes)
        if self._block_ns:
            num_read = min(num_read, duration_ns // self._block_ns)
        count = 0
        while count < num_read and self._take(load, load.hashes[count]):
            count += 1
        self._report(RunLoaded(load.load_id, count, duration_ns + self._latency_ns))
