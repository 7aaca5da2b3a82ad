"""The planner of a live fleet: PlannerCore, fed with what the ClusterCore is given, and its commands carried out.

The cluster's events come as they happen; ticks, questions to the twin and changes of workers run in tasks, so that
serving waits for none of them. A change that fails half way is taken back.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import ClusterEvent
from diptych.control.commands import Command
from diptych.control.config import CacheConfig, EngineConfig, PresetName
from diptych.control.errors import ConflictError, DiptychError
from diptych.control.planner.planner_config import PlannedPool, PlannerConfig
from diptych.control.planner.planner_core import PlannerCore
from diptych.control.planner.planner_events import (
    AddWorker,
    AskTwin,
    ChangeEnded,
    Decided,
    Decision,
    FleetChange,
    PlannerCommand,
    PlannerEvent,
    RemoveWorker,
    SetRole,
    SetShape,
    SetSplit,
    TwinAnswered,
    TwinFailed,
    TwinPool,
    TwinQuestion,
    TwinSettings,
)
from diptych.control.planner.planner_observer import PlannerObserver, PoolMember
from diptych.control.planner.planner_recording import RecordingPlannerCore
from diptych.control.slo import NS_PER_S, Slo
from diptych.serving.failures.failure_board import FailureBoard
from diptych.serving.failures.failure_recording import folder_of
from diptych.serving.failures.planner_guard import PlannerGuard, PlannerParts
from diptych.serving.failures.recorded_cores import recent_of_planner, written_to
from diptych.serving.failures.watched_tasks import WatchedTasks
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.fleet_plan import FleetPlan, worker_options
from diptych.serving.fleet.twin_link import TwinLink
from diptych.serving.fleet.worker_changes import WorkerChanges
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.recorder import Recorder, record_planner

logger = logging.getLogger(__name__)

MOST_SHOWN = 50  # decisions that are kept for people
UNKNOWN_BLOCKS = 1024  # each question says how many there are
UNKNOWN_LENGTH = 1 << 20  # that of the model, which the front end checks; no simulated request is longer


class TwinPort(Protocol):
    """What answers the planner's questions."""

    async def ask(self, question: TwinQuestion) -> TwinAnswered | TwinFailed:
        """The answer, or why there is none."""
        ...

    async def close(self) -> None:
        """There are no more questions."""
        ...


class FleetPlanner:
    """One fleet's. clock: that of the fleet. recorder: what the first planner of ``guard`` writes to; it is closed when
    that fails, or at the end."""

    def __init__(
        self,
        guard: PlannerGuard,
        changes: WorkerChanges,
        twin: TwinPort,
        clock: Callable[[], int],
        recorder: Recorder | None = None,
    ) -> None:
        self._guard = guard
        self._parts: PlannerParts = guard.make()
        self._is_down = False  # the planner has failed, and the next one has not begun
        self._renewing: asyncio.TimerHandle | None = None
        self.decisions: deque[Decision] = deque(maxlen=MOST_SHOWN)
        self.num_decisions: Counter[str] = Counter()  # by verdict
        self.longest_tick_ns = 0
        self._changes = changes
        self._twin = twin
        self._clock = clock
        self._recorder = recorder
        self._tasks = WatchedTasks(self._fail)

    def on_cluster_event(self, event: ClusterEvent, commands: Sequence[Command], now: int) -> None:
        """The ClusterCore was given this, and answered so."""
        if self._is_down:
            return
        try:
            for happened in self._parts.watch.read(event, commands):
                self.planner.on_event(happened, now)
        except Exception as error:
            self._fail(error)

    @property
    def planner(self) -> PlannerCore:
        """The PlannerCore that decides now."""
        return self._parts.planner

    async def run(self) -> None:
        """Observe the fleet once a tick, until cancelled."""
        try:
            while True:
                await asyncio.sleep(self.planner.config.tick_ns / NS_PER_S)
                begun_ns = self._clock()
                self._tick()
                self.longest_tick_ns = max(self.longest_tick_ns, self._clock() - begun_ns)
        finally:
            if self._renewing is not None:
                self._renewing.cancel()
            await self._tasks.close()
            await self._twin.close()
            self._close_recorder()

    def _tick(self) -> None:
        try:
            if not self._is_down:
                self._tell(self._parts.watch.observe(self._changes.pinned, self._changes.divided))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """A defect: this planner decides nothing more, and another begins soon."""
        if self._is_down:
            return
        self._is_down = True
        pause_s = self._guard.on_failure(self._parts, error)
        self._close_recorder()
        self._renewing = asyncio.get_running_loop().call_later(pause_s, self._renew)

    def _renew(self) -> None:
        try:
            self._parts, self._is_down = self._guard.replacement(), False
        except Exception as error:  # until one begins, the planner counts as failed
            pause_s = self._guard.on_failure(self._parts, error)
            self._renewing = asyncio.get_running_loop().call_later(pause_s, self._renew)

    def _close_recorder(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def _tell(self, event: PlannerEvent) -> None:
        fleet_changes: list[FleetChange] = []
        for command in self.planner.on_event(event, self._clock()):
            self._take(command, fleet_changes)
        if fleet_changes:
            self._begin(self._change(fleet_changes, self._parts), "a change of the fleet")

    def _take(self, command: PlannerCommand, fleet_changes: list[FleetChange]) -> None:
        match command:
            case AskTwin():
                self._begin(self._ask(command.question, self._parts), "a question to the twin")
            case Decided():
                self._show(command.decision)
            case _:
                fleet_changes.append(command)

    def _begin(self, work: Coroutine[None, None, None], name: str) -> None:
        self._tasks.start(work, name)

    def _answer(self, event: PlannerEvent, asked_by: PlannerParts) -> None:
        """What a task has found, for the planner that has asked: it may have failed meanwhile."""
        if asked_by is self._parts and not self._is_down:
            self._tell(event)

    def _show(self, decision: Decision) -> None:
        before = self.decisions[-1] if self.decisions else None
        is_news = before is None or (before.verdict, before.chosen) != (decision.verdict, decision.chosen)
        self.decisions.append(decision)
        self.num_decisions[decision.verdict] += 1
        if is_news and decision.verdict in ("advise", "change"):
            logger.warning(
                "plan: %s from %s to %s: %s", decision.verdict, decision.present, decision.chosen, decision.reason
            )

    async def _ask(self, question: TwinQuestion, asked_by: PlannerParts) -> None:
        self._answer(await self._twin.ask(question), asked_by)

    async def _change(self, fleet_changes: Sequence[FleetChange], asked_by: PlannerParts) -> None:
        """All of them in their order; or none, when one is refused."""
        undo: list[Callable[[], None]] = []
        error = ""
        try:
            for change in fleet_changes:
                undo += await self._carry_out(change)
        except DiptychError as refused:
            error = refused.message
            logger.warning("plan: the change is taken back: %s", error)
            for step in reversed(undo):
                try:
                    step()
                except DiptychError as stuck:  # the next observation shows what is so
                    logger.warning("plan: not taken back: %s", stuck.message)
        self._answer(ChangeEnded(error), asked_by)

    async def _carry_out(self, change: FleetChange) -> list[Callable[[], None]]:
        """Returns what takes it back (workers that were added or removed stay so)."""
        changes, watch = self._changes, self._parts.watch
        self._check_pins(change)
        match change:
            case SetRole():
                worker, before = change.worker, watch.role(change.worker)
                changes.change_role(worker, change.role)
                return [lambda: changes.change_role(worker, before)]
            case SetShape():
                worker, shape = change.worker, watch.shape(change.worker)
                changes.change_shape(worker, change.shape)
                return [lambda: changes.change_shape(worker, shape)]
            case AddWorker():
                added = await changes.add()
                changes.change_role(added, change.role)
                if watch.shape(added) != change.shape:
                    changes.change_shape(added, change.shape)
            case RemoveWorker():
                await changes.remove(change.worker)
            case SetSplit():
                if (split := changes.cores.split) is not None:
                    changes.change_split(change.split)
                    return [lambda: changes.change_split(split)]
        return []

    def _check_pins(self, change: FleetChange) -> None:
        """Raises ConflictError for what an operator has set since the last tick."""
        match change:
            case SetRole() | SetShape() | RemoveWorker():
                if change.worker in self._changes.pinned:
                    raise ConflictError(f"worker {change.worker} was pinned meanwhile", param="pin")
            case SetSplit():
                cores = self._changes.divided
                if cores is None or cores.is_pinned:
                    raise ConflictError("how the cores are divided was pinned meanwhile", param="pin")


def plan_with(
    fleet: FleetOptions,
    options: EngineOptions,
    core: ClusterCore,
    plan: FleetPlan,
    changes: WorkerChanges,
    clock: Callable[[], int],
    failures: FailureBoard,
) -> FleetPlanner:
    """The planner of a fleet that starts with these options."""
    members, pools, config = pools_of(options, fleet, plan.copies)
    kv_bytes = max(1, plan.cluster.routing.links.bytes_per_token)
    settings = TwinSettings(
        _engine_of(options, options.slo), plan.cluster, kv_bytes, shares_memory=bool(plan.memories), pools=pools
    )
    recorder: Recorder | None = None
    if options.record is not None:
        path = Path(options.record)
        recorder = record_planner(path.with_name(f"{path.stem}-planner{path.suffix}"), config)
    recorders = [recorder]  # of the first planner

    def make() -> PlannerParts:
        recent = recent_of_planner()
        planner = RecordingPlannerCore(config, written_to(recent, recorders.pop() if recorders else None)[0])
        return PlannerParts(planner, PlannerObserver(core, options.scheduler, members), recent)

    guard = PlannerGuard(make, failures, folder_of(options.failures))
    return FleetPlanner(guard, changes, TwinLink(fleet.twin_command, settings), clock, recorder)


def pools_of(
    options: EngineOptions, fleet: FleetOptions, copies: Sequence[int]
) -> tuple[list[PoolMember], tuple[TwinPool, ...], PlannerConfig]:
    """The pool of each worker, and the pools as the twin and the planner know them (nothing where workers are equal).
    A pool that has scheduler settings of its own keeps its shape."""
    members: list[PoolMember] = []
    twins: dict[str, TwinPool] = {}
    planned: dict[str, PlannedPool] = {}
    for number, (group, own) in enumerate(
        zip(fleet.groups_of_workers, worker_options(options, fleet), strict=False)  # the others are of no pool
    ):
        members.append(PoolMember(group.name, own.scheduler))
        twins.setdefault(group.name, TwinPool(group.name, _engine_of(own, options.slo), copies[number]))
        shape: PresetName = "unified" if own.scheduler.budget.kind == "whole" else "chunked"
        shapes = fleet.plan.shapes if group.scheduler is None else (shape,)
        planned.setdefault(group.name, PlannedPool(group.name, shapes))
    is_added_here = fleet.join is None or fleet.ray is not None  # workers that join by themselves are not
    most = (fleet.max_workers or 0) if is_added_here else 0
    config = replace(fleet.plan, max_workers=most, pools=tuple(planned.values()))
    return members, tuple(twins.values()), config


def _engine_of(options: EngineOptions, slo: Slo) -> EngineConfig:
    """Engine configuration of a worker that starts with these options."""
    return EngineConfig(
        cache=CacheConfig(UNKNOWN_BLOCKS, options.memory.block_size),
        scheduler=options.scheduler,
        slo=slo,
        max_model_len=options.max_model_len or UNKNOWN_LENGTH,
    )
