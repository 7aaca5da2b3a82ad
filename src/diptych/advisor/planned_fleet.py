"""A simulated fleet that a planner watches and changes: the driver of PlannerCore under virtual time."""

from collections.abc import Collection, Sequence
from functools import partial

from diptych.advisor.twin import Twin, settings_for
from diptych.control.cluster.cluster_events import ClusterEvent
from diptych.control.cluster.core_split import CoreSplit
from diptych.control.commands import Command
from diptych.control.errors import ConfigError
from diptych.control.planner.planner_config import PlannerConfig
from diptych.control.planner.planner_core import PlannerCore
from diptych.control.planner.planner_events import (
    AddWorker,
    AskTwin,
    ChangeEnded,
    Cores,
    Decided,
    Decision,
    Observed,
    PlannerCommand,
    PlannerEvent,
    RemoveWorker,
    SetRole,
    SetShape,
    SetSplit,
    TwinAnswered,
    TwinQuestion,
)
from diptych.control.planner.planner_observer import PlannerObserver, PoolMember
from diptych.simulation.environment import MESSAGE
from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
from diptych.simulation.scenario import Scenario, WorkerChange

TWIN_REQUEST_NS = 500_000  # of processor time that the compiled twin takes for each request that it simulates


class PlannedFleet:
    """Runs a scenario with a planner. Workers of ``spares`` are drained until the planner adds them, which takes
    ``start_ns``. outages: (from, until) times in which no observation of the workers comes. pinned: workers that the
    planner must leave as they are. split: how the CPUs of the
    scenario's shares are divided among the workers at first, and the planner may divide them in another way (None: each
    worker keeps its own). Raises ConfigError for a split without shares, and for spares of named pools."""

    def __init__(
        self,
        scenario: Scenario,
        config: PlannerConfig,
        twin: Twin,
        *,
        spares: Sequence[int] = (),
        start_ns: int = 0,
        outages: Sequence[tuple[int, int]] = (),
        pinned: Collection[int] = (),
        split: CoreSplit | None = None,
    ) -> None:
        if split is not None and not scenario.shares:
            raise ConfigError("split: the workers of the scenario have no shares", param="split")
        if spares and scenario.pools is not None and scenario.pools.named:
            raise ConfigError("spares: a worker that is started later is of no pool", param="spares")
        self.cluster = SimulatedCluster(scenario)
        self.planner = PlannerCore(config)
        self.decisions: list[Decision] = []
        self.changes: list[tuple[int, str]] = []  # (when, the new configuration)
        self._scenario = scenario
        self._config = config
        self._twin = twin
        self._spares = list(spares)
        self._start_ns = start_ns
        self._outages = outages
        self._pinned = pinned
        self._cpus = tuple(sorted({(cpu,) for share in scenario.shares for cpu in share.cpus}))
        self._split = split
        self._members = _members(scenario)
        self._watch = PlannerObserver(self.cluster.core, scenario.engine.scheduler, self._members)
        self._is_ticking = False
        self.cluster.watcher = self._on_cluster_event

    def run(self) -> None:
        """Run to the end of the workload."""
        for spare in self._spares:
            self.cluster.environment.at(0, MESSAGE, partial(self._drain, spare, True))
        if self._split is not None:
            self.cluster.environment.at(0, MESSAGE, self._divide_cores)
        self.cluster.run()

    def _on_cluster_event(self, event: ClusterEvent, commands: list[Command], now: int) -> None:
        for happened in self._watch.read(event, commands):
            self.planner.on_event(happened, now)
            if not self._is_ticking:
                self._is_ticking = True
                self.cluster.environment.at(now + self._config.tick_ns, MESSAGE, self._tick)

    def _tick(self) -> None:
        """Ticks end with an empty window, so that the simulation can end, and begin again with the next request."""
        environment = self.cluster.environment
        now = environment.now
        is_lost = any(begin <= now < end for begin, end in self._outages)
        cores = None if self._split is None else Cores(len(self._cpus), self._split)
        self._tell(Observed(()) if is_lost else self._watch.observe(self._pinned, cores))
        self._is_ticking = bool(self.cluster.core.num_open or len(self.planner.demand))
        if self._is_ticking:
            environment.at(now + self._config.tick_ns, MESSAGE, self._tick)

    def _tell(self, event: PlannerEvent) -> None:
        is_changed = False
        for command in self.planner.on_event(event, self.cluster.environment.now):
            is_changed |= self._carry_out(command)
        if is_changed:
            self._tell(ChangeEnded())

    def _carry_out(self, command: PlannerCommand) -> bool:
        """Whether the fleet changes by it."""
        now = self.cluster.environment.now
        match command:
            case AskTwin():
                self._simulate(command.question)
                return False
            case Decided():
                self.decisions.append(command.decision)
                if command.decision.verdict == "change":
                    self.changes.append((now, command.decision.chosen))
                return False
            case SetRole():
                self._set(command.worker, role=True, command=command)
            case SetShape():
                self._set(command.worker, role=False, command=command)
            case SetSplit():
                self._split = command.split
                self._divide_cores()
            case AddWorker():
                worker = self._spares.pop()
                self._set(worker, role=True, command=SetRole(worker, command.role))
                self.cluster.environment.at(now + self._start_ns, MESSAGE, partial(self._drain, worker, False))
            case RemoveWorker():
                self._drain(command.worker, True)
                self._spares.append(command.worker)
        return True

    def _set(self, worker: int, *, role: bool, command: SetRole | SetShape) -> None:
        info = self.cluster.core.members.infos[worker]
        new_role = command.role if isinstance(command, SetRole) else info.role
        shape = command.shape if isinstance(command, SetShape) else self._watch.shape(worker)
        engine = self._scenario.engine
        started = self._members[worker].started if self._members else engine.scheduler
        scheduler = settings_for(started, engine.slo, new_role, shape)
        now = self.cluster.environment.now
        self.cluster.change(WorkerChange(now, worker, role=new_role if role else None, scheduler=scheduler))
        if role:
            self._divide_cores()

    def _drain(self, worker: int, is_draining: bool) -> None:
        self.cluster.change(WorkerChange(self.cluster.environment.now, worker, is_draining=is_draining))
        self._divide_cores()

    def _divide_cores(self) -> None:
        """Roles or workers are others, or the rule is."""
        members = self.cluster.core.members
        if self._split is not None:
            infos = {worker: info for worker, info in members.infos.items() if worker not in members.draining}
            held = {worker: info.share for worker, info in infos.items()}
            roles = {worker: info.role for worker, info in infos.items()}
            self.cluster.divide(self._split.divide(self._cpus, roles, held))

    def _simulate(self, question: TwinQuestion) -> None:
        predictions = self._twin.answer(question)
        cost_ns = TWIN_REQUEST_NS * len(question.arrivals) * len(question.candidates)
        answered = TwinAnswered(question.number, predictions, cost_ns)
        environment = self.cluster.environment
        environment.at(environment.now + cost_ns, MESSAGE, partial(self._tell, answered))


def _members(scenario: Scenario) -> list[PoolMember]:
    """The pool of each worker, where the scenario names pools."""
    if scenario.pools is None or not scenario.pools.named:
        return []
    return [
        PoolMember(place.pool.name, (place.pool.engine or scenario.engine).scheduler)
        for place in scenario.pools.places()
    ]
