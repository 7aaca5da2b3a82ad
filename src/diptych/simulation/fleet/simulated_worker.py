"""A worker under virtual time: a WorkerCore, a simulated executor, and the worker's loop as events.

Owns when turns happen and when steps end. It decides nothing: the core decides what runs, the cost model how long it
takes. Messages are taken between steps, as a live worker does. A run of decode steps in which nothing is to be
decided is one event; a message that comes meanwhile cuts it at the end of the step that is then under way, exactly
where a worker that takes step after step would read it. The lanes of a pipeline take step after step: how long one
lasts depends on the other lanes.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from diptych.control.compute_share import ComputeShare
from diptych.control.config import EngineConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.kvcache.tier_records import TierEvent
from diptych.control.engine.reports import LoadReport
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.engine.worker_core import TransferAction, TransferCommitted, TransferEvent, WorkerCore
from diptych.control.events import Event
from diptych.control.request import DEFAULT_OPTIONS, Request
from diptych.control.slo import LatencyBreakdown, breakdown_from_times
from diptych.control.step import SchedulerOutput, StepResult
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.environment import MESSAGE, STEP_END, Environment
from diptych.simulation.fleet.pipeline import Pipeline
from diptych.simulation.fleet.simulated_disk import DiskModel, SimulatedDisk
from diptych.simulation.fleet.simulated_drafts import SimulatedDrafts
from diptych.simulation.fleet.simulated_executor import SimulatedExecutor
from diptych.simulation.fleet.simulated_hosts import SharedContents, SimulatedPeerReader
from diptych.simulation.fleet.step_run import StepRun
from diptych.simulation.results import WorkerUsage
from diptych.workload.spec import RequestSpec

Auditor = Callable[[int, SchedulerOutput], None]  # (worker, a plan that begins or ends)
Order = Callable[[int], None]  # of the front end, to be carried out at a time


class Surroundings(Protocol):
    """The fleet around a simulated worker."""

    def on_report(
        self, worker: int, events: list[Event], load: LoadReport | None, ended: SchedulerOutput | None
    ) -> None:
        """The worker reports; ``ended``: the plan of the step that has ended."""
        ...

    def on_transfer_action(self, worker: int, action: TransferAction) -> None:
        """The worker wants this of its KV connector."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """What equal workers share: settings, costs, and the step-time model as warm-up leaves it. reports_load,
    publishes_kv: whether there is a router that reads that. pipeline: of the replica that the worker is a lane of.
    stall_ns: see Pools. share: of the device, for which ``cost`` holds. shared: the host blocks of the fleet, where
    workers read each other's. depth: see Scenario."""

    engine: EngineConfig
    cost: CostModel
    model: StepTimeModel
    fast_forward: bool = True
    swap_block_ns: int = 0
    reports_load: bool = True
    publishes_kv: bool = True
    copy_block_ns: int = 0
    share: ComputeShare = field(default_factory=ComputeShare)
    pipeline: Pipeline | None = None
    stall_ns: int = 0
    drafts: SimulatedDrafts | None = None
    disk: DiskModel | None = None
    shared: SharedContents | None = None
    depth: int = 1


class SimulatedWorker:
    """One worker. ``auditor`` (for tests) sees the plans."""

    def __init__(
        self,
        number: int,
        worker: WorkerModel,
        environment: Environment,
        surroundings: Surroundings,
        auditor: Auditor | None = None,
    ) -> None:
        self.number = number
        self.config = worker.engine
        self.usage = WorkerUsage(self.config.cache.num_blocks)
        self._worker = worker
        self._environment = environment
        self._surroundings = surroundings
        self._auditor = auditor
        self._hung_until = 0
        self._down_until = 0
        self._last_end_ns = 0
        self._slowness = 1000  # per mille, of the fault and of the compute share together
        self._fault_factor = 1.0
        self._share = worker.share
        self._inbox: deque[Order] = deque()
        self._transfers: deque[TransferEvent] = deque()
        self._moved: deque[TierEvent] = deque()
        self._disk = SimulatedDisk(worker.disk, environment, self._on_tier) if worker.disk else None
        self._peers: SimulatedPeerReader | None = None
        if worker.shared is not None:
            price_ns = self.config.cache.tiers.peer_block_ns
            self._peers = SimulatedPeerReader(number, worker.shared, price_ns, environment, self._on_tier)
        self._run: StepRun | None = None
        self._ahead: SchedulerOutput | None = None  # planned behind the step under way
        self._in_turn = False  # what comes meanwhile only fills the inbox
        self._wake_ns: int | None = None  # when a turn is asked for
        self._num_taken = 0  # requests whose KV came since the last step began
        self._start()

    def _start(self) -> None:
        """Begin, or begin again after a crash, empty."""
        worker = self._worker
        engine = EngineCore(self.config, worker.model.copy())
        self.core = WorkerCore(engine, publishes_kv=worker.publishes_kv, reports_load=worker.reports_load)
        self.executor = SimulatedExecutor(worker.cost, self.config.cache.block_size, worker.drafts)
        self._inbox.clear()
        self._transfers.clear()
        self._moved.clear()
        if self._run is not None:
            self._environment.cancel(self._run.timer)
            self._run = None
        self._ahead = None
        self._in_turn = False
        self._wake_ns = None
        self._num_taken = 0
        self._share = worker.share
        self._set_slowness()
        if self._peers is not None:
            self._peers.restart(engine.kv.host)
        if self._disk is not None:
            self._disk.restart()
            self._take_moved(self._environment.now)

    @property
    def engine(self) -> EngineCore:
        """The engine of the present process."""
        return self.core.engine

    # -- what comes ---------------------------------------------------------------------------------------------------

    def post(self, orders: Sequence[Order], *, has_newcomer: bool = False) -> None:
        """The front end sent a message: these orders. has_newcomer: one begins a request that others give way to."""
        self._inbox.extend(orders)
        is_best_effort = has_newcomer and self.engine.scheduler.best_effort.requests
        if is_best_effort and self._worker.pipeline is None and not (self.is_hung or self._in_turn):
            self._break_off(self._environment.now)
        self._wake()

    def on_transfer(self, event: TransferEvent) -> None:
        """Take in an event of a transfer."""
        self._transfers.append(event)
        self._wake()

    def _on_tier(self, event: TierEvent) -> None:
        """Take in an event of the disk."""
        self._moved.append(event)
        self._wake()

    def count_tiers(self) -> None:
        """Take into the usage what came from the tiers of the present process; it ends."""
        tiers = self.engine.stats().tiers
        self.usage.host_hit_tokens += tiers.host_hit_tokens
        self.usage.disk_hit_tokens += tiers.disk_hit_tokens
        self.usage.peer_hit_tokens += tiers.peer_hit_tokens
        self.usage.disk_stored_blocks += tiers.stored_blocks

    def _take_moved(self, now: int) -> None:
        while self._moved:
            self.core.on_tier(self._moved.popleft(), now)

    def take_in(self, request: Request, spec: RequestSpec) -> None:
        """The executor learns of a request, unless the engine has refused it."""
        if request.request_id in self.engine.requests:
            self.executor.add(request, spec)

    # -- faults -------------------------------------------------------------------------------------------------------

    def crash(self, until_ns: int) -> dict[str, int]:
        """Lose everything; an empty worker takes this one's place at ``until_ns``. Returns how many tokens each attempt
        had been given here."""
        now = self._environment.now
        self._end_steps_over()
        tokens = {request_id: self._num_outputs(request, now) for request_id, request in self.engine.requests.items()}
        if self._run is not None:
            self._account(self._run, 0, now)
        self.usage.down_ns += max(0, until_ns - max(now, self._down_until))
        self._down_until = max(self._down_until, until_ns)
        self._hung_until = 0
        self.count_tiers()
        self._start()
        return tokens

    @property
    def is_hung(self) -> bool:
        """Whether it takes no messages now."""
        return self._environment.now < self._hung_until

    def hang(self, until_ns: int) -> None:
        """Take no message and end no step before then."""
        now = self._environment.now
        self._cut(now)
        self.usage.down_ns += max(0, until_ns - max(now, self._hung_until))
        self._hung_until = max(self._hung_until, until_ns)

    def wake(self) -> None:
        """Continue after a hang."""
        if not self.is_hung:
            self._wake()

    def slow_down(self, factor: float) -> None:
        """Steps that begin from now on take ``factor`` times as long (1: as usual)."""
        self._cut(self._environment.now)
        self._fault_factor = factor
        self._set_slowness()

    def cut_off(self) -> dict[str, int]:
        """The connection to the front end breaks. Returns how many tokens each attempt has been given here by now."""
        now = self._environment.now
        self._cut(now)
        return {request_id: self._num_outputs(request, now) for request_id, request in self.engine.requests.items()}

    def abandon(self) -> None:
        """Drop the attempts that are here: the front end is lost."""
        self.post([self.core.drop_all])

    def start_over(self, is_back: Callable[[], bool]) -> None:
        """There is a way to the front end again: when all attempts are dropped, and ``is_back`` says that there still
        is, the worker introduces itself."""
        self.post([partial(self._start_over, is_back)])

    def _start_over(self, is_back: Callable[[], bool], now: int) -> None:
        self.core.drop_all(now)
        self._flush()  # to nobody
        if is_back():
            self.core.introduce(now)

    # -- compute units ------------------------------------------------------------------------------------------------

    def resize(self, share: ComputeShare, now: int) -> None:
        """An order: compute on this share from the next step on, in inverse proportion to its units."""
        before, self._share = self._share, share
        ratio = before.num_units / share.num_units if before.num_units and share.num_units else 1.0
        self._set_slowness()
        self.core.on_resized(share, ratio, now)

    def _set_slowness(self) -> None:
        first, share = self._worker.share, self._share
        ratio = first.num_units / share.num_units if first.num_units and share.num_units else 1.0
        self._slowness = round(1000 * self._fault_factor * ratio)

    # -- what others may know -----------------------------------------------------------------------------------------

    def account(self, request_id: str) -> LatencyBreakdown | None:
        """Where the time of a request here went until now; None when it is not here."""
        request, now = self.engine.requests.get(request_id), self._environment.now
        if request is None:
            return None
        return breakdown_from_times(
            request.arrival_ns,
            request.first_step_ns,
            request.first_token_ns,
            now,
            self._num_outputs(request, now),
            request.handoff_end_ns,
        )

    # -- turns --------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Take a turn for what came: now, or when the step under way is over. The front end may answer a report at
        once: the turn that reports looks at the inbox again before it ends."""
        if self.is_hung or self._in_turn:
            return
        if self._run is None:
            self._turn()
        else:
            self._cut(self._environment.now)

    def _turn(self) -> None:
        """Run one turn of the loop; a step that has ended was taken in already."""
        now = self._environment.now
        self._in_turn = True
        self._take_inbox(now)
        while not self._begin(now) and self._has_inbox():
            self._take_inbox(now)
        self._in_turn = False
        if self._has_inbox():
            self._cut(now)
        self._watch_time()

    def _has_inbox(self) -> bool:
        return bool(self._inbox or self._transfers or self._moved)

    def _take_inbox(self, now: int) -> None:
        """Take in what came, and what the front end answers to it."""
        core = self.core
        while True:
            while self._transfers:
                event = self._transfers.popleft()
                if core.on_transfer(event, now) and isinstance(event, TransferCommitted):
                    self.executor.deliver(event.attempt_id)
                    self._num_taken += 1
            self._take_moved(now)
            while self._inbox:
                self._inbox.popleft()(now)
            core.end_turn(now)
            self._flush()
            if not self._has_inbox():
                return

    def _begin(self, now: int) -> bool:
        """The next step; whether there is one. A plan that only names requests that left takes no time."""
        core = self.core
        while (output := self._next_plan(now)) is not None:
            if self._auditor is not None:
                self._auditor(self.number, output)
            if output.is_compute or output.swap_out or output.swap_in:
                self._push(self._price(output, now))
                if self._worker.depth > 1:
                    self._ahead = core.begin_step(now)
                self._flush()
                return True
            self._flush()
            core.end_step(output, self.executor.execute(output), now)
            self._flush(output)
        self._flush()
        return False

    def _flush(self, ended: SchedulerOutput | None = None) -> None:
        """Carry out the actions of the core and report its events."""
        if not self.core.has_output:
            return
        outbox = self.core.take_outbox()
        surroundings = self._surroundings
        for action in outbox.before:
            surroundings.on_transfer_action(self.number, action)
        if outbox.events or outbox.load is not None:
            surroundings.on_report(self.number, outbox.events, outbox.load, ended)
        for action in outbox.after:
            surroundings.on_transfer_action(self.number, action)
        for move in outbox.tiers:
            if self._disk is not None:
                self._disk.act(move)
            if self._peers is not None:
                self._peers.act(move)

    def _watch_time(self) -> None:
        """Have a turn when the core wants one."""
        due_ns = self.core.next_wake_ns
        if due_ns is not None and (self._wake_ns is None or due_ns < self._wake_ns):
            self._wake_ns = max(due_ns, self._environment.now)
            self._environment.at(self._wake_ns, MESSAGE, partial(self._on_time, self._wake_ns))

    def _on_time(self, at_ns: int) -> None:
        if at_ns != self._wake_ns:  # an earlier turn was asked for since
            return
        self._wake_ns = None
        due_ns = self.core.next_wake_ns
        if due_ns is not None and due_ns <= at_ns:
            self._wake()
        else:
            self._watch_time()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _push(self, run: StepRun) -> None:
        run.timer = self._environment.at(run.end_ns, STEP_END + self.number, partial(self._end, run))
        self._run = run

    def _price(self, output: SchedulerOutput, now: int) -> StepRun:
        used = self.engine.kv.pool.num_used
        limit = self.executor.begin(output)
        stall_ns = self._stall_ns(output) if self._worker.stall_ns else 0
        pipeline = self._worker.pipeline
        if pipeline is not None:
            pass_ns = self._step_ns(output)
            end_ns = pipeline.enter(now, pass_ns) + stall_ns
            return StepRun(output, now, end_ns, 1, used, waits_ns=end_ns - now - pass_ns)
        is_plain = self._slowness == 1000 and not (output.swap_out or output.swap_in or stall_ns)
        if not self._worker.fast_forward or limit == 1 or not is_plain or self._worker.depth > 1:
            return StepRun(output, now, now + self._step_ns(output) + stall_ns, 1, used)
        run = StepRun(output, now, 0, limit, used)
        run.price(self._worker.cost)
        return run

    def _step_ns(self, output: SchedulerOutput) -> int:
        copies = len(output.swap_out) + len(output.swap_in)
        duration = self._worker.cost.step_ns(output) if output.is_compute else 0  # copies alone need no kernel
        duration += copies * self._worker.swap_block_ns
        duration += len(output.block_copies) * self._worker.copy_block_ns
        return max(1, duration * self._slowness // 1000)

    def _stall_ns(self, output: SchedulerOutput) -> int:
        """What the step loses to KV that came since the last one, and to KV that leaves with its end."""
        requests = self.engine.requests
        num_leaving = sum(chunk.is_last and requests[chunk.request_id].hands_off for chunk in output.prefills)
        num_taken, self._num_taken = self._num_taken, 0
        return (num_taken + num_leaving) * self._worker.stall_ns

    def _next_plan(self, now: int) -> SchedulerOutput | None:
        """The plan that was made behind the step that has ended, or a new one."""
        ahead, self._ahead = self._ahead, None
        return self.core.begin_step(now) if ahead is None else ahead

    def _cut(self, now: int) -> None:
        """The run under way ends with the step that ends now or next."""
        run = self._run
        if run is None or run.num_steps == 1:
            return
        steps, last_start_ns, end_ns = run.until(self._worker.cost, now)
        if steps < run.num_steps:
            self._environment.cancel(run.timer)
            run.num_steps, run.end_ns, run.last_start_ns = steps, end_ns, last_start_ns
            run.timer = self._environment.at(end_ns, STEP_END + self.number, partial(self._end, run))

    def _break_off(self, now: int) -> None:
        """End the step under way if it gives way to a newcomer: it has done nothing. Those of its run before it have
        ended as any."""
        self._cut(now)
        run = self._run
        if run is None or run.end_ns <= now or not self.engine.is_preemptible_by(DEFAULT_OPTIONS):
            return
        begun_ns = run.last_start_ns if run.num_steps > 1 else run.start_ns
        if begun_ns == now:
            return
        self._environment.cancel(run.timer)
        self._run, output, over = None, run.output, run.num_steps - 1
        self._account(run, over, now)
        if over:
            last_start_ns = run.until(self._worker.cost, now, over)[1] if over > 1 else None
            result = self.executor.end(over)
            self.core.end_step(output, result, begun_ns, num_steps=over, last_start_ns=last_start_ns)
            self._flush(output)
            begun = self.core.begin_step(begun_ns)
            assert begun is not None, "a run goes on until something changes"
            self.executor.begin(begun)
            output = begun
        self.core.end_step(output, StepResult(output.step_id), now, num_steps=0)
        self._flush(output)

    def _steps_over(self, now: int) -> int:
        """Steps of the run under way that are over."""
        run = self._run
        return 0 if run is None or run.num_steps == 1 else min(run.num_steps, run.until(self._worker.cost, now)[0]) - 1

    def _end_steps_over(self) -> None:
        """The process ends in the middle of a run: its steps that are over were reported."""
        self._cut(self._environment.now)
        run = self._run
        if run is None or run.num_steps == 1:
            return
        self._environment.cancel(run.timer)
        num_steps, begun_ns = run.num_steps - 1, run.last_start_ns
        self._account(run, num_steps, begun_ns)
        self.core.end_step(run.output, self.executor.end(num_steps), begun_ns, num_steps=num_steps)
        self._flush(run.output)
        self._run = StepRun(run.output, begun_ns, run.end_ns, 1, run.used_blocks)

    def _num_outputs(self, request: Request, now: int) -> int:
        """Tokens that a request has been given here by now."""
        batch = self.engine.scheduler.batch
        if request.request_id in batch:
            return batch.num_outputs(request) + self._steps_over(now)
        return request.num_output_tokens

    def _end(self, run: StepRun) -> None:
        now = self._environment.now
        if now < self._hung_until:
            run.timer = self._environment.at(self._hung_until, STEP_END + self.number, partial(self._end, run))
            return
        self._run, self._in_turn = None, True
        if self._auditor is not None:
            self._auditor(self.number, run.output)
        self._account(run, run.num_steps, now)
        result = self.executor.end(run.num_steps)
        self.usage.decode_tokens += sum([extra.num_accepted for extra in result.extra])
        last_start_ns = run.last_start_ns if run.num_steps > 1 else None
        self.core.end_step(run.output, result, now, num_steps=run.num_steps, last_start_ns=last_start_ns)
        self._flush(run.output)
        self._turn()

    def _account(self, run: StepRun, num_steps: int, now: int) -> None:
        """Count ``num_steps`` of a run as done (0: of a step that was broken off, only the time)."""
        usage, output = self.usage, run.output
        duration = max(0, now - max(run.start_ns, self._last_end_ns) - run.waits_ns)
        self._last_end_ns = now
        tokens = output.num_decodes * num_steps
        grown = max(0, tokens - output.num_decodes) // self.config.cache.block_size  # on average, within a run
        usage.add_step(output.features.prefill_tokens, output.num_decodes, num_steps, duration)
        usage.add_blocks(run.used_blocks + grown // 2, run.used_blocks + grown, duration)
