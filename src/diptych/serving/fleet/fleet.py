"""All workers of one front end and the ClusterCore that decides for them: the only place where the two meet.

What clients want and what workers report goes to the core as events, in order; its commands go out as messages, or to
the streams. Nothing is decided here, and tokens are not looked at: they go from a worker's report to the streams.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from diptych.base.processor import Processor, read_processor
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import (
    Arrived,
    Cancelled,
    ClusterEvent,
    EvacuationReady,
    Reported,
    Tick,
    WorkerDown,
    WorkerUp,
)
from diptych.control.cluster.membership import Membership
from diptych.control.commands import Command, Drained, End, Evacuate, Prefill, Reserve, Restarted, Serve, WorkerCommand
from diptych.control.config import SchedulerConfig
from diptych.control.errors import ConfigError, ConflictError, DiptychError, RequestError, WorkerError
from diptych.control.events import Event, HandoffDelivered, Resized, TransferFailed
from diptych.control.request import FinishReason, Submission
from diptych.control.router.topology import Role, has_both_phases
from diptych.control.slo import NS_PER_S
from diptych.control.step import TokenLogprobs
from diptych.serving import edge_limits
from diptych.serving.answers.answer_stream import AnswerStream, Generation
from diptych.serving.answers.output_streams import OutputStreams, stopped_by_token
from diptych.serving.failures.cluster_guard import ClusterGuard
from diptych.serving.failures.failure_board import FailureBoard
from diptych.serving.failures.failure_recording import folder_of
from diptych.serving.failures.watched_tasks import start_watched
from diptych.serving.fleet.exit_status import Loss
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.fleet_plan import FleetPlan, plan_fleet, worker_options
from diptych.serving.fleet.fleet_planner import FleetPlanner, plan_with
from diptych.serving.fleet.heartbeat_monitor import watch_pulses
from diptych.serving.fleet.host_cores import HostCores
from diptych.serving.fleet.join_listener import JoinListener, expected_of
from diptych.serving.fleet.joined_worker import JoinedWorker
from diptych.serving.fleet.joint_ready import joint_ready
from diptych.serving.fleet.supervisor import LocalLauncher
from diptych.serving.fleet.worker_changes import WorkerChanges
from diptych.serving.fleet.worker_handle import Launcher, WorkerHandle, WorkerSite, WorkerState
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.messages import (
    Loading,
    Order,
    Orders,
    Ready,
    StepReport,
    WorkerMessage,
    pack_command,
    unpack_events,
)
from diptych.serving.link.recorder import Recorder
from diptych.serving.metrics.fleet_metrics import FleetView
from diptych.serving.metrics.serving_metrics import ServingMetrics
from diptych.serving.misses.miss_recorder import MissRecorder
from diptych.timeline.ring import RUNNING_STATES, Timeline, Transfer

logger = logging.getLogger(__name__)


class Fleet:
    """The workers of a front end: a ChangingFleet and a JoiningFleet. ``start`` it in the loop that will use it; submit
    only while ``is_routable``.

    ``timeline`` is fed with everything that the workers report, in their order. clock: nanoseconds, the clock of the
    workers' events and of the loop's timers. processor: whose cores the workers share (None: this machine's).
    """

    def __init__(
        self,
        options: EngineOptions,
        fleet: FleetOptions | None = None,
        launcher: Launcher | None = None,
        metrics: ServingMetrics | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        processor: Processor | None = None,
    ) -> None:
        self.options = options
        self.fleet = fleet or FleetOptions()
        self.metrics = metrics or ServingMetrics()
        self.metrics.fleet.view = lambda: view_of(self, self._clock())
        self.failures = FailureBoard()
        self._guard = ClusterGuard(self.failures, folder_of(options.failures))
        self.streams = OutputStreams(self.metrics)
        self.misses: MissRecorder | None = None
        if (explain := self.fleet.explain_misses) != "off":
            self.misses = MissRecorder(
                options.memory.block_size, keeps_text=explain == "text", stream_of=self.streams.get, clock=clock
            )
            self.streams.on_gone = self.misses.on_gone
            self.metrics.misses = self.misses.explainer
        self.workers: list[WorkerHandle] = []
        self.ready: asyncio.Future[Ready] | None = None  # of all first starts
        self.joint_ready: Ready | None = None  # the fleet as one worker, once all were ready
        self.loading = Loading("starting")
        self.timeline = Timeline(max_subscribers=edge_limits.TIMELINE_READERS)
        self._completed_handoffs = CompletedHandoffs(self.streams, self.metrics, self.timeline)
        self.core = ClusterCore()
        self._launcher = launcher or LocalLauncher()
        self._clock = clock
        self._plan: FleetPlan | None = None
        self.known: dict[int, Ready] = {}  # each worker's last Ready
        self._happened: deque[ClusterEvent] = deque()
        self._is_busy = False
        self._orders: dict[int, list[Order]] = {}  # not sent yet
        self._timer = DueTimer(clock, self._on_timer)
        self._alarm = IndexAlarm()
        self._recorder: Recorder | None = None
        cores = HostCores(processor or read_processor(), options.device.cores, self.fleet.core_split)
        started = [own.scheduler for own in worker_options(options, self.fleet)]
        self.changes = self.make_changes(started, cores)
        self.planner: FleetPlanner | None = None
        self.door: JoinListener | None = None
        self._enough = asyncio.Event()  # workers are ready to do both phases
        self._tasks: list[asyncio.Task[None]] = []

    def make_changes(self, started: Sequence[SchedulerConfig], cores: HostCores) -> WorkerChanges:
        """What an operator may change of it."""
        return WorkerChanges(self, started, self.options.slo, cores)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all workers; returns at once. ``ready`` tells how the first starts went."""
        plan = self._plan = self.make_plan()
        self.core, self._recorder = self._guard.make_core(plan.cluster, self.recording_path(len(plan.options)))
        if self.fleet.plan.mode != "off":
            self.planner = plan_with(
                self.fleet, self.options, self.core, plan, self.changes, self._clock, self.failures
            )
        self.ready = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        if (join := self.fleet.join) is not None:
            numbers, silence_s = range(len(self.fleet.roles), len(self.fleet.slots)), self.fleet.heartbeat_timeout_s
            self.door = JoinListener(self, join, expected_of(self.options), numbers, silence_s)
            await self.door.open()
        try:
            await self._launcher.open(self.door.port if self.door is not None else 0)
        except DiptychError:
            await self.stop()
            raise
        for number in range(len(self.fleet.roles)):
            self._launch(number)
        watch = watch_pulses(self.workers, self.fleet.heartbeat_timeout_s)
        tasks = {"first starts": self.first_starts(), "the watch over workers": watch}
        if self.planner is not None:
            tasks["the driver of the planner"] = self.planner.run()
        self._tasks = [start_watched(work, name, partial(self.on_defect, name)) for name, work in tasks.items()]

    def make_plan(self) -> FleetPlan:
        """What each worker is started with. Raises ConfigError."""
        return plan_fleet(self.options, self.fleet, self.changes.cores.processor)

    def recording_path(self, num_workers: int) -> Path | None:
        """Where the cluster's decisions are recorded, beside the recordings of the workers; None: nowhere. (A worker
        that is alone is recorded whole.)"""
        if self.options.record is None or num_workers == 1:
            return None
        path = Path(self.options.record)
        return path.with_name(f"{path.stem}-cluster{path.suffix}")

    async def stop(self) -> None:
        """End all workers, and what belongs to them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.door is not None:
            await self.door.close()
        self._timer.cancel()
        await asyncio.gather(*(worker.stop() for worker in self.workers))
        await self._launcher.close()
        for worker in self.workers:
            self._note_state(worker.number, WorkerState.STOPPED)
        self.timeline.close()
        if self.ready is not None and not self.ready.done():
            self.ready.set_exception(WorkerError("stopped before the workers were ready"))
        if self._recorder is not None:
            self._recorder.close()
        if self._plan is not None:
            self._plan.close()
            self._plan = None

    def _launch(self, number: int) -> WorkerHandle:
        """Begin the life of a worker: of a new one, or of one that was stopped."""
        assert self._plan is not None
        if number == len(self.workers) or type(self.workers[number]) is JoinedWorker:
            port = self._launcher.launch(number, self._plan.options[number], self._plan.pass_fds)
            self.workers[number : number + 1] = [port]
        worker = self.workers[number]
        worker.start(self)
        self._note_state(number, WorkerState.STARTING)
        return worker

    async def start_worker(self, worker: int) -> None:
        """Start a worker. Raises its error if it cannot start."""
        if self.fleet.join is not None and self.fleet.ray is None and not self.fleet.roles:
            raise ConflictError("the workers of this server join by themselves: start one where it is to run")
        port = self._launch(worker)
        assert port.ready is not None
        try:
            await port.ready
        except DiptychError as error:
            await port.stop()
            self._note_state(worker, WorkerState.STOPPED, error.message)
            raise

    async def stop_worker(self, worker: int) -> None:
        await self.workers[worker].stop(is_removed=True)
        self._note_state(worker, WorkerState.STOPPED)
        self.metrics.fleet.on_worker_removed(worker)
        self.failures.replaced(f"worker {worker}")
        self.tell(WorkerDown(worker, self.streams.progress()))
        self.streams.deliver()

    async def first_starts(self) -> None:
        """All workers are ready, or one of them refused to start: then the fleet does."""
        assert self.ready is not None
        try:
            own = self.workers[: len(self.fleet.roles)]
            await asyncio.gather(*(worker.ready for worker in own if worker.ready is not None))
            if not self._enough.is_set():
                self.loading = Loading("waiting for workers to join")
            await self._enough.wait()
            self.ready.set_result(self._join_ready())
        except DiptychError as error:
            self.ready.set_exception(error)

    def _join_ready(self) -> Ready:
        """What the workers hold together. Raises ConfigError for workers that do not fit."""
        roles = {number: self.role(number) for number in sorted(self.known)}
        self.joint_ready = joint_ready(roles, self.known)
        return self.joint_ready

    # -- workers of other hosts (see JoiningFleet) --------------------------------------------------------------------

    def take_in(self, port: JoinedWorker) -> None:
        self.workers[port.number : port.number + 1] = [port]
        port.start(self)
        self.changes.on_joined(port.number)
        self._note_state(port.number, WorkerState.STARTING)

    def options_of(self, worker: int) -> EngineOptions:
        assert self._plan is not None
        return self._plan.options[worker]

    async def remove_joined(self, worker: int) -> None:
        await self.changes.remove(worker)

    @property
    def joined(self) -> frozenset[int]:
        ports = self.door.joined if self.door is not None else ()
        return frozenset(port.number for port in ports if port.state is not WorkerState.STOPPED)

    @property
    def is_starting(self) -> bool:
        """Whether some worker has never been ready."""
        return self.joint_ready is None

    @property
    def is_routable(self) -> bool:
        """Whether a request sent now would find workers: any of them can serve one whole when its peers are gone."""
        return self.joint_ready is not None and bool(self.core.members.up) and self.failures.final is None

    @property
    def num_restarts(self) -> int:
        """How many times workers were started again."""
        return sum(worker.num_restarts for worker in self.workers)

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, submissions: Iterable[Submission], num_tokens: int = 0) -> None:
        """Submit requests whose answers the streams know, and which resume after ``num_tokens`` tokens. Raises
        CoreFailedError when the core has failed before."""
        if self.failures.final is not None:
            raise self.failures.final.exception()
        self.tell(*(Arrived(submission, num_tokens) for submission in submissions))

    def room(self, service_class: str) -> int:
        """How many requests of a class would be taken now."""
        return self.core.room(service_class)

    def abort(self, generation: Generation) -> None:
        """Cancel a generation that its client no longer wants, wherever it is."""
        self._cancel(self.streams.abandon(generation), FinishReason.ABORT)

    # -- what an operator changes (see ChangingFleet) ------------------------------------------------------------------

    @property
    def members(self) -> Membership:
        return self.core.members

    def progress(self) -> Mapping[str, int]:
        return self.streams.progress()

    def show(self, worker: int, at_ns: int | None = None) -> None:
        """Report a worker's present state. at_ns: when it changed, if not now."""
        known = self.timeline.workers[worker]
        state = known.state
        if state in RUNNING_STATES:
            state = "draining" if self.changes.is_draining(worker) else WorkerState.READY
        self._note_state(worker, state, known.detail, at_ns)

    def _cancel(self, streams: Iterable[AnswerStream], reason: FinishReason) -> None:
        self.tell(*(Cancelled(stream.request_id, stream.num_tokens, reason) for stream in streams))

    # -- what workers report (see WorkerListener) ----------------------------------------------------------------------

    def on_message(self, worker: int, message: WorkerMessage) -> None:
        """A message of a worker."""
        match message:
            case StepReport():
                self._on_report(worker, message)
            case Ready():
                self.on_ready(worker, message)
            case Loading():
                self._on_loading(worker, message)

    def on_lost(self, worker: int, loss: Loss) -> None:
        """A worker has ended for certain."""
        self._note_state(worker, WorkerState.LOST, loss.error.message)
        self.metrics.fleet.on_worker_lost(worker)
        self.failures.on_loss(worker, loss)
        self.tell(WorkerDown(worker, self.streams.progress(), loss.crashed, loss.error.message))
        self.streams.deliver()

    def _on_report(self, worker: int, report: StepReport) -> None:
        """First the tokens, then the events of their requests; the readers wake last."""
        events = unpack_events(report.events)
        streams, stopped = self.streams, []
        for event in events:
            if isinstance(event, TransferFailed):
                logger.info("worker %d: the KV of %s cannot be moved: %s", worker, event.request_id, event.message)
        streams.on_events(worker, events)
        if report.first_tokens:
            stopped += self._completed_handoffs.take(worker, events, report.first_tokens)
        if report.tokens is not None:
            stopped += streams.on_tokens(worker, report.tokens, stopped_by_token(events))
        self.timeline.on_events(worker, events)
        if report.stats is not None:
            self.metrics.on_stats(worker, report.stats)
        read = self.core.reads
        news = [event for event in events if type(event) in read]
        if news or report.load is not None:
            self.tell(Reported(worker, news, report.load))
            self._alarm.check(self.core.router.alarm)
            for event in news:
                if isinstance(event, Resized):
                    if event.message:
                        logger.warning("worker %d: it still computes on %s: %s", worker, event.share, event.message)
                    self.show(worker, event.time_ns)
        if stopped:
            self._stop(stopped)
        streams.deliver()

    def _stop(self, streams: Iterable[AnswerStream]) -> None:
        """These are complete or cannot continue; some have ended in the same report."""
        still_open = [stream for stream in streams if stream.request_id in self.streams]
        self._cancel((stream for stream in still_open if not stream.generation.has_failed), FinishReason.STOP)
        for stream in still_open:
            if stream.generation.has_failed:
                self.abort(stream.generation)

    def on_ready(self, worker: int, ready: Ready) -> None:
        self.known[worker] = ready
        self.failures.replaced(f"worker {worker}")
        assert self._plan is not None
        info = self._plan.info_of(worker, self.role(worker), self.workers[worker].site, ready)
        self.tell(WorkerUp(info))
        if has_both_phases(self.core.members.infos[number].role for number in self.core.members.up):
            self._enough.set()
        if self.joint_ready is not None and self.door is not None:
            self._join_ready()
        self._note_state(worker, WorkerState.READY, ready.description)
        if self.changes.is_draining(worker):
            self.show(worker)

    def _on_loading(self, worker: int, message: Loading) -> None:
        self.failures.replaced(f"worker {worker}")
        if self.workers[worker].num_restarts and self.timeline.workers[worker].state != WorkerState.STARTING:
            self._note_state(worker, WorkerState.STARTING)
        if len(self.workers) > 1:
            message = Loading(f"worker {worker}: {message.stage}", message.fraction)
        self.loading = message

    def role(self, worker: int) -> Role:
        """What a worker is for, now."""
        info = self.core.members.infos.get(worker)
        if info is not None:
            return info.role
        site = self.workers[worker].site if worker < len(self.workers) else WorkerSite()
        return site.role or self.fleet.slots[worker]

    # -- the core: events in, commands out ----------------------------------------------------------------------------

    def tell(self, *happened: ClusterEvent) -> None:
        """These happened, in this order; what happens while they are dealt with waits for its turn."""
        if self.failures.final is not None:
            return
        if self.misses is not None:
            for event in happened:
                self.misses.on_event(event)
        self._happened.extend(happened)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._happened:
                self._handle(self._happened.popleft(), self._clock())
        except (RequestError, ConfigError):  # of one request, which was refused before it began
            raise
        except Exception as error:
            self.on_defect("its loop", error)
        finally:
            self._is_busy = False
            if self.failures.final is None:
                try:
                    self._send_orders()
                    self._timer.set(self.core.next_time())
                except Exception as error:  # orders that no worker has got would be waited for for ever
                    self.on_defect("its orders", error)

    def _handle(self, event: ClusterEvent, now: int) -> None:
        try:
            commands = self.core.on_event(event, now)
        except Exception:
            self._guard.note_unfinished(event, now)
            raise
        if self.planner is not None:
            self.planner.on_cluster_event(event, commands, now)
        for command in commands:
            self._carry_out(command)

    def on_defect(self, where: str, error: BaseException) -> None:
        """End every open request with a 500; the server ends, see ``failures``."""
        failed = self._guard.report(where, error)
        self._happened, self._orders = deque(), {}
        self._timer.cancel()
        self.streams.fail_all(failed)

    def leave_recording(self, core: str, error: BaseException) -> str:
        """Write down what the fleet was told last, for a failure of what tells it. Returns the path, or ""."""
        return self._guard.leave(core, error)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Serve() | Reserve() | Prefill():
                self._begin_attempt(command)
            case Restarted():
                self.streams.on_restarted(command.request_id, command.attempt_id)
            case Evacuate():
                self.tell(EvacuationReady(command.worker, command.request_id, self.streams.progress()))
            case Drained():
                self.changes.on_drained(command.worker)
            case End():
                answer = self.streams.answer_of(command.request_id, command.finished, self._clock())
                if answer is not None:
                    self.timeline.on_answer(answer)
                failed = self.streams.on_end(command.request_id, command.finished, command.error)
                if failed is not None:
                    self.abort(failed)
            case _:
                self._order(command)

    def _begin_attempt(self, command: Serve | Reserve | Prefill) -> None:
        tokens = self.streams.attempt_tokens(command.request_id)
        if tokens is None:  # its client has left; the Cancelled waits for its turn
            return
        if not isinstance(command, Reserve):
            self.streams.on_placed(command.request_id, command.attempt_id, command.worker)
        address = self.known[command.target].address if isinstance(command, Prefill) else ""
        self._orders.setdefault(command.worker, []).append(Order(pack_command(command), tokens, address))

    def _order(self, command: WorkerCommand) -> None:
        self._orders.setdefault(command.worker, []).append(Order(pack_command(command)))

    def _send_orders(self) -> None:
        orders, self._orders = self._orders, {}
        for worker, batch in orders.items():
            self.workers[worker].send(Orders(batch))

    def _on_timer(self) -> None:
        try:
            self.tell(Tick())
            self.streams.deliver()
        except Exception as error:
            self.on_defect("its timer", error)

    def _note_state(self, worker: int, state: str, detail: str = "", at_ns: int | None = None) -> None:
        info = self.core.members.infos.get(worker)
        units = str(info.share) if info and info.share.num_units else ""
        now = self._clock() if at_ns is None else at_ns
        self.timeline.on_worker(worker, state, now, role=self.role(worker), detail=detail, computes_on=units)


def view_of(fleet: "Fleet", now: int) -> FleetView:
    """What there is of it at ``now``."""
    core, numbers = fleet.core, range(max(len(fleet.fleet.roles), len(fleet.workers)))
    return FleetView(
        [fleet.role(number) for number in numbers],
        [number in core.members.up for number in numbers],
        [worker.num_restarts for worker in fleet.workers] or [0] * len(numbers),
        core.counts,
        len(core.admission),
        core.router.alarm,
        core.length_errors.errors,
        fleet.planner.num_decisions if fleet.planner is not None else {},
        core.paths.broken_at(now),
        fleet.door.refused if fleet.door is not None else {},
        fleet.joint_ready,
        fleet.failures.counts,
        frozenset(number for number in numbers if fleet.changes.is_draining(number)),
    )


FirstTokens = Mapping[str, tuple[int, TokenLogprobs | None]]  # of attempts that a worker has taken over


class CompletedHandoffs:
    """The migrations of one fleet's streams from worker to worker."""

    def __init__(self, streams: OutputStreams, metrics: ServingMetrics, timeline: Timeline) -> None:
        self._streams = streams
        self._metrics = metrics
        self._timeline = timeline

    def take(self, worker: int, events: Sequence[Event], first_tokens: FirstTokens) -> list[AnswerStream]:
        """A decode worker has taken these over. Returns the streams that are complete."""
        stopped = []
        for event in events:
            if not isinstance(event, HandoffDelivered):
                continue
            self._metrics.on_transfer(event.num_bytes, event.transfer_ns)
            completed = self._streams.on_delivered(worker, event.request_id, *first_tokens[event.request_id])
            if completed is not None:
                stopped += completed.stopped
                start_ns, exposed_ns = event.time_ns - event.transfer_ns, int(completed.exposed_s * NS_PER_S)
                self._timeline.on_transfer(
                    Transfer(
                        event.request_id, completed.sender, worker, event.num_bytes, start_ns, event.time_ns, exposed_ns
                    )
                )
        return stopped


class DueTimer:
    """Calls ``on_due`` once at the time that was last set. clock: nanoseconds, of the times that are set."""

    def __init__(self, clock: Callable[[], int], on_due: Callable[[], None]) -> None:
        self._clock = clock
        self._on_due = on_due
        self._handle: asyncio.TimerHandle | None = None
        self._due_ns: int | None = None

    def set(self, due_ns: int | None) -> None:
        """Set when it is due (None: never), in place of what was set before."""
        if due_ns == self._due_ns:
            return
        self.cancel()
        self._due_ns = due_ns
        if due_ns is not None:
            delay_s = max(0.0, (due_ns - self._clock()) / NS_PER_S)
            self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def cancel(self) -> None:
        """Cancel what was set."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._due_ns = None

    def _fire(self) -> None:
        self._handle = self._due_ns = None
        self._on_due()


class IndexAlarm:
    """What was said last."""

    def __init__(self) -> None:
        self._alarm = ""

    def check(self, alarm: str) -> None:
        """alarm: of the router, now; empty where its picture is right."""
        if bool(alarm) != bool(self._alarm):
            if alarm:
                logger.warning("the router's picture of the prefix caches is wrong: %s", alarm)
            else:
                logger.warning("the router's picture of the prefix caches is right again")
        self._alarm = alarm
