"""All workers of one front end and the ClusterCore that decides for them: the only place where the two meet.

Owns the supervisors, the shared memory, and the translation of what workers say into cluster events; the commands go
the other way in cluster_driver.py. Must never decide where a request runs, nor look at tokens: those go straight from a
worker's record to the streams.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import (
    Arrived,
    Cancelled,
    ClusterEvent,
    Published,
    Reported,
    Snapshot,
    Submission,
    TransferFailed,
    WorkerDown,
    WorkerUp,
)
from diptych.control.engine.reports import LoadReport
from diptych.control.errors import DiptychError, WorkerError
from diptych.control.events import Event, FirstToken, HandoffDelivered, HandoffReleased, RequestFinished
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_S
from diptych.serving.answers.answer_stream import AnswerStream
from diptych.serving.answers.output_streams import OutputStreams
from diptych.serving.fleet.cluster_driver import ClusterDriver, Stopped
from diptych.serving.fleet.exit_status import Loss
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.fleet_plan import FleetPlan, cluster_config, plan_fleet
from diptych.serving.fleet.hang_watch import watch_pulses
from diptych.serving.fleet.membership import Membership
from diptych.serving.fleet.supervisor import WORKER_COMMAND, Supervisor, WorkerState
from diptych.serving.link import messages as wire
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.metrics.fleet_metrics import FleetView
from diptych.serving.metrics.serving_metrics import ServingMetrics
from diptych.timeline.ring import Timeline, Transfer

logger = logging.getLogger(__name__)


class Fleet:
    """The workers. ``start`` it in the loop that will use it; submit only while ``is_routable``.

    ``timeline`` is fed with everything that the workers report, in their order.
    """

    def __init__(
        self,
        options: EngineOptions,
        fleet: FleetOptions | None = None,
        command: Sequence[str] = WORKER_COMMAND,
        metrics: ServingMetrics | None = None,
    ) -> None:
        self.options = options
        self.fleet = fleet or FleetOptions()
        self.metrics = metrics or ServingMetrics()
        self.metrics.fleet.view = self._view
        self.streams = OutputStreams(self.metrics, len(self.fleet.roles))
        self.streams.cancel = self.cancel
        self.supervisors: list[Supervisor] = []
        self.ready: asyncio.Future[wire.Ready] | None = None  # of all first starts
        self.joint_ready: wire.Ready | None = None  # the fleet as one worker, once all were ready
        self.loading = wire.Loading("starting")
        self.timeline = Timeline()
        self._command = tuple(command)
        self._plan: FleetPlan | None = None
        self._members = Membership(self.fleet.roles, shares_pool=False)
        self._driver: ClusterDriver | None = None  # from when every worker was ready once
        self._loads: dict[int, LoadReport] = {}  # what each living worker reported last
        self._tasks: list[asyncio.Task[None]] = []
        self._hearers: dict[type, Callable[[int, Any], None]] = {
            wire.Tokens: self._on_tokens,
            wire.Stats: self._on_stats,
            wire.Happened: self._on_happened,
            wire.Delivered: self._on_delivered,
            wire.TransferLost: self._on_transfer_lost,
            wire.Blocks: self._on_blocks,
            wire.PeerForgotten: self._on_peer_forgotten,
            wire.Ready: self._on_ready,
            wire.Loading: self._on_loading,
            wire.Failed: lambda worker, message: None,  # its supervisor reports it
        }

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all workers; returns at once. ``ready`` tells how the first starts went."""
        loop = asyncio.get_running_loop()
        plan = self._plan = plan_fleet(self.options, self.fleet)
        self._members = Membership(self.fleet.roles, shares_pool=plan.memory is not None)
        self.ready = loop.create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        for number, options in enumerate(plan.options):
            one = Supervisor(number, options, self._command, pass_fds=plan.pass_fds)
            self.supervisors.append(one)
            one.start(self)
            self._tell(number, WorkerState.STARTING)
        watch = watch_pulses(self.supervisors, self.fleet.heartbeat_timeout_s)
        self._tasks = [asyncio.create_task(self._first_starts(), name="first starts"), asyncio.create_task(watch)]

    async def stop(self) -> None:
        """End all workers, and what belongs to them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._driver is not None:
            self._driver.close()
        await asyncio.gather(*(one.stop() for one in self.supervisors))
        for one in self.supervisors:
            self._tell(one.number, WorkerState.STOPPED)
        self.timeline.close()
        if self.ready is not None and not self.ready.done():
            self.ready.set_exception(WorkerError("stopped before the workers were ready"))
        if self._plan is not None:
            self._plan.close()
            self._plan = None

    async def _first_starts(self) -> None:
        """All workers are ready, or one of them refused to start: then the fleet does."""
        assert self.ready is not None
        futures = [one.ready for one in self.supervisors if one.ready is not None]
        try:
            await asyncio.gather(*futures)
        except DiptychError as error:
            self.ready.set_exception(error)

    @property
    def is_starting(self) -> bool:
        """Whether some worker has never been ready."""
        return self._driver is None

    @property
    def is_routable(self) -> bool:
        """Whether a request sent now would find workers."""
        return self._driver is not None and self._members.is_routable

    @property
    def num_restarts(self) -> int:
        """How many times workers were started again."""
        return sum(one.num_restarts for one in self.supervisors)

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, submissions: Iterable[Submission]) -> None:
        """Requests whose sequences the streams know."""
        self._tell_cluster(*(Arrived(one) for one in submissions))

    def cancel(self, sequences: Iterable[AnswerStream], reason: FinishReason) -> None:
        """End these wherever they are. reason stop: the front end found a stop string, and awaits the worker's word."""
        if reason is FinishReason.STOP:
            self._tell_cluster(*(Stopped(one.request_id, one.attempt_id) for one in sequences))
        else:
            self._tell_cluster(*(Cancelled(one.request_id) for one in sequences))

    def _tell_cluster(self, *happened: ClusterEvent | Stopped) -> None:
        if self._driver is not None:  # before all were ready once, workers only have news of themselves
            self._driver.tell(*happened)

    # -- what workers say -------------------------------------------------------------------------------------------

    def on_message(self, worker: int, message: wire.WorkerMessage) -> None:
        """A worker said something."""
        self._hearers[type(message)](worker, message)
        self.streams.deliver()

    def on_lost(self, worker: int, loss: Loss) -> None:
        """A worker's process has ended for certain."""
        self._tell(worker, WorkerState.LOST, loss.error.message)
        self.metrics.fleet.on_worker_lost(worker)
        was_up = self._members.is_up[worker]
        peers = self._members.on_lost(worker)
        self.streams.on_worker_lost(worker)
        self._loads.pop(worker, None)
        if was_up:
            self._tell_cluster(WorkerDown(worker, self.streams.progress(), loss.crashed))
        for peer in peers:
            self._send(peer, wire.ForgetPeer(worker))
        self._admit()

    def _on_tokens(self, worker: int, message: wire.Tokens) -> None:
        begun = self.streams.on_tokens(worker, message)
        if not (begun or message.finished):
            return
        now = time.monotonic_ns()
        news: list[Event] = [FirstToken(now, attempt_id) for attempt_id in begun]
        for end in message.finished:
            self.streams.on_finished(end)
            news.append(_event(end, now))
        if self._driver is not None:
            self._driver.last_words = {end.request_id: end for end in message.finished}
            self._driver.tell(Reported(worker, news))

    def _on_stats(self, worker: int, message: wire.Stats) -> None:
        events = wire.unpack_events(message.events)
        self.metrics.on_stats(worker, message)
        self.timeline.on_events(worker, events)
        if message.load is not None:
            self._loads[worker] = message.load
        # Of what matters only this has not come before, by itself: the first token of a later attempt on one worker.
        begun = tuple(event for event in events if isinstance(event, FirstToken))
        self._tell_cluster(Reported(worker, begun, message.load))

    def _on_happened(self, worker: int, message: wire.Happened) -> None:
        events = wire.unpack_events(message.events)
        for event in events:
            if isinstance(event, HandoffReleased):
                self.streams.on_gone(event.request_id)
        self._tell_cluster(Reported(worker, events))

    def _on_delivered(self, worker: int, message: wire.Delivered) -> None:
        self.metrics.on_delivered(message)
        takeover = self.streams.on_delivered(worker, message)
        if takeover is not None:
            start_ns, end_ns = message.time_ns - message.transfer_ns, message.time_ns
            exposed_ns = int(takeover.exposed_s * NS_PER_S)
            travelled = Transfer(
                message.attempt_id, takeover.sender, worker, message.num_bytes, start_ns, end_ns, exposed_ns
            )
            self.timeline.on_transfer(travelled)
        self._tell_cluster(Reported(worker, (HandoffDelivered(message.time_ns, message.attempt_id),)))

    def _on_transfer_lost(self, worker: int, message: wire.TransferLost) -> None:
        logger.info("worker %d: the KV of %s cannot be moved: %s", worker, message.attempt_id, message.message)
        self._tell_cluster(TransferFailed(worker, message.attempt_id, message.is_sender, message.message))

    def _on_blocks(self, worker: int, message: wire.Blocks) -> None:
        if message.is_snapshot:
            self._tell_cluster(Snapshot(worker, message.sequence, tuple(message.stored)))
        else:
            self._tell_cluster(Published(worker, message.sequence, tuple(message.stored), tuple(message.evicted)))

    def _on_peer_forgotten(self, worker: int, message: wire.PeerForgotten) -> None:
        self._members.on_forgotten(worker, message.worker)
        self._admit()

    def _on_loading(self, worker: int, message: wire.Loading) -> None:
        if self.supervisors[worker].num_restarts and self.timeline.workers[worker].state != WorkerState.STARTING:
            self._tell(worker, WorkerState.STARTING)
        if len(self.supervisors) > 1:
            message = wire.Loading(f"worker {worker}: {message.stage}", message.fraction)
        self.loading = message

    def _on_ready(self, worker: int, message: wire.Ready) -> None:
        self._members.on_ready(worker, message)
        self._tell(worker, WorkerState.READY, message.description)
        self._admit()

    def _admit(self) -> None:
        """Tell the cluster of the workers that may come (back)."""
        if self._driver is None:
            if not self._members.is_complete or self._plan is None:
                return
            core = ClusterCore(self._members.infos(), cluster_config(self.fleet, self._plan))
            self._driver = ClusterDriver(core, self.streams, self._members, self._send)
        self.joint_ready = self._members.joint_ready()
        for worker in self._members.take_newcomers():
            self._tell_cluster(WorkerUp(worker), Reported(worker, (), self._loads.get(worker)))
        if self.ready is not None and not self.ready.done():
            self.ready.set_result(self.joint_ready)

    def _send(self, worker: int, message: wire.FrontendMessage) -> None:
        self.supervisors[worker].send(message)

    def _view(self) -> FleetView:
        core = self._driver.core if self._driver else None
        return FleetView(
            self.fleet.roles,
            self._members.is_up,
            [one.num_restarts for one in self.supervisors] or [0] * len(self.fleet.roles),
            core.counts if core else {},
            len(core.admission) if core else 0,
        )

    def _tell(self, worker: int, state: WorkerState, detail: str = "") -> None:
        self.timeline.on_worker(worker, state, time.monotonic_ns(), role=self.fleet.roles[worker], detail=detail)


def _event(end: wire.Finished, now: int) -> RequestFinished:
    """A worker's last word on an attempt, as the control code knows it."""
    message = end.error.message if end.error else ""
    return RequestFinished(
        now,
        end.request_id,
        end.reason,
        end.num_prompt_tokens,
        end.num_cached_tokens,
        end.num_preemptions,
        end.latency,
        end.slo_met,
        message,
    )
