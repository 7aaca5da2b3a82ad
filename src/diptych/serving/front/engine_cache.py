"""What the prefix cache of one engine holds, as the router is told: from the engine's own events, or assumed from the
prompts that it was sent. Either way it is told by numbered KVEvents, as by workers of ours.

As long as events do not say everything (see SourceState), both count: a block is held when the events say so, or when
it is assumed. No event comes for a block that was cached before the first one that was read.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from diptych.base.limited_log import LimitedLog, kind_of
from diptych.control.events import Event, KVEvents, KVSnapshot
from diptych.control.router.assumed_cache import AssumedCache
from diptych.control.router.kv_bridge import KVBridge
from diptych.control.router.kv_source import KVSource, SourceChange, SourceState
from diptych.control.slo import NS_PER_S
from diptych.serving.failures.watched_tasks import start_watched
from diptych.serving.front.engine_spec import EngineSpec, FrontOptions
from diptych.serving.front.kv_events import KVEventReader

logger = logging.getLogger(__name__)

AGAIN_S = 1.0  # between a failure and the next look

Report = Callable[[Sequence[Event]], None]
SPARE_BLOCKS = 1024  # by which an engine may have more blocks than it says


class EngineCache:
    """``begin`` it whenever the engine has come up, and ``close`` it when it is gone."""

    def __init__(self, options: FrontOptions, spec: EngineSpec, clock: Callable[[], int]) -> None:
        self._options = options
        self._spec = spec
        self._clock = clock
        self._lifetime_ns = int(options.assumed_s * NS_PER_S)
        self._assumed = AssumedCache(1, self._lifetime_ns)
        self._source: KVSource | None = None
        self._reading: asyncio.Task[None] | None = None
        self._log = LimitedLog(logger)
        self._sequence = 0
        self._report: Report = lambda events: None
        self.on_defect: Callable[[BaseException], None] = lambda error: None  # nothing is read any more
        self.num_gaps = 0  # of events, that were not filled, in all its lives
        self._seen_gaps = 0  # of these, in this one

    def begin(self, num_blocks: int, num_engine_blocks: int, report: Report, sources: tuple[str, str]) -> None:
        """The engine has come up. num_blocks: of ours; num_engine_blocks: as the engine counts them. sources: where it
        publishes its events, and repeats them ("": nowhere)."""
        self._assumed = AssumedCache(num_blocks, self._lifetime_ns)
        self._sequence = self._seen_gaps = 0
        self._report = report
        events, replay = sources
        if events:
            bridge = KVBridge(self._options.block_size, num_engine_blocks + SPARE_BLOCKS)
            self._source = KVSource(bridge, can_replay=bool(replay))
            reader = KVEventReader(self._source, events, replay, self._on_change)
            self._reading = start_watched(self._read(reader), f"KV events of {self._spec.name}", self.on_defect)

    @property
    def kind(self) -> str:
        """How it is known what the engine holds: "assumed" from what it was sent, or how far its events say it (see
        SourceState)."""
        return "assumed" if self._source is None else self._source.state.value

    @property
    def num_blocks(self) -> int:
        """Blocks that are known or assumed to be cached."""
        if self._source is None:
            return len(self._assumed)
        bridge = self._source.bridge
        return len(bridge) + sum(not bridge.holds(block) for block in self._assumed.hashes)

    async def close(self) -> None:
        """The engine is gone."""
        reading, self._reading, self._source = self._reading, None, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def on_computed(self, hashes: Sequence[bytes], now: int) -> None:
        """The engine has computed a prompt with these blocks, or found them in its cache."""
        if hashes and not (self._source is not None and self._source.state is SourceState.EXACT):
            stored, evicted = self._assumed.on_computed(hashes, now)
            self._changed(self._unknown(stored), self._unknown(evicted))

    def tick(self, now: int) -> None:
        """Time has passed."""
        self._changed((), self._unknown(self._assumed.expire(now)))

    def snapshot(self) -> None:
        """The router has missed something: tell it everything."""
        known = () if self._source is None else self._source.bridge.hashes
        hashes = (*known, *self._unknown(self._assumed.hashes))
        self._report([KVSnapshot(self._clock(), self._sequence, hashes)])

    def _unknown(self, hashes: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The hashes that the engine's events do not name as held."""
        if self._source is None or not hashes:
            return hashes
        bridge = self._source.bridge
        return tuple(block for block in hashes if not bridge.holds(block))

    async def _read(self, reader: KVEventReader) -> None:
        while True:
            try:
                await reader.run()
            except asyncio.CancelledError:
                raise
            except Exception as error:  # nothing is known of this cache: forget it rather than to believe what is old
                self._log.error(kind_of(error), "KV events of %s cannot be read", self._spec.name, error=error)
                self._on_change(reader.source.on_lost())
            await asyncio.sleep(AGAIN_S)

    def _on_change(self, change: SourceChange) -> None:
        source = self._source
        if source is not None and source.num_gaps > self._seen_gaps:
            self.num_gaps += source.num_gaps - self._seen_gaps
            self._seen_gaps = source.num_gaps
            words = "%s: KV events were lost; its prefix index is %s"
            self._log.warning("lost", words, self._spec.name, self.kind)
        self._changed(*self._merged(change))

    def _merged(self, change: SourceChange) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """What the events say, with what was assumed before and still is: what is stored, and what is evicted."""
        assumed = self._assumed
        if not len(assumed):
            return change.stored, change.evicted
        stored = tuple(block for block in change.stored if not assumed.holds(block))
        gone = assumed.hashes if change.is_empty else () if change.is_gap else change.evicted
        assumed.drop(gone)
        evicted = tuple(block for block in change.evicted if not assumed.holds(block))
        return stored, tuple(dict.fromkeys((*evicted, *self._unknown(gone))))

    def _changed(self, stored: tuple[bytes, ...], evicted: tuple[bytes, ...]) -> None:
        if stored or evicted:
            self._sequence += 1
            self._report([KVEvents(self._clock(), self._sequence, stored, evicted)])
