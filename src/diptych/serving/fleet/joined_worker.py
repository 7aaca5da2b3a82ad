"""A worker on another host, as the fleet sees it: a WorkerHandle over the connection of its agent.

A connection is a life of the worker: when it ends, the worker is lost, whatever became of its process, and what the old
process still says or sends is refused with the connection. Its agent dials again, and that is its restart.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec

from diptych.control.errors import CoreFailedError, DiptychError, WorkerError
from diptych.control.router.topology import Role
from diptych.control.slo import NS_PER_S
from diptych.serving.fleet.exit_status import Loss
from diptych.serving.fleet.worker_handle import WorkerListener, WorkerSite, WorkerState, hand_over
from diptych.serving.join.framed_link import FramedLink
from diptych.serving.join.join_messages import (
    Beat,
    Ended,
    Kill,
    Leave,
    Leaving,
    Registration,
    Vital,
    read_from_agent,
    told,
)
from diptych.serving.link.heartbeat import Pulse
from diptych.serving.link.host_clock import clock_identity
from diptych.serving.link.messages import Failed, FrontendMessage, Ready, StepReport, decode_from_worker, encode

logger = logging.getLogger(__name__)

CLOCK_SAMPLES = 64  # of the distance between two clocks; clocks drift apart, so that old ones count for nothing


class JoinedWorker:
    """A WorkerHandle to a worker of another host. ``attach`` each connection that its agent makes. The times of events
    are put on this host's clock, as well as that can be known (for people and statistics; nothing is decided by them):
    the quickest recent heartbeat is taken to have travelled for no time at all."""

    def __init__(self, number: int, site: WorkerSite, agent: bytes) -> None:
        self.number = number
        self.state = WorkerState.STARTING
        self.num_restarts = 0
        self.ready: asyncio.Future[Ready] | None = None
        self.site = site
        self.agent = agent
        self.on_leaving: Callable[[], None] = lambda: None  # its agent is asked to end
        self.life = 0
        self._link: FramedLink | None = None
        self._listener: WorkerListener | None = None
        self._failure: DiptychError | None = None
        self._recording = ""
        self._crashed = False
        self._distances: deque[int] = deque(maxlen=CLOCK_SAMPLES)  # this host's clock less the worker's, in nanoseconds
        self._shift_ns = 0
        self._has_own_clock = False
        self._vital: tuple[int, Vital] | None = None  # when it came, in nanoseconds of the loop's clock

    @property
    def role(self) -> Role:
        """What it joined for."""
        return self.site.role or "both"

    def start(self, listener: WorkerListener) -> None:
        self._listener = listener
        self.ready = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())

    def attach(self, link: FramedLink, registration: Registration, life: int) -> None:
        """The agent has dialled, and its registration was accepted. An older connection is cut first."""
        self._lose("its agent has dialled again")
        if self.life:
            self.num_restarts += 1
        self.site = WorkerSite(registration.host, registration.rack, registration.role)
        self.agent, self.life = registration.agent, life
        heard_ns = int(asyncio.get_running_loop().time() * NS_PER_S)
        self.state, self._link, self._vital = WorkerState.STARTING, link, (heard_ns, Vital())  # it has just registered
        self._failure, self._crashed, self._recording = None, False, ""
        self._has_own_clock = registration.clock != clock_identity()
        self._distances.clear()
        self._shift_ns = 0
        link.on_told, link.on_relayed, link.on_closed = self._take_told, self._take_relayed, self._lose
        link.on_defect = self._on_defect

    def send(self, message: FrontendMessage) -> None:
        if self._link is not None:
            self._link.relay(encode(message))

    def beat(self) -> None:
        """Show the agent that the front end is alive."""
        if self._link is not None:
            self._link.tell(told(Beat()))

    def pulse(self) -> Pulse | None:
        """The agent's durations, as of when they came."""
        if self._vital is None:
            return None
        now, vital = self._vital
        busy_since = now - vital.busy_ns if vital.busy_ns else 0
        return Pulse(now - vital.age_ns, vital.num_turns, busy_since, vital.predicted_ns)

    def kill(self, because: str) -> None:
        """End the connection; the process is killed if it is what hangs. Where the agent itself is silent, the path
        between the hosts may be broken, and the process is kept for when it is whole again."""
        link, vital = self._link, self._vital
        if link is None:
            return
        heard_ns = 0 if vital is None else int(asyncio.get_running_loop().time() * NS_PER_S) - vital[0]
        is_silent = vital is None or heard_ns > vital[1].age_ns + vital[1].busy_ns
        why = f"{because} (its host is not heard)" if is_silent else because
        logger.error("worker %d on %s: %s; cutting it off", self.number, self.site.host, why)
        if not is_silent:
            link.tell(told(Kill(because)))
        self._lose(why, at_once=False)

    async def stop(self, *, is_removed: bool = False) -> None:
        """End the connection. The process of a worker that is not removed waits for another front end."""
        self.state = WorkerState.STOPPED
        link, self._link = self._link, None
        if link is not None:
            if is_removed:
                link.tell(told(Leave()))
            link.on_closed = lambda why: None
            link.close("the front end ends", at_once=False)
        if self.ready and not self.ready.done():
            self.ready.set_exception(WorkerError("stopped before the worker was ready"))

    def _lose(self, why: str, *, at_once: bool = True) -> None:
        """The connection is over."""
        link, self._link = self._link, None
        if link is None:
            return
        link.on_told = link.on_relayed = lambda data: None
        link.on_closed = lambda reason: None
        link.close(why, at_once=at_once)
        self._vital = None
        if self.state is WorkerState.STOPPED:
            return
        self.state = WorkerState.LOST
        error = self._failure or WorkerError(f"worker {self.number} on {self.site.host} is lost: {why}")
        logger.error("%s; it may join again", error.message)
        assert self._listener is not None
        is_defect = isinstance(error, CoreFailedError)
        recording = f"{self._recording} on {self.site.host}" if is_defect and self._recording else ""
        self._listener.on_lost(self.number, Loss(error, self._crashed, is_defect, recording, is_elsewhere=True))

    def _on_defect(self, error: BaseException) -> None:
        """Code of this process has failed over what came: what the fleet knows of this worker may be half the truth."""
        assert self._listener is not None
        self._listener.on_defect(f"the connection of worker {self.number}", error)

    def _take_told(self, data: bytes) -> None:
        try:
            message = read_from_agent(data)
        except (msgspec.DecodeError, DiptychError) as error:
            self._lose(f"its agent sent something unreadable: {error}")
            return
        match message:
            case Vital():
                self._vital = (int(asyncio.get_running_loop().time() * NS_PER_S), message)
                if self._has_own_clock:
                    self._distances.append(time.monotonic_ns() - message.now_ns)
                    self._shift_ns = min(self._distances)
            case Ended():
                self._crashed = message.crashed
                if message.failed:
                    self._failure, self._recording = CoreFailedError(message.message), message.recording
                self._lose(message.message)
            case Leaving():
                self.on_leaving()
            case Registration():
                self._lose("its agent registered twice")

    def _take_relayed(self, data: bytes) -> None:
        assert self._listener is not None
        try:
            message = decode_from_worker(data)
        except msgspec.DecodeError as error:
            self._lose(f"the worker sent something unreadable: {error}")
            return
        if isinstance(message, StepReport):
            if self._has_own_clock:
                try:
                    for _, fields in message.events:
                        fields["time_ns"] += self._shift_ns
                except (LookupError, TypeError):
                    self._lose("the worker sent an event without a time")
                    return
        elif isinstance(message, Ready):
            self.state = WorkerState.READY
        elif isinstance(message, Failed):
            self._failure, self._recording = message.error.exception(), message.recording
        hand_over(self._listener, self.number, message)
        if isinstance(message, Ready) and self.ready and not self.ready.done():
            self.ready.set_result(message)
