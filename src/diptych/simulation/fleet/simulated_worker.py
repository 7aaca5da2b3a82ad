"""A worker under virtual time: a EngineCore, a simulated executor, and the worker's loop as events.

Owns when steps begin and end. It must decide nothing: what runs is the core's business, what it costs the cost
model's. A run of decode steps in which nothing is to be decided is one event; whoever comes meanwhile cuts it at the
end of the step that is then under way, exactly where a worker that takes step after step would listen.
"""

from collections import deque
from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

from diptych.control.config import EngineConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.events import Event
from diptych.control.request import Request
from diptych.control.step import SchedulerOutput, StepResult
from diptych.simulation.costs.cost_model import CostModel, DecodeLine
from diptych.simulation.environment import STEP_END, Environment
from diptych.simulation.fleet.simulated_executor import SimulatedExecutor
from diptych.simulation.results import WorkerUsage
from diptych.workload.spec import RequestSpec

Listener = Callable[[int, list[Event], SchedulerOutput | None], None]  # (worker, events, the plan that ended)
Auditor = Callable[[int, SchedulerOutput], None]  # (worker, a plan that begins or ends)


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """What equal workers share: settings, costs, and the step-time model as warm-up leaves it."""

    config: EngineConfig
    cost: CostModel
    model: StepTimeModel
    fast_forward: bool = True
    swap_block_ns: int = 0


@dataclass(slots=True)
class _Run:
    """What is under way: ``num_steps`` steps of one plan, from ``start_ns`` to ``end_ns``."""

    output: SchedulerOutput
    start_ns: int
    end_ns: int
    num_steps: int
    used_blocks: int
    timer: int = 0
    result: StepResult | None = None  # known at once when several steps are in flight
    last_start_ns: int = 0
    then: tuple[Callable[[], None], ...] = ()  # what waits for its end


class SimulatedWorker:
    """One worker. ``listener`` hears every event in the order in which it happens; ``auditor`` (for tests) sees the
    plans."""

    def __init__(
        self,
        number: int,
        worker: WorkerModel,
        environment: Environment,
        listener: Listener,
        auditor: Auditor | None = None,
    ) -> None:
        config = worker.config
        self.number = number
        self.config = config
        self._priority = STEP_END + number
        self.usage = WorkerUsage(config.cache.num_blocks)
        self._worker = worker
        self._cost = worker.cost
        self._environment = environment
        self._listener = listener
        self._auditor = auditor
        self._fast_forward = worker.fast_forward and config.max_steps_in_flight == 1
        self._hung_until = 0
        self._down_until = 0
        self._last_end_ns = 0
        self._inbox: list[Callable[[], None]] = []  # messages that came while it hung
        self._slowness = 1000  # per mille
        self._runs: deque[_Run] = deque()
        self._start(worker.model)

    def _start(self, model: StepTimeModel) -> None:
        """Begin, or begin again after a crash, empty."""
        self.core = EngineCore(self.config, deepcopy(model))
        self.executor = SimulatedExecutor(self._cost, self.config.cache.block_size)
        for run in self._runs:
            self._environment.cancel(run.timer)
        self._runs.clear()

    def submit(self, request: Request, spec: RequestSpec) -> None:
        """A request arrives at this worker."""
        self.hear(lambda now: self.take_in(request, spec, self.core.add_request(request, now)))

    def deliver(self, attempt_id: str, first_step_ns: int, first_token_ns: int) -> None:
        """The KV of a reserved request is here."""

        def act(now: int) -> list[Event]:
            self.executor.deliver(attempt_id)
            return self.core.deliver(attempt_id, now, first_step_ns=first_step_ns, first_token_ns=first_token_ns)

        self.hear(act)

    def release(self, attempt_id: str) -> None:
        """Another worker has what this one prefilled."""
        self.hear(lambda now: self.core.release(attempt_id, now))

    def drop(self, attempt_id: str) -> None:
        """End an attempt wherever it is. When it was being computed into the blocks of another worker, its end is said
        once nothing is written there any more."""

        def act(now: int) -> list[Event]:
            self._settle()  # how far the request is will be told
            request = self.core.requests.get(attempt_id)
            events = self.core.drop(attempt_id, now)
            if request is not None and not request.borrowed_block_ids:
                return events
            self.when_idle_of((attempt_id,), lambda: self.say(events))
            return []

        self.hear(act)

    def when_idle_of(self, attempt_ids: Collection[str], action: Callable[[], None]) -> None:
        """Act once nothing of these attempts is being computed."""
        run = self._computing(attempt_ids)
        if run is None:
            action()
        else:
            run.then += (action,)

    def hear(self, act: Callable[[int], list[Event]]) -> None:
        """A message comes: act on it at the time when the worker would, and say what happened."""
        now = self._environment.now
        if now < self._hung_until:
            self._inbox.append(partial(self.hear, act))
            return
        self._cut(now)
        if events := act(now):
            self._listener(self.number, events, None)
        self._begin()

    def say(self, events: list[Event]) -> None:
        """What had to wait for the end of a step."""
        self._listener(self.number, events, None)

    def _computing(self, attempt_ids: Collection[str]) -> "_Run | None":
        """The last step under way that computes a prompt of these."""
        for run in reversed(self._runs):
            if any(chunk.request_id in attempt_ids for chunk in run.output.prefills):
                return run
        return None

    def take_in(self, request: Request, spec: RequestSpec, events: list[Event]) -> list[Event]:
        """The executor hears of a request unless the core has refused it."""
        if request.request_id in self.core.requests:
            self.executor.add(request, spec)
        return events

    def crash(self, until_ns: int) -> dict[str, int]:
        """Lose everything; an empty worker takes this one's place at ``until_ns``. Returns how many tokens each attempt
        had been given here."""
        now = self._environment.now
        self._cut(now)
        self._settle()
        batch = self.core.scheduler.batch
        unsure = max(0, batch.ticks_scheduled - batch.ticks_completed - 1)  # who has left it counts steps in flight
        tokens = {
            attempt_id: batch.num_outputs(request)
            if attempt_id in batch
            else max(0, request.num_output_tokens - unsure)
            for attempt_id, request in self.core.requests.items()
        }
        for run in self._runs:
            self._account(run, now)
        self._inbox.clear()
        self.usage.down_ns += max(0, until_ns - max(now, self._down_until))
        self._down_until = max(self._down_until, until_ns)
        self._hung_until = 0
        self._start(self._worker.model)
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
        """After a hang: handle what came meanwhile."""
        if self._environment.now < self._hung_until:
            return
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            message()
        self._begin()

    def slow_down(self, factor: float) -> None:
        """Steps that begin from now on take ``factor`` times as long (1: as usual)."""
        self._cut(self._environment.now)
        self._slowness = round(1000 * factor)

    def _begin(self) -> None:
        """Hand out plans as long as the core has some and there is room in flight."""
        core, now = self.core, self._environment.now
        if now < self._hung_until or len(self._runs) >= self.config.max_steps_in_flight:
            return
        while (output := core.begin_step(now)) is not None:
            if self._auditor is not None:
                self._auditor(self.number, output)
            events = core.take_events()
            if not output.is_compute and not output.swap_out and not output.swap_in:
                self._tell(output, now)
            else:
                self._push(self._price(output, now))
            if events:
                self._listener(self.number, events, None)
            if len(self._runs) >= self.config.max_steps_in_flight:
                return
        if events := core.take_events():
            self._listener(self.number, events, None)

    def _push(self, run: _Run) -> None:
        run.timer = self._environment.at(
            max(run.end_ns, self._environment.now), self._priority, partial(self._end, run)
        )
        self._runs.append(run)

    def _tell(self, output: SchedulerOutput, now: int) -> None:
        """A plan that only tells the executor who left takes no time (several in flight: it ends in its turn)."""
        result = self.executor.execute(output)
        if self._runs:
            end_ns = max(now, self._runs[-1].end_ns)
            run = _Run(output, end_ns, end_ns, 1, self.core.kv.pool.num_used, result=result)
            self._push(run)
        else:
            self._listener(self.number, self.core.end_step(result, now), output)

    def _price(self, output: SchedulerOutput, now: int) -> _Run:
        start_ns = max(now, self._runs[-1].end_ns) if self._runs else now
        used = self.core.kv.pool.num_used
        if self.config.max_steps_in_flight > 1:
            result = self.executor.execute(output)
            return _Run(output, start_ns, start_ns + self._step_ns(output), 1, used, result=result)
        limit = self.executor.begin(output)
        is_plain = self._slowness == 1000 and not output.swap_out and not output.swap_in
        if not self._fast_forward or limit == 1 or not is_plain:
            return _Run(output, start_ns, start_ns + self._step_ns(output), 1, used)
        return self._price_run(_Run(output, start_ns, 0, limit, used))

    def _step_ns(self, output: SchedulerOutput) -> int:
        copies = len(output.swap_out) + len(output.swap_in)
        duration = self._cost.step_ns(output) + copies * self._worker.swap_block_ns
        return max(1, duration * self._slowness // 1000)

    def _price_run(self, run: _Run) -> _Run:
        """Set the end of a run of decode steps: exact sums along the lines of the cost model."""
        seqs = run.output.num_decodes
        context = run.output.features.decode_context
        end_ns, left = run.start_ns, run.num_steps
        while left:
            line = self._cost.decode_line(seqs, context)
            steps = min(left, -(-(line.until_context - context) // seqs))
            left -= steps
            end_ns += line.total_ns(context, seqs, steps)
            context += steps * seqs
        run.end_ns = end_ns
        run.last_start_ns = end_ns - line.step_ns(context - seqs)
        return run

    def _cut(self, now: int) -> None:
        """Somebody comes: the run under way ends with the step that ends now or next."""
        if not self._runs or self._runs[0].num_steps == 1:
            return
        run = self._runs[0]
        seqs = run.output.num_decodes
        context = run.output.features.decode_context
        end_ns, steps, last_start_ns = run.start_ns, 0, run.start_ns
        line = DecodeLine(0, 0, 0)
        while end_ns < now or steps == 0:
            if context >= line.until_context:
                line = self._cost.decode_line(seqs, context)
            last_start_ns = end_ns
            end_ns += line.step_ns(context)
            context += seqs
            steps += 1
        if steps < run.num_steps:
            self._environment.cancel(run.timer)
            run.num_steps, run.end_ns, run.last_start_ns = steps, end_ns, last_start_ns
            run.timer = self._environment.at(end_ns, self._priority, partial(self._end, run))

    def _end(self, run: _Run) -> None:
        now = self._environment.now
        if now < self._hung_until or run is not self._runs[0]:  # after a hang, steps end in the order of their plans
            later = max(now, self._hung_until)
            run.timer = self._environment.at(later, self._priority, partial(self._end, run))
            return
        self._runs.popleft()
        if self._auditor is not None:
            self._auditor(self.number, run.output)
        self._account(run, now)
        if run.result is not None:
            events = self.core.end_step(run.result, now)
        elif run.num_steps == 1:
            events = self.core.end_step(self.executor.end(1), now)
        else:
            result = self.executor.end(run.num_steps)
            events = self.core.end_step(result, now, num_steps=run.num_steps, last_start_ns=run.last_start_ns)
        self._listener(self.number, events, run.output)
        for action in run.then:
            action()
        self._begin()

    def _settle(self) -> None:
        """Of a run, the steps that are over are ended now, and the one under way is begun on its own, as a worker
        that takes step after step has done already. After ``_cut``, and only when somebody will look at the counts.
        """
        if not self._runs or self._runs[0].num_steps == 1:
            return
        run = self._runs.popleft()
        self._environment.cancel(run.timer)
        done = replace(run, num_steps=run.num_steps - 1, end_ns=run.last_start_ns)
        self._account(done, done.end_ns)
        self.executor.end(done.num_steps)
        output, events = self.core.end_repeats(done.num_steps, done.end_ns)
        self._listener(self.number, events, run.output)
        self.executor.begin(output)
        self._push(_Run(output, done.end_ns, run.end_ns, 1, run.used_blocks))

    def _account(self, run: _Run, now: int) -> None:
        usage, output = self.usage, run.output
        duration = max(0, now - max(run.start_ns, self._last_end_ns))
        self._last_end_ns = now
        tokens = output.num_decodes * run.num_steps
        grown = (tokens - output.num_decodes) // self.config.cache.block_size  # on average, within a run
        usage.add_step(output.features.prefill_tokens, output.num_decodes, run.num_steps, duration)
        usage.add_blocks(run.used_blocks + grown // 2, run.used_blocks + grown, duration)
