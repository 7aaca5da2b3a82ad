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
from diptych.control.config import CacheConfig, EngineConfig, ShapeName
from diptych.control.errors import ConflictError, DiptychError
from diptych.control.planner.cluster_watch import ClusterWatch, PoolMember
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
from diptych.control.planner.planner_recording import RecordingPlannerCore
from diptych.control.slo import NS_PER_S, Slo
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
    """One fleet's. clock: that of the fleet. recorder: what ``planner`` writes to; it is closed at the end."""

    def __init__(
        self,
        planner: PlannerCore,
        watch: ClusterWatch,
        changes: WorkerChanges,
        twin: TwinPort,
        clock: Callable[[], int],
        recorder: Recorder | None = None,
    ) -> None:
        self.planner = planner
        self.decisions: deque[Decision] = deque(maxlen=MOST_SHOWN)
        self.num_decisions: Counter[str] = Counter()  # by verdict
        self.longest_tick_ns = 0
        self._watch = watch
        self._changes = changes
        self._twin = twin
        self._clock = clock
        self._recorder = recorder
        self._tasks: set[asyncio.Task[None]] = set()

    def on_cluster_event(self, event: ClusterEvent, commands: Sequence[Command], now: int) -> None:
        """The ClusterCore was given this, and answered so."""
        for happened in self._watch.read(event, commands):
            self.planner.on_event(happened, now)

    async def run(self) -> None:
        """Observe the fleet once a tick, until cancelled."""
        try:
            while True:
                await asyncio.sleep(self.planner.config.tick_ns / NS_PER_S)
                begun_ns = self._clock()
                self._tell(self._watch.observe(self._changes.pinned, self._changes.divided))
                self.longest_tick_ns = max(self.longest_tick_ns, self._clock() - begun_ns)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._twin.close()
            if self._recorder is not None:
                self._recorder.close()

    def _tell(self, event: PlannerEvent) -> None:
        fleet_changes: list[FleetChange] = []
        for command in self.planner.on_event(event, self._clock()):
            self._take(command, fleet_changes)
        if fleet_changes:
            self._begin(self._change(fleet_changes))

    def _take(self, command: PlannerCommand, fleet_changes: list[FleetChange]) -> None:
        match command:
            case AskTwin():
                self._begin(self._ask(command.question))
            case Decided():
                self._show(command.decision)
            case _:
                fleet_changes.append(command)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _show(self, decision: Decision) -> None:
        before = self.decisions[-1] if self.decisions else None
        is_news = before is None or (before.verdict, before.chosen) != (decision.verdict, decision.chosen)
        self.decisions.append(decision)
        self.num_decisions[decision.verdict] += 1
        if is_news and decision.verdict in ("advise", "change"):
            logger.warning(
                "plan: %s from %s to %s: %s", decision.verdict, decision.present, decision.chosen, decision.reason
            )

    async def _ask(self, question: TwinQuestion) -> None:
        self._tell(await self._twin.ask(question))

    async def _change(self, fleet_changes: Sequence[FleetChange]) -> None:
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
                except DiptychError as stuck:
                    logger.warning("plan: not taken back: %s", stuck.message)
        self._tell(ChangeEnded(error))

    async def _carry_out(self, change: FleetChange) -> list[Callable[[], None]]:
        """Returns what takes it back (workers that were added or removed stay so)."""
        changes, watch = self._changes, self._watch
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
) -> FleetPlanner:
    """The planner of a fleet that starts with these options."""
    members, pools, config = pools_of(options, fleet, plan.copies)
    kv_bytes = max(1, plan.cluster.routing.links.bytes_per_token)
    settings = TwinSettings(
        _engine_of(options, options.slo), plan.cluster, kv_bytes, shares_memory=bool(plan.memories), pools=pools
    )
    planner = PlannerCore(config)
    recorder: Recorder | None = None
    if options.record is not None:
        path = Path(options.record)
        recorder = record_planner(path.with_name(f"{path.stem}-planner{path.suffix}"), config)
        planner = RecordingPlannerCore(config, recorder.write)
    watch, twin = ClusterWatch(core, options.scheduler, members), TwinLink(fleet.twin_command, settings)
    return FleetPlanner(planner, watch, changes, twin, clock, recorder)


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
        shape: ShapeName = "unified" if own.scheduler.budget.kind == "whole" else "chunked"
        shapes = fleet.plan.shapes if group.scheduler is None else (shape,)
        planned.setdefault(group.name, PlannedPool(group.name, shapes))
    is_added_here = fleet.join is None or fleet.ray is not None  # workers that join by themselves are not
    most = (fleet.max_workers or 0) if is_added_here else 0
    config = replace(fleet.plan, max_workers=most, pools=tuple(planned.values()))
    return members, tuple(twins.values()), config


def _engine_of(options: EngineOptions, slo: Slo) -> EngineConfig:
    """Of a worker that starts with these options."""
    return EngineConfig(
        cache=CacheConfig(UNKNOWN_BLOCKS, options.memory.block_size),
        scheduler=options.scheduler,
        slo=slo,
        max_model_len=options.max_model_len or UNKNOWN_LENGTH,
    )
