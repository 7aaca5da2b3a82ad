"""Which feed reads the steps of which kind of engine, and when: while the engine is up."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from diptych.base.limited_log import LimitedLog, kind_of
from diptych.serving.front.engine_spec import EngineSpec
from diptych.serving.front.sglang_step_metrics import SGLangStepFeed
from diptych.serving.front.step_feed import OnStep, StepFeed, read_frames

logger = logging.getLogger(__name__)

AGAIN_S = 1.0  # between a failure and the next look


class StepSource(Protocol):
    """What one life of an engine published of its steps. topic: of its messages. num_seen: steps that came;
    num_missed: that were published and did not come."""

    topic: bytes
    num_seen: int
    num_missed: int

    def take_frames(self, frames: Sequence[bytes]) -> None:
        """A message. One that cannot be read is warned of once."""
        ...

    def described(self) -> dict[str, Any]:
        """What the engine says of itself."""
        ...


class EngineStepFeeds:
    """Listens to one engine while it is up, as its step_events say ("": it reports no steps)."""

    def __init__(self, spec: EngineSpec, on_step: OnStep, clock: Callable[[], int]) -> None:
        self._address = spec.step_events
        self._source = SGLangStepFeed if spec.kind == "sglang" else StepFeed
        self._on_step = on_step
        self._clock = clock
        self._reading: asyncio.Task[None] | None = None
        self._log = LimitedLog(logger)
        self.feed: StepSource | None = None
        self._seen_before = self._missed_before = 0

    @property
    def num_seen(self) -> int:
        """Steps that came, in all its lives."""
        return self._seen_before + (self.feed.num_seen if self.feed else 0)

    @property
    def num_missed(self) -> int:
        """Steps that were published and did not come, in all its lives."""
        return self._missed_before + (self.feed.num_missed if self.feed else 0)

    def begin(self) -> None:
        """The engine has come up."""
        if self._address:
            self.feed = self._source(self._on_step, self._clock)
            self._reading = asyncio.create_task(self._read(self.feed))

    async def close(self) -> None:
        """The engine is gone."""
        if self.feed is not None:
            self._seen_before += self.feed.num_seen
            self._missed_before += self.feed.num_missed
        reading, self._reading, self.feed = self._reading, None, None
        if reading is not None:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading

    def described(self) -> dict[str, Any] | None:
        """What the engine says of itself, and how many of its steps came; None where it reports none."""
        if self.feed is None:
            return None
        return {"num_seen": self.num_seen, "num_missed": self.num_missed, **self.feed.described()}

    async def _read(self, feed: StepSource) -> None:
        while True:
            try:
                await read_frames(self._address, feed.topic, feed.take_frames)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # what one message brought about must not end all later ones
                self._log.error(kind_of(error), "steps on %s cannot be read", self._address, error=error)
            await asyncio.sleep(AGAIN_S)
