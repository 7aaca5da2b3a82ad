"""What the prefix cache of one engine holds, as the router is told: from the engine's own events, or assumed from the
prompts that it was sent. Either way it is told by numbered KVEvents, as by workers of ours.
"""

import time
from collections.abc import Callable, Sequence

from diptych.control.events import Event, KVEvents, KVSnapshot
from diptych.control.router.assumed_cache import AssumedCache
from diptych.control.slo import NS_PER_S
from diptych.serving.front.engine_spec import EngineSpec, FrontOptions

Report = Callable[[Sequence[Event]], None]


class EngineCache:
    """``begin`` it whenever the engine has come up."""

    def __init__(self, options: FrontOptions, num_blocks: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._options = options
        self._clock = clock
        self._lifetime_ns = int(options.assumed_s * NS_PER_S)
        self._assumed = AssumedCache(num_blocks, self._lifetime_ns)
        self._sequence = 0
        self._report: Report = lambda events: None

    def begin(self, num_blocks: int, spec: EngineSpec, report: Report) -> None:
        """The engine has come up, with an empty cache as far as is known."""
        self._assumed = AssumedCache(num_blocks, self._lifetime_ns)
        self._sequence = 0
        self._report = report

    @property
    def kind(self) -> str:
        """How it is known what the engine holds: "assumed", from what it was sent."""
        return "assumed"

    async def close(self) -> None:
        """The engine is gone."""

    def on_computed(self, hashes: Sequence[bytes], now: int) -> None:
        """The engine has computed a prompt with these blocks."""
        if hashes:
            self._changed(*self._assumed.on_computed(hashes, now))

    def tick(self, now: int) -> None:
        """Time has passed."""
        self._changed((), self._assumed.expire(now))

    def snapshot(self) -> None:
        """The router has missed something: tell it everything."""
        self._report([KVSnapshot(self._clock(), self._sequence, self._assumed.hashes)])

    def _changed(self, stored: tuple[bytes, ...], evicted: tuple[bytes, ...]) -> None:
        if stored or evicted:
            self._sequence += 1
            self._report([KVEvents(self._clock(), self._sequence, stored, evicted)])
