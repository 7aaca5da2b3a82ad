"""A fleet under virtual time: ClusterCore decides, as it does for the live server; this carries out what it says.

Owns the requests that have not ended as their clients see them, the messages between front end and workers, and the
books. Must decide nothing: which worker, when, and what becomes of a failure is diptych.control.cluster's business.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import (
    Arrived,
    Cancelled,
    ClusterEvent,
    Reported,
    Submission,
    Tick,
    TransferFailed,
    WorkerDown,
    WorkerUp,
)
from diptych.control.cluster.commands import (
    AskSnapshot,
    Command,
    Drop,
    End,
    Prefill,
    Release,
    Renew,
    Reserve,
    Restarted,
    Serve,
)
from diptych.control.events import Event, FirstToken, HandoffDelivered, RequestFinished
from diptych.control.request import FinishReason
from diptych.control.step import SchedulerOutput
from diptych.simulation.collector import Collector
from diptych.simulation.environment import MESSAGE, Environment
from diptych.simulation.event_log import EventLog
from diptych.simulation.fleet.client_request import OpenRequest
from diptych.simulation.fleet.control_channels import Wires
from diptych.simulation.fleet.kv_transfers import Transfers
from diptych.simulation.fleet.members import fleet, make_workers, peers_of
from diptych.simulation.fleet.process_lives import Supervisor
from diptych.simulation.fleet.simulated_executor import block_hashes, make_request
from diptych.simulation.fleet.simulated_worker import Auditor
from diptych.simulation.fleet.worker_handoffs import WorkerHandoffs
from diptych.simulation.fleet.worker_reports import Reporter
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import ClosedLoop, RequestSpec

FRONT_END = -1  # in the log: who reports when it is no worker
Progress = Callable[[int], None]  # how many requests have ended
Act = Callable[[], None]


class Cluster:
    """Everything that happens in one simulation."""

    def __init__(self, scenario: Scenario, progress: Progress | None = None, auditor: Auditor | None = None) -> None:
        members = fleet(scenario.engine, scenario.num_workers, scenario.pools)
        self.environment = Environment()
        self.collector = Collector(len(members))
        self.log = EventLog() if scenario.record_events else None
        self.core = ClusterCore([member.info for member in members], scenario.cluster_config)
        self.last_end_ns = 0
        self.workers = make_workers(scenario, members, self.environment, self._on_events, auditor)
        self._scenario = scenario
        self._progress = progress
        self._open: dict[str, OpenRequest] = {}
        self._num_arrived = 0
        self._leaving: OpenRequest | None = None  # hangs up just now
        self._tick_ns: int | None = None
        self._backlog: deque[tuple[list[Command], bool]] = deque()
        self._is_busy = False
        self._rng = random.Random(scenario.seed)
        self._hashes_matter = scenario.routing == "kv_aware" and scenario.engine.cache.enable_prefix_cache
        self._wires = Wires(self.environment, len(members), scenario.faults, scenario.seed)
        self._reporter = Reporter(scenario, self.workers)
        self.transfers: Transfers | None = None
        self.handoffs: list[WorkerHandoffs] = []
        if (pools := scenario.pools) is not None:
            self.transfers = Transfers(
                self.environment, len(members), pools.link, pools.kv_bytes_per_token, scenario.watch.resume_ns
            )
            self.handoffs = [
                WorkerHandoffs(worker, self.transfers, self.environment, self._on_transfer_failed)
                for worker in self.workers
            ]
        self.supervisor = Supervisor(self.environment, scenario.watch, self.workers, peers_of(members), self)

    @property
    def hit_error(self) -> float | None:
        """How wrong the picture of the caches was; None where nobody looks at them."""
        return self.core.placer.hit_error if self._scenario.routing == "kv_aware" else None

    def run(self, until_ns: int | None = None) -> None:
        """From the first arrival until nothing is left to happen. Raises AssertionError when requests never end."""
        for worker in self.workers:
            self._tell(WorkerUp(worker.number))
        self.supervisor.schedule(self._scenario.faults)
        workload = self._scenario.workload
        if isinstance(workload, ClosedLoop):
            for client in range(workload.concurrency):
                self._next_of(client, workload)
        else:
            self._await_next(iter(workload))
        self.environment.run(until_ns)
        assert not self._open, f"{len(self._open)} requests never ended"

    # -- clients ----------------------------------------------------------------------------------------------------

    def _await_next(self, arrivals: Iterator[RequestSpec]) -> None:
        spec = next(arrivals, None)
        if spec is not None:
            self.environment.at(spec.arrival_ns, MESSAGE, partial(self._arrive, spec, arrivals))

    def _arrive(self, spec: RequestSpec, arrivals: Iterator[RequestSpec]) -> None:
        self._await_next(arrivals)
        self._accept(spec)

    def _next_of(self, client: int, workload: ClosedLoop) -> None:
        spec = workload.next_request(client, self.environment.now)
        if spec is not None:
            self.environment.at(spec.arrival_ns, MESSAGE, partial(self._accept, spec, client))

    def _accept(self, spec: RequestSpec, client: int = -1) -> None:
        """A request comes to the front end, which takes its time with it."""
        number = self._num_arrived
        self._num_arrived += 1
        delay_ns = self._scenario.front_end.delay_ns(spec.prompt_tokens)
        if delay_ns:
            self.environment.at(self.environment.now + delay_ns, MESSAGE, partial(self._submit, number, spec, client))
        else:
            self._submit(number, spec, client)

    def _submit(self, number: int, spec: RequestSpec, client: int) -> None:
        request_id = str(number)
        self._open[request_id] = OpenRequest(number, spec, request_id, client)
        hashes: tuple[bytes, ...] = ()
        if self._hashes_matter and spec.hash_ids:
            hashes = tuple(block_hashes(spec, spec.prompt_tokens, self._scenario.engine.cache.block_size))
        max_tokens = spec.max_tokens or spec.output_tokens
        if spec.abort_after_ns is not None:
            self.environment.at(self.environment.now + spec.abort_after_ns, MESSAGE, partial(self._hang_up, request_id))
        self._tell(Arrived(Submission(request_id, spec.prompt_tokens, max_tokens, hashes, spec.priority, spec.slo)))

    def _hang_up(self, request_id: str) -> None:
        """The client goes away. Where nothing can get lost the worker says at once how far it was."""
        one = self._open.get(request_id)
        if one is None:
            return
        if self._reporter.says_only_ends:
            self._leaving = one
        self._tell(Cancelled(request_id, one.num_tokens + one.has_token))
        self._leaving = None
        if request_id in self._open:
            self._end_here(request_id, FinishReason.ABORT, "")

    # -- the core ---------------------------------------------------------------------------------------------------

    def _tell(self, event: ClusterEvent, *, later: bool = False) -> None:
        """Tell the core and carry out what it says. later: what it says to workers leaves after this nanosecond (which
        worker ends its step first within it must not matter)."""
        commands = self.core.on_event(event, self.environment.now)
        self._watch_time()
        if not commands:
            return
        self._backlog.append((commands, later))
        if self._is_busy:
            return
        self._is_busy = True
        while self._backlog:
            commands, later = self._backlog.popleft()
            for command in commands:
                self._carry_out(command, later)
        self._is_busy = False

    def _watch_time(self) -> None:
        due_ns = self.core.next_time()
        if due_ns is not None and (self._tick_ns is None or due_ns < self._tick_ns):
            self._tick_ns = max(due_ns, self.environment.now)
            self.environment.at(self._tick_ns, MESSAGE, partial(self._tick, self._tick_ns))

    def _tick(self, at_ns: int) -> None:
        if at_ns != self._tick_ns:
            return
        self._tick_ns = None
        due_ns = self.core.next_time()
        if due_ns is not None and due_ns <= at_ns:
            self._tell(Tick())
            due_ns = self.core.next_time()
            assert due_ns is None or due_ns > at_ns, "a Tick left something undone"
        self._watch_time()

    def _carry_out(self, command: Command, later: bool) -> None:
        match command:
            case Serve():
                one = self._open[command.request_id]
                one.worker = one.prefill = command.worker
                self._begin_attempt(command, one.attempt_spec(), later)
            case End():
                self._end(command)
            case Reserve():
                one = self._open[command.request_id]
                one.worker = command.worker
                self._begin_attempt(command, one.attempt_spec(), later)
            case Prefill():
                one = self._open[command.request_id]
                one.prefill = command.worker
                self.collector.expect_handoff(command.attempt_id)
                self._begin_attempt(command, one.attempt_spec(), later)
            case Release():
                self._wires.post(
                    command.worker, partial(self.workers[command.worker].release, command.attempt_id), later
                )
            case Drop():
                self._wires.post(command.worker, partial(self.workers[command.worker].drop, command.attempt_id), later)
            case Renew():
                self._wires.post(
                    command.worker, partial(self.handoffs[command.worker].renew, command.attempt_ids), later
                )
            case Restarted():
                self._restart(command)
            case AskSnapshot():
                self._wires.post(command.worker, partial(self._take_snapshot, command.worker), later)

    def _begin_attempt(self, command: Serve | Reserve | Prefill, spec: RequestSpec, later: bool) -> None:
        self._wires.post(command.worker, partial(self._start_attempt, command, spec), later)

    def _start_attempt(self, command: Serve | Reserve | Prefill, spec: RequestSpec) -> None:
        """The worker hears of an attempt (of one that it has heard of before, nothing comes)."""
        worker = command.worker
        if not self._wires.is_news(worker, command.attempt_id):
            return
        request = make_request(command.attempt_id, spec, self._scenario.engine.cache.block_size)
        if isinstance(command, Serve):
            self.workers[worker].submit(request, spec)
        elif isinstance(command, Reserve):
            self.handoffs[worker].reserve(request, spec, command)
        else:
            self.handoffs[worker].prefill(request, spec, command)

    def _restart(self, command: Restarted) -> None:
        one = self._open[command.request_id]
        last_ns = one.first_token_ns
        if one.worker >= 0 and (one.is_taken_over or not one.is_handoff):
            last_ns = max(last_ns, self.collector.last_token_ns(one.worker))
        self.collector.restart(one.attempt_id, command.attempt_id, last_ns if one.first_token_ns >= 0 else -1)
        one.begin_attempt(command.attempt_id)
        one.num_attempts += 1

    def _take_snapshot(self, worker: int) -> None:
        def act(now: int) -> list[Event]:
            self._wires.report(worker, partial(self._tell, self._reporter.snapshot(worker), later=True))
            return []

        self.workers[worker].hear(act)

    # -- workers ----------------------------------------------------------------------------------------------------

    def _on_events(self, worker: int, events: list[Event], output: SchedulerOutput | None) -> None:
        """A worker reports."""
        if self.log is not None:
            self.log.extend(worker, events)
        self.collector.take(worker, events, output, self.workers[worker].usage)
        if self._reporter.says_only_ends:
            for event in events:
                if type(event) is RequestFinished:
                    self._hear_end(worker, event)
            return
        if self.handoffs:
            self.handoffs[worker].on_events(events)
        if self._scenario.faults:
            self._note_ends(events)
        for message in self._reporter.messages(worker, events, self.environment.now, is_step_end=output is not None):
            self._wires.report(worker, partial(self._hear, message))

    def _note_ends(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is RequestFinished:
                one = self._of_attempt(event.request_id)
                if one is not None:
                    one.num_final = event.latency.num_output_tokens

    def _hear(self, message: ClusterEvent) -> None:
        """The front end hears what a worker says."""
        if isinstance(message, Reported):
            for event in message.events:
                if type(event) is FirstToken or type(event) is HandoffDelivered:
                    one = self._of_attempt(event.request_id)
                    if one is not None:
                        one.token_came(event.time_ns)
                        one.is_taken_over |= type(event) is HandoffDelivered
        self._tell(message, later=True)

    def _hear_end(self, worker: int, event: RequestFinished) -> None:
        """Where nothing else is of interest."""
        if self._leaving is not None and self._leaving.attempt_id == event.request_id:
            self._end_with(self._leaving, event)
        self._tell(Reported(worker, (event,)), later=True)

    def _of_attempt(self, attempt_id: str) -> OpenRequest | None:
        """The request whose current attempt this is."""
        one = self._open.get(attempt_id.partition("~")[0])
        return one if one is not None and one.attempt_id == attempt_id else None

    def _on_transfer_failed(self, worker: int, attempt_id: str, is_sender: bool, message: str) -> None:
        failed = TransferFailed(worker, attempt_id, is_sender, message)
        self._wires.report(worker, partial(self._tell, failed, later=True))

    # -- failures (see supervisor.FrontEnd) -------------------------------------------------------------------------

    def on_death(self, worker: int) -> None:
        """The process is gone; nobody knows yet."""
        self._wires.on_death(worker)
        if self.transfers is not None:
            self.transfers.lose(worker)
            self.handoffs[worker].reset()

    def on_down(self, worker: int, tokens: dict[str, int]) -> None:
        """Its death is known; what it had sent and nobody has heard yet is lost."""
        self._wires.on_down(worker)
        self._reporter.reset(worker)
        most, longest = self._scenario.watch.max_lost_tokens, self._scenario.engine.max_model_len
        progress = {
            request_id: one.keep(worker, tokens, self._rng.randrange(most + 1) if most else 0, longest)
            for request_id, one in self._open.items()
            if worker in (one.worker, one.prefill)
        }
        self._tell(WorkerDown(worker, progress, crashed=True))

    def on_up(self, worker: int) -> None:
        """A new process is ready, and empty."""
        self._wires.on_up(worker)
        self._tell(WorkerUp(worker))

    def ask_to_forget(self, worker: int, peer: int, answer: Act) -> None:
        """Ask a living worker to leave the memory of a dead one alone."""
        said = partial(self._wires.report, worker, answer)
        self._wires.post(worker, partial(self.handoffs[worker].forget_peer, peer, said), False)

    def set_link(self, worker: int, is_up: bool) -> None:
        """The worker's KV links break, or work again."""
        if self.transfers is not None:
            self.transfers.set_link(worker, is_up)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _end(self, command: End) -> None:
        one = self._open[command.request_id]
        if command.finished is not None:
            self._end_with(one, command.finished)
        else:
            message = command.error.message if command.error else ""
            self._end_here(command.request_id, FinishReason.ERROR, message)

    def _end_here(self, request_id: str, reason: FinishReason, message: str) -> None:
        """The front end ends a request itself."""
        one = self._open[request_id]
        event = one.ended_here(self.environment.now, reason, message, self._scenario.engine.slo)
        if self.log is not None:
            self.log.extend(FRONT_END, [event])
        self._close(one, event)

    def _end_with(self, one: OpenRequest, event: RequestFinished) -> None:
        """A worker ended a request."""
        self._close(one, one.seen(event, self._scenario.engine.slo))

    def _close(self, one: OpenRequest, event: RequestFinished) -> None:
        del self._open[str(one.number)]
        self.last_end_ns = self.environment.now
        spec = one.spec
        self.collector.add_row(event, one.number, spec.arrival_ns, one.worker, spec.kind, one.attempt_id)
        if self._progress is not None:
            self._progress(len(self.collector.requests))
        workload = self._scenario.workload
        if one.client >= 0 and isinstance(workload, ClosedLoop):
            self._next_of(one.client, workload)
