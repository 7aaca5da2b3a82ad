"""The steps of an engine with Diptych's plugin: read from its socket, and told as steps of a worker.

Owns the socket (of other feeds, too), the engine's clock in ours, and the names of requests. Needs pyzmq
(``diptych[front]``). Memory: what waits in the socket, at most RECEIVE_LIMIT lines.
"""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from diptych.base.engine_steps import MAX_LINE_BYTES, EngineAbout, EngineStep, UnreadableStepError, decode_line
from diptych.control.events import StepFinished
from diptych.control.slo import NS_PER_S
from diptych.control.step import StepFeatures, chunk_attention

logger = logging.getLogger(__name__)

OnStep = Callable[[StepFinished, StepFeatures, int], None]  # the last is how long it took, in nanoseconds
RECEIVE_LIMIT = 4096  # lines
OFFSET_WINDOW_NS = 60 * NS_PER_S
TOPIC = b"steps"
SHOWN = ("version", "policy", "max_num_seqs", "max_batched_tokens", "async_scheduling", "lacks")
_OWN_ID = re.compile(r"(?:chatcmpl|cmpl|req)-[0-9a-f]{32}(?:~\d+)?")


class ClockOffset:
    """How far our clock is ahead of an engine's: the least difference between our time when a line comes and its own
    time, in the last one to two windows. Too large by the shortest way of a line, never by a slow line."""

    def __init__(self) -> None:
        self._begun_ns = 0
        self._least: int | None = None
        self._least_before: int | None = None

    def seen(self, engine_ns: int, now: int) -> int:
        """A line that was written at ``engine_ns`` came at ``now``. Returns the offset in nanoseconds."""
        if self._least is not None and now - self._begun_ns > OFFSET_WINDOW_NS:
            self._least_before, self._least = self._least, None
        if self._least is None:
            self._begun_ns, self._least = now, now - engine_ns
        self._least = min(self._least, now - engine_ns)
        return self._least if self._least_before is None else min(self._least, self._least_before)


class StepFeed:
    """A StepSource: one engine's lines, in the order in which they came. on_step: gets each step as a worker would
    report it, its features, and how long it took. num_seen: steps that came; num_missed: that were published and did
    not come."""

    topic = TOPIC

    def __init__(self, on_step: OnStep, clock: Callable[[], int]) -> None:
        self.about: EngineAbout | None = None
        self.num_seen = self.num_missed = 0
        self._on_step = on_step
        self._clock = clock
        self._offset = ClockOffset()
        self._last = 0
        self._end_ns = 0
        self._has_warned = False

    def take_frames(self, frames: Sequence[bytes]) -> None:
        """A message."""
        self.take(frames[-1])

    def described(self) -> dict[str, Any]:
        about = self.about
        return {} if about is None else {name: getattr(about, name) for name in SHOWN}

    def take(self, data: bytes) -> None:
        """A line."""
        try:
            line = decode_line(data)
        except UnreadableStepError as error:
            if not self._has_warned:
                logger.warning("a line about an engine's step cannot be read: %s", error)
                self._has_warned = True
            return
        if isinstance(line, EngineAbout):
            if self.about is not None and line.run_id != self.about.run_id:
                self._offset, self._last = ClockOffset(), 0
            self.about = line
            return
        if line.number <= self._last:  # it was started again, and says what it is a little later
            self._offset, self._last = ClockOffset(), 0
        if self._last:
            self.num_missed += line.number - self._last - 1
        self._last = line.number
        self.num_seen += 1
        step = self._in_our_time(line)
        self._on_step(step, features_of(line), step.end_ns - step.start_ns)

    def _in_our_time(self, line: EngineStep) -> StepFinished:
        offset_ns = self._offset.seen(line.end_ns, self._clock())
        start_ns = max(self._end_ns, line.start_ns + offset_ns)
        self._end_ns = end_ns = max(start_ns, line.end_ns + offset_ns)
        prefills = tuple((own_id(name), start, num_tokens) for name, start, num_tokens in line.prefills)
        return StepFinished(line.number, start_ns, end_ns, prefills, line.num_decodes, line.decode_context, 0)


async def read_steps(address: str, take: Callable[[bytes], None]) -> None:
    """Read steps for ever; cancel it to stop. take: gets each line."""
    await read_frames(address, TOPIC, lambda frames: take(frames[-1]))


async def read_frames(address: str, topic: bytes, take: Callable[[Sequence[bytes]], None]) -> None:
    """Read messages for ever; cancel it to stop. take: gets the frames of each message."""
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.set_hwm(RECEIVE_LIMIT)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_LINE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, topic)
        socket.connect(address)
        while True:
            take(await socket.recv_multipart())
    finally:
        socket.close()
        context.destroy(linger=0)


def features_of(step: EngineStep) -> StepFeatures:
    """What the step's duration depends on."""
    return StepFeatures(
        sum(num_tokens for _, _, num_tokens in step.prefills),
        sum(chunk_attention(start, num_tokens) for _, start, num_tokens in step.prefills),
        step.decode_rows,
        step.decode_context,
    )


def own_id(engine_id: str) -> str:
    """The attempt that an engine's request is, if it is one of a front's: engines put words before and after the
    X-Request-Id that they get. Any other id stays as it is."""
    found = _OWN_ID.search(engine_id)
    return found[0] if found else engine_id
