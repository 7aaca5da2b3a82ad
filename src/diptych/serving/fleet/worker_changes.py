"""What an operator changes while the fleet serves: roles, shapes, and which workers there are.

Owns the settings that each worker has by now, and the waits for drained workers. What becomes of the requests is
decided by ClusterCore; here its events are told, and processes are started and stopped.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from diptych.control.cluster.cluster_events import (
    ClusterEvent,
    DrainEnded,
    DrainStarted,
    PartitionChanged,
    RoleChanged,
    SchedulerChanged,
)
from diptych.control.cluster.core_split import CoreSplit
from diptych.control.cluster.membership import Membership
from diptych.control.compute_share import ComputeShare
from diptych.control.config import PresetName, SchedulerConfig, prefill_scheduler, reshaped
from diptych.control.errors import ConflictError, InvalidRequestError, NotFoundError
from diptych.control.planner.planner_events import Cores
from diptych.control.router.topology import Role
from diptych.control.slo import Slo
from diptych.serving.fleet.host_cores import HostCores

logger = logging.getLogger(__name__)

DRAIN_LIMIT_S = 120.0


class ChangingFleet(Protocol):
    """What WorkerChanges needs of the fleet."""

    @property
    def members(self) -> Membership:
        """The workers as the core knows them."""
        ...

    @property
    def joined(self) -> Collection[int]:
        """The numbers of workers that came by themselves: no process is started for these."""
        ...

    def progress(self) -> Mapping[str, int]:
        """How many tokens the client of each open request has."""
        ...

    def tell(self, *happened: ClusterEvent) -> None:
        """Tell the core."""
        ...

    def show(self, worker: int) -> None:
        """The role or the state of a worker has changed: the timeline learns it."""
        ...

    async def start_worker(self, worker: int) -> None:
        """Start a worker's process, and wait until it is ready."""
        ...

    async def stop_worker(self, worker: int) -> None:
        """Stop a worker's process for good."""
        ...


@dataclass(slots=True)
class _Draining:
    """done: nothing is left there. is_leaving: its process will be stopped then. is_held: a new process of it does not
    end the drain."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    is_leaving: bool = False
    is_held: bool = False


class WorkerChanges:
    """The changes of one fleet. started: the settings that each worker that there may be begins with (prefill workers:
    those that ``prefill_scheduler`` makes of them). cores: of this machine."""

    def __init__(self, fleet: ChangingFleet, started: Sequence[SchedulerConfig], slo: Slo, cores: HostCores) -> None:
        self.cores = cores
        self._fleet = fleet
        self._started = started
        self._slo = slo
        self._schedulers: dict[int, SchedulerConfig] = {}  # of workers whose settings were changed, before their roles
        self._draining: dict[int, _Draining] = {}
        self._stopped: set[int] = set()
        self._pinned: set[int] = set()
        self._is_split_pinned = False
        self._is_adding = False

    def change_role(self, worker: int, role: Role) -> None:
        """Give a worker another role from now on, and the settings that go with it; its streams go to others when it
        only prefills. Raises ConflictError when no worker would be left for a phase, NotFoundError when there is no
        such worker."""
        members = self._fleet.members
        self._require(worker)
        members.check_change(worker, role)
        if members.infos[worker].role == role:
            return
        logger.warning("worker %d: its role is %s from now on (it was %s)", worker, role, members.infos[worker].role)
        before, after = self.settings(worker, members.infos[worker].role), self.settings(worker, role)
        settings = [SchedulerChanged(worker, after)] if before != after else []
        self._fleet.tell(*settings, RoleChanged(worker, role, self._fleet.progress()))
        self._fleet.show(worker)
        self._divide_cores()

    def change_share(self, worker: int, share: ComputeShare) -> None:
        """Let a worker compute on this share from its next step on, also when it is started again. Raises
        InvalidRequestError for a share of another kind of device, NotFoundError without such a worker."""
        self.check_share(worker, share)
        if share != self._fleet.members.infos[worker].share:
            logger.warning("worker %d: it is to compute on %s", worker, share)
        self._fleet.tell(PartitionChanged(((worker, share),)))

    def change_split(self, split: CoreSplit) -> None:
        """Divide the cores by another rule, now and whenever a role changes or a worker comes or goes. Raises
        ConflictError when there are fewer cores than there may be workers, or some do not compute on cores."""
        num_cores, members = len(self.cores.cores), self._fleet.members
        if num_cores < len(self._started):
            message = f"there are {num_cores} cores for {len(self._started)} workers; each needs one"
            raise ConflictError(message, param="split")
        if any(not members.infos[worker].share.num_threads for worker in members.infos):
            raise ConflictError("not all workers compute on a processor", param="split")
        logger.warning("cores are divided by %s from now on", split)
        self.cores.split = split
        self._divide_cores()

    def pin_split(self, is_pinned: bool) -> None:
        """Whether the planner must leave the rule that divides the cores as it is."""
        self._is_split_pinned = is_pinned

    @property
    def divided(self) -> Cores | None:
        """How the cores are divided (None: each worker keeps its own)."""
        split = self.cores.split
        return None if split is None else Cores(len(self.cores.cores), split, self._is_split_pinned)

    def check_share(self, worker: int, share: ComputeShare) -> None:
        """Raise what ``change_share`` would raise."""
        self._require(worker)
        if worker in self._fleet.joined:
            raise InvalidRequestError(f"cores: worker {worker} is on another host, which has its own", param="cores")
        known = self._fleet.members.infos[worker].share
        if share.num_threads and not known.num_threads:
            raise InvalidRequestError(f"cores: worker {worker} does not compute on a processor", param="cores")
        if share.num_sms and not known.num_sms:
            message = f"multiprocessors: worker {worker} has no GPU that CUDA green contexts can divide"
            raise InvalidRequestError(message, param="multiprocessors")

    def change_scheduler(self, worker: int, scheduler: SchedulerConfig) -> None:
        """Let a worker schedule by these settings from its next step on, also when it is started again. Raises
        ConfigError for more sequences at once than the workers were started for, NotFoundError without such a worker.
        """
        self._require(worker)
        self._started[worker].check_change_to(scheduler)
        self._schedulers[worker] = scheduler
        self._fleet.tell(SchedulerChanged(worker, self.settings(worker, self._fleet.members.infos[worker].role)))

    def change_shape(self, worker: int, shape: PresetName) -> None:
        """The same with the preset of a shape. Raises NotFoundError when there is no such worker."""
        self._require(worker)
        self.change_scheduler(worker, reshaped(self._base(worker), shape))

    def shape(self, worker: int) -> PresetName:
        """The preset by which a worker schedules when it does both phases."""
        return "unified" if self._base(worker).budget.kind == "whole" else "chunked"

    def name(self, worker: int) -> str:
        """A worker's name for people."""
        return f"worker {worker}"

    def drain(self, worker: int, *, is_held: bool = False) -> None:
        """Give this worker nothing new, and its streams to others. is_held: until ``use_again``, whatever becomes of
        its process. Raises ConflictError when no worker would be left for a phase, NotFoundError when there is no such
        worker."""
        self._require(worker)
        if (draining := self._draining.get(worker)) is not None:
            draining.is_held = draining.is_held or is_held
            return
        self._fleet.members.check_change(worker, None)
        logger.warning("%s: draining", self.name(worker))
        self._draining[worker] = _Draining(is_held=is_held)
        self._fleet.tell(DrainStarted(worker, self._fleet.progress()))
        self._fleet.show(worker)

    def use_again(self, worker: int) -> None:
        """Give a draining worker requests again. Raises NotFoundError when there is no such worker, ConflictError
        when it is about to be stopped."""
        self._require(worker)
        draining = self._draining.get(worker)
        if draining is None:
            return
        if draining.is_leaving:
            raise ConflictError(f"worker {worker} is being removed", param="drain")
        logger.warning("%s: used again", self.name(worker))
        del self._draining[worker]
        self._fleet.tell(DrainEnded(worker))
        self._fleet.show(worker)

    async def remove(self, worker: int, limit_s: float = DRAIN_LIMIT_S) -> None:
        """Drain the worker and stop it. Raises as ``drain`` does, and ConflictError when requests are left there after
        ``limit_s``: it is used again then."""
        self.drain(worker)
        draining = self._draining[worker]
        if draining.is_leaving:
            raise ConflictError(f"worker {worker} is being removed already", param="worker")
        draining.is_leaving = True
        try:
            await asyncio.wait_for(draining.done.wait(), limit_s)
        except BaseException as error:
            draining.is_leaving = False
            self.use_again(worker)
            if isinstance(error, TimeoutError):
                message = f"worker {worker} has requests left after {limit_s:g} s; it is used again"
                raise ConflictError(message, param="worker") from None
            raise
        self._stopped.add(worker)
        await self._fleet.stop_worker(worker)
        self._divide_cores()
        logger.warning("worker %d: removed", worker)

    async def add(self) -> int:
        """Start one more worker, which does both; returns its number when it is ready. Raises ConflictError when there
        are as many as there may be, or another is being started; and the error of a worker that cannot start."""
        used = (set(self._fleet.members.infos) - self._stopped).union(self._fleet.joined)
        free = [number for number in range(len(self._started)) if number not in used]
        if not free:
            message = f"there are {len(self._started)} workers, and may be no more (--max-workers)"
            raise ConflictError(message, param="workers")
        if self._is_adding:
            raise ConflictError("another worker is being started", param="workers")
        worker = free[0]
        self._is_adding = True
        try:
            await self._fleet.start_worker(worker)
        finally:
            self._is_adding = False
        self._stopped.discard(worker)
        if self._draining.pop(worker, None) is not None:
            self._fleet.tell(DrainEnded(worker))
        self._fleet.show(worker)
        self._divide_cores()
        logger.warning("worker %d: added", worker)
        return worker

    def on_joined(self, worker: int) -> None:
        """A worker came by itself, under a number that may have been another's."""
        self._stopped.discard(worker)
        if self._draining.pop(worker, None) is not None:
            self._fleet.tell(DrainEnded(worker))

    def pin(self, worker: int, is_pinned: bool) -> None:
        """Whether the planner must leave this worker as it is. Raises NotFoundError when there is no such worker."""
        self._require(worker)
        (self._pinned.add if is_pinned else self._pinned.discard)(worker)

    @property
    def pinned(self) -> frozenset[int]:
        """Workers that the planner leaves as they are."""
        return frozenset(self._pinned)

    def on_drained(self, worker: int) -> None:
        """Nothing is left on this worker."""
        if (draining := self._draining.get(worker)) is not None and not draining.done.is_set():
            logger.warning("%s: drained, nothing is left there", self.name(worker))
            draining.done.set()

    def is_draining(self, worker: int) -> bool:
        """Whether it gets nothing new."""
        return worker in self._draining

    def is_drained(self, worker: int) -> bool:
        """Whether it gets nothing new, and nothing is left there."""
        return (draining := self._draining.get(worker)) is not None and draining.done.is_set()

    def is_held(self, worker: int) -> bool:
        """Whether it gets nothing new until an operator says so, also when its process is another one."""
        return (draining := self._draining.get(worker)) is not None and draining.is_held

    def _divide_cores(self) -> None:
        """Roles or workers are others: divide the cores again, by the rule."""
        infos = {number: info for number, info in self._fleet.members.infos.items() if number not in self._stopped}
        held = {number: info.share for number, info in infos.items() if info.share.num_threads}
        if len(held) == len(infos):
            shares = self.cores.divide({number: info.role for number, info in infos.items()}, held)
            if shares:
                self._fleet.tell(PartitionChanged(tuple(sorted(shares.items()))))

    def settings(self, worker: int, role: Role) -> SchedulerConfig:
        """What this worker schedules by in this role."""
        base = self._base(worker)
        return prefill_scheduler(base, self._slo) if role == "prefill" else base

    def _base(self, worker: int) -> SchedulerConfig:
        """The worker's settings before those of its role."""
        return self._schedulers.get(worker, self._started[worker])

    def _require(self, worker: int) -> None:
        known = sorted(set(self._fleet.members.infos) - self._stopped)
        if worker not in known:
            raise NotFoundError(f"worker is {worker}; there are {', '.join(map(str, known))}", param="worker")
