"""A fleet under virtual time: ClusterCore decides, as it does for the live server; this file carries out its commands.

Owns the open requests as their clients see them, the messages between front end and workers, and the results. It
decides nothing: which worker serves a request, when, and what follows from a failure is decided in diptych.control.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from diptych.control.class_hints import mypyc_attr
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import (
    Arrived,
    Cancelled,
    ClusterEvent,
    DrainEnded,
    DrainStarted,
    EvacuationReady,
    PartitionChanged,
    Reported,
    RoleChanged,
    SchedulerChanged,
    Tick,
    WorkerDown,
    WorkerUp,
)
from diptych.control.commands import (
    Command,
    Drained,
    End,
    Evacuate,
    Prefill,
    Reserve,
    Resize,
    Restarted,
    Serve,
    WorkerCommand,
    wait_class_of,
)
from diptych.control.compute_share import ComputeShare
from diptych.control.engine.reports import LoadReport
from diptych.control.engine.worker_core import ExpectTransfer, TransferAction, TransferCommitted, TransferEvent
from diptych.control.errors import ErrorRecord
from diptych.control.events import Event, FirstToken, HandoffDelivered, RequestFinished
from diptych.control.request import DEFAULT_OPTIONS, RequestOptions, Submission
from diptych.control.router.cost_router import CostRouter
from diptych.control.step import SchedulerOutput
from diptych.simulation.collector import Collector
from diptych.simulation.environment import MESSAGE, Environment
from diptych.simulation.event_log import EventLog
from diptych.simulation.fleet.client_request import ClientRequest, attempt_spec
from diptych.simulation.fleet.control_channels import ControlChannels
from diptych.simulation.fleet.front_end_life import FrontEndLife
from diptych.simulation.fleet.kv_network import KVNetwork
from diptych.simulation.fleet.kv_transfers import KVTransfers
from diptych.simulation.fleet.members import fleet, make_workers
from diptych.simulation.fleet.process_lives import ProcessLives
from diptych.simulation.fleet.simulated_executor import block_hashes, make_request
from diptych.simulation.fleet.simulated_misses import SimulatedMisses
from diptych.simulation.fleet.simulated_worker import Auditor, Order
from diptych.simulation.scenario import Scenario, WorkerChange
from diptych.workload.spec import ClosedLoop, RequestSpec

FRONT_END = -1  # in the log: the front end instead of a worker
Progress = Callable[[int], None]  # how many requests have ended
Watcher = Callable[[ClusterEvent, list[Command], int], None]  # (what the core was given, its commands, when)


@mypyc_attr(allow_interpreted_subclasses=True)
class SimulatedCluster:
    """Everything that happens in one simulation."""

    def __init__(self, scenario: Scenario, progress: Progress | None = None, auditor: Auditor | None = None) -> None:
        members = fleet(scenario)
        self.infos = [member.info for member in members]
        self._contexts = [member.config.max_model_len for member in members]
        self.environment = Environment()
        self.collector = Collector(len(members))
        self.log = EventLog() if scenario.record_events else None
        self.core = ClusterCore(scenario.cluster_config)
        self.last_end_ns = 0
        self.watcher: Watcher | None = None
        self.misses: SimulatedMisses | None = None
        if scenario.explain_misses:
            self.misses = SimulatedMisses(scenario.engine.cache.block_size, self._spec_of)
            self.watcher = self.misses.on_event
        self.workers = make_workers(scenario, members, self.environment, self, auditor)
        self._scenario = scenario
        self._progress = progress
        self._open: dict[str, ClientRequest] = {}
        self._num_arrived = 0
        self._tick_ns: int | None = None
        self._backlog: deque[tuple[list[Command], bool]] = deque()
        self._is_busy = False
        self._orders: dict[int, list[Order]] = {}  # not sent yet
        self._newcomers: set[int] = set()  # workers whose orders begin requests that others give way to
        self._running: set[str] = set()  # attempts that get their blocks next, and need no prompt computed
        self._rng = random.Random(scenario.seed)
        config = self.core.config
        has_costs = config.routing.routing == "kv_aware"
        self._hashes_matter = has_costs and len(members) > 1 and scenario.engine.cache.enable_prefix_cache
        # Where nothing but the ends of requests is of interest to the core, nothing but ends is reported.
        needs_all = (
            has_costs
            or scenario.explain_misses
            or scenario.pools
            or scenario.faults
            or config.max_prefills_in_flight_per_worker
        )
        self._read = self.core.reads if needs_all else frozenset((RequestFinished,))
        self._channels = ControlChannels(self.environment, len(members), scenario.faults, scenario.seed)
        self.transfers: KVTransfers | None = None
        if (pools := scenario.pools) is not None:
            wires = KVNetwork(self.environment, pools, scenario.faults, scenario.seed)
            resume_ns = scenario.watch.resume_ns
            self.transfers = KVTransfers(self.environment, self.infos, pools, wires, resume_ns, self._on_transfer_event)
        self.lives = ProcessLives(self.environment, scenario.watch, self.workers, self)
        self.front_end = FrontEndLife(self.environment, self)

    @property
    def hit_error(self) -> float | None:
        """How wrong the router's index of the caches was; None where the router has none."""
        return self.core.router.hit_error if isinstance(self.core.router, CostRouter) else None

    def run(self, until_ns: int | None = None) -> None:
        """Run from the first arrival until nothing is left to happen. Raises AssertionError when requests never end."""
        for worker in range(len(self.workers)):
            self._begin_life(worker)
        self.lives.schedule(self._scenario.faults)
        self.front_end.schedule(self._scenario.faults)
        for change in self._scenario.worker_changes:
            self.environment.at(change.at_ns, MESSAGE, partial(self.change, change))
        workload = self._scenario.workload
        if isinstance(workload, ClosedLoop):
            for client in range(workload.concurrency):
                self._next_of(client, workload)
        else:
            self._await_next(iter(workload))
        self.environment.run(until_ns)
        assert self.environment.is_stopped or not self._open, f"{len(self._open)} requests never ended"

    # -- clients ------------------------------------------------------------------------------------------------------

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
        """A request comes to the front end, which needs some time for it."""
        number = self._num_arrived
        self._num_arrived += 1
        delay_ns = self._scenario.front_end.delay_ns(spec.prompt_tokens)
        if delay_ns:
            self.environment.at(self.environment.now + delay_ns, MESSAGE, partial(self._submit, number, spec, client))
        else:
            self._submit(number, spec, client)

    def _submit(self, number: int, spec: RequestSpec, client: int) -> None:
        if not self.front_end.when_up(partial(self._submit, number, spec, client)):
            return
        request_id, now = str(number), self.environment.now
        options = DEFAULT_OPTIONS
        if spec.slo is not None or spec.priority or spec.service_class != options.service_class:
            options = RequestOptions(priority=spec.priority, slo=spec.slo, service_class=spec.service_class)
        request = self._open[request_id] = ClientRequest(number, spec, request_id, options, now, client)
        if spec.abort_after_ns is not None:
            self.environment.at(now + spec.abort_after_ns, MESSAGE, partial(self._hang_up, request))
        self._begin(request)

    def _begin(self, request: ClientRequest) -> None:
        """The front end learns of a request, which its client may have begun with another one."""
        spec = request.spec
        hashes: tuple[bytes, ...] = ()
        if self._hashes_matter and spec.hash_ids:
            hashes = tuple(block_hashes(spec, spec.prompt_tokens, self._scenario.engine.cache.block_size))
        max_tokens = spec.max_tokens or spec.output_tokens
        submission = Submission(request.request_id, spec.prompt_tokens, max_tokens, hashes, request.options)
        self._tell(Arrived(submission, request.num_tokens))

    def _spec_of(self, request_id: str) -> RequestSpec | None:
        request = self._open.get(request_id)
        return None if request is None else request.spec

    def _hang_up(self, request: ClientRequest) -> None:
        """The client goes away."""
        if self._open.get(request.request_id) is not request:
            return
        account = self.workers[request.worker].account(request.attempt_id) if request.worker >= 0 else None
        event = request.abandoned(self.environment.now, account, self._scenario.engine.slo)
        if self.log is not None:
            self.log.extend(FRONT_END, [event])
        self._close(request, event)
        self._tell(Cancelled(request.request_id, event.latency.num_output_tokens))

    # -- the core -----------------------------------------------------------------------------------------------------

    def change(self, change: WorkerChange) -> None:
        """A worker changes now, if there is a front end that knows it (no operator can change another)."""
        worker = change.worker
        if worker not in self.core.members.infos:
            return
        if change.scheduler is not None:
            self._tell(SchedulerChanged(worker, change.scheduler))
        if change.share is not None:
            self._tell(PartitionChanged(((worker, change.share),)))
        if change.role is not None:
            self._tell(RoleChanged(worker, change.role, self._tokens_of(worker)))
        if change.is_draining is not None:
            started = DrainStarted(worker, self._tokens_of(worker)) if change.is_draining else DrainEnded(worker)
            self._tell(started)

    def divide(self, shares: Mapping[int, ComputeShare]) -> None:
        """Let these workers compute on these shares from now on."""
        self._tell(PartitionChanged(tuple(sorted(shares.items()))))

    def _tokens_of(self, worker: int) -> dict[str, int]:
        """How many tokens the clients of this worker's streams have."""
        progress = {}
        for request_id, request in self._open.items():
            if request.worker == worker and request.has_token:
                account = self.workers[worker].account(request.attempt_id)
                progress[request_id] = request.num_tokens + max(1, account.num_output_tokens if account else 1)
        return progress

    def _tell(self, event: ClusterEvent, *, later: bool = False) -> None:
        """Give the core an event and carry out its commands. later: commands to workers leave after this nanosecond
        (which worker ends its step first within it must not matter)."""
        if not self.front_end.is_up:
            return
        commands = self.core.on_event(event, self.environment.now)
        if self.watcher is not None:
            self.watcher(event, commands, self.environment.now)
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
                self._carry_out(command)
            self._send_orders(later)
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

    def _carry_out(self, command: Command) -> None:
        match command:
            case Serve() | Reserve() | Prefill():
                request = self._open.get(command.request_id)
                if request is None:  # its client has left; the Cancelled waits for its turn
                    return
                if isinstance(command, Prefill):
                    request.prefill = command.worker
                    self.collector.expect_handoff(command.attempt_id)
                else:
                    request.worker = command.worker
                    if isinstance(command, Serve):
                        request.prefill = command.worker
                spec = attempt_spec(request.spec, command.num_output_tokens)
                self._order(command, partial(self._begin_attempt, command, spec, request.options))
                if not (request.options.is_best_effort or isinstance(command, Reserve)):
                    self._newcomers.add(command.worker)
            case Restarted():
                self._restart(command)
            case End():
                self._end(command)
            case Evacuate():
                self._tell(EvacuationReady(command.worker, command.request_id, self._tokens_of(command.worker)))
            case Drained():  # the simulated process goes on, with nothing to do
                pass
            case Resize():
                self._order(command, partial(self.workers[command.worker].resize, command.share))
            case _:
                self._order(command, partial(self.workers[command.worker].core.handle, command))

    def _order(self, command: WorkerCommand, order: Order) -> None:
        self._orders.setdefault(command.worker, []).append(order)

    def _send_orders(self, later: bool) -> None:
        """One message to each worker: what is decided at once begins in one step."""
        orders, self._orders = self._orders, {}
        newcomers, self._newcomers = self._newcomers, set()
        for worker, batch in orders.items():
            post = partial(self.workers[worker].post, batch, has_newcomer=worker in newcomers)
            self._channels.post(worker, post, later)

    def _begin_attempt(
        self, command: Serve | Reserve | Prefill, spec: RequestSpec, options: RequestOptions, now: int
    ) -> None:
        """The worker gets an attempt (one that it has got before is ignored)."""
        worker = self.workers[command.worker]
        if not self._channels.is_news(command.worker, command.attempt_id):
            return
        request = make_request(command.attempt_id, spec, self._scenario.engine.cache.block_size, options)
        request.wait_class_at_arrival, request.peer_run = wait_class_of(command), command.peer_run
        if spec.is_running:
            if isinstance(command, Prefill):
                return
            self._running.add(command.attempt_id)
            names = (command.request_id, command.attempt_id, command.num_output_tokens)
            worker.core.reserve(Reserve(command.worker, *names, 0, isinstance(command, Reserve)), request, now)
        elif isinstance(command, Serve):
            worker.core.serve(request, now)
        elif isinstance(command, Reserve):
            worker.core.reserve(command, request, now)
        else:
            worker.core.prefill(command, request, now)
        worker.take_in(request, spec)

    def _restart(self, command: Restarted) -> None:
        request = self._open.get(command.request_id)
        if request is None:
            return
        self._begin_again(request, command.attempt_id, command.num_output_tokens)

    def _begin_again(self, request: ClientRequest, attempt_id: str, num_tokens: int) -> None:
        """Another attempt, after ``num_tokens`` of the answer."""
        last_ns = request.first_token_ns
        if request.worker >= 0 and (request.is_taken_over or not request.is_handoff):
            last_ns = max(last_ns, self.collector.last_token_ns(request.worker))
        last_ns = last_ns if request.first_token_ns >= 0 else -1
        self.collector.restart(request.attempt_id, attempt_id, last_ns)
        request.begin_attempt(attempt_id, num_tokens)

    # -- workers (see simulated_worker.Surroundings) ------------------------------------------------------------------

    def on_report(
        self, worker: int, events: list[Event], load: LoadReport | None, ended: SchedulerOutput | None
    ) -> None:
        """A worker reports."""
        if self.log is not None:
            self.log.extend(worker, events)
        if self._channels.is_cut(worker):  # nobody learns it
            return
        self.collector.take(worker, events, ended, self.workers[worker].usage)
        if self._scenario.faults:
            self._note_ends(events)
        read = self._read
        known = [event for event in events if type(event) in read]
        if known or load is not None:
            self._channels.report(worker, partial(self._hear, Reported(worker, known, load)))

    def on_transfer_action(self, worker: int, action: TransferAction) -> None:
        """A worker wants something of its connector. The KV of a request that runs already is simply there."""
        if isinstance(action, ExpectTransfer) and action.attempt_id in self._running:
            self._running.remove(action.attempt_id)
            now = self.environment.now
            committed = TransferCommitted(action.attempt_id, now, now)
            self.environment.at(now, MESSAGE, partial(self._on_transfer_event, worker, committed))
            return
        assert self.transfers is not None, "there are no pools"
        self.transfers.act(worker, action)

    def _on_transfer_event(self, worker: int, event: TransferEvent) -> None:
        self.workers[worker].on_transfer(event)

    def _note_ends(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is RequestFinished:
                request = self._of_attempt(event.request_id)
                if request is not None:
                    request.num_final = event.latency.num_output_tokens

    def _hear(self, report: Reported) -> None:
        """The front end reads what a worker reports."""
        for event in report.events:
            if type(event) is FirstToken or type(event) is HandoffDelivered:
                request = self._of_attempt(event.request_id)
                if request is not None:
                    request.token_came(event.time_ns)
                    request.is_taken_over |= type(event) is HandoffDelivered
        self._tell(report, later=True)

    def _of_attempt(self, attempt_id: str) -> ClientRequest | None:
        """The request whose current attempt this is."""
        request = self._open.get(attempt_id.partition("~")[0])
        return request if request is not None and request.attempt_id == attempt_id else None

    # -- failures (see process_lives.FrontEndOfWorkers) ---------------------------------------------------------------

    def on_death(self, worker: int) -> None:
        """The process is gone; the front end does not know yet."""
        self._channels.on_death(worker)
        if self.transfers is not None:
            self.transfers.lose(worker)

    def on_cut(self, worker: int) -> None:
        """Take in that a worker's connection breaks."""
        self._channels.on_cut(worker)

    def on_down(self, worker: int, tokens: dict[str, int], *, crashed: bool) -> None:
        """Take in a worker's loss; what it had sent and the front end has not read is lost, too."""
        self._channels.on_down(worker)
        progress = {
            request_id: self._kept(request, worker, tokens)
            for request_id, request in self._open.items()
            if worker in (request.worker, request.prefill)
        }
        why = f"worker {worker} was lost: it crashed" if crashed else ""
        self._tell(WorkerDown(worker, progress, crashed, why))

    def _kept(self, request: ClientRequest, worker: int, tokens: dict[str, int]) -> int:
        """How many tokens its client has, of all that this worker had given."""
        most, longest = self._scenario.watch.max_lost_tokens, self._contexts[worker]
        return request.kept(worker, tokens, self._rng.randrange(most + 1) if most else 0, longest)

    def on_front_end_lost(self, until_ns: int) -> None:
        """Lose the front end with its core; every stream ends, with what its client has by then."""
        given = self.lives.lose_front_end(until_ns + 1)
        self._orders.clear()
        self._tick_ns = None
        requests, self._open = list(self._open.values()), {}
        for request in requests:
            worker, num_tokens = request.worker, request.num_tokens + request.has_token
            if worker >= 0:
                num_tokens = self._kept(request, worker, given[worker])
            request.num_losses += 1
            self._begin_again(request, f"{request.number}.{request.num_losses}", num_tokens)
            self._open[request.request_id] = request

    def on_front_end_back(self) -> None:
        """Another one, with a core that knows of nothing; clients go on with their streams."""
        self.core = ClusterCore(self._scenario.cluster_config)
        for request in list(self._open.values()):
            request.submitted_ns = self.environment.now
            self._begin(request)

    def on_up(self, worker: int) -> None:
        """A new process is ready, or one that was isolated is back."""
        self._channels.on_up(worker)
        if self.transfers is not None:
            self.transfers.restore(worker)
        self._begin_life(worker)

    def _begin_life(self, worker: int) -> None:
        """A process is ready; with its first turn it reports the load that it begins with."""
        self._tell(WorkerUp(self.infos[worker]))
        self.environment.at(self.environment.now, MESSAGE, self.workers[worker].wake)

    def set_link(self, worker: int, is_up: bool) -> None:
        """The worker's KV links break, or work again."""
        if self.transfers is not None:
            self.transfers.set_link(worker, is_up)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(self, command: End) -> None:
        request = self._open.get(command.request_id)
        if request is None:
            return
        slo = self._scenario.engine.slo
        if command.finished is not None:
            self._close(request, request.seen(command.finished, slo))
            return
        assert command.error is not None
        event = request.failed(self.environment.now, ErrorRecord.of(command.error), slo)
        if self.log is not None:
            self.log.extend(FRONT_END, [event])
        self._close(request, event)

    def _close(self, request: ClientRequest, event: RequestFinished) -> None:
        del self._open[request.request_id]
        self.last_end_ns = self.environment.now
        spec = request.spec
        self.collector.add_row(event, request.number, spec.arrival_ns, request.worker, spec.kind, request.attempt_id)
        if self._progress is not None:
            self._progress(len(self.collector.requests))
        workload = self._scenario.workload
        if request.client >= 0 and isinstance(workload, ClosedLoop):
            self._next_of(request.client, workload)
