"""A Fleet whose workers are engines of others: what differs from workers of ours.

It is ready when one engine is that can serve a request whole; others come when they come. Nothing is started, and
nothing of an engine can be set: an operator may drain it, use it again, and change its role where it can hand over.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.core_split import CoreSplit
from diptych.control.compute_share import ComputeShare
from diptych.control.config import SchedulerConfig
from diptych.control.errors import ConflictError
from diptych.control.router.topology import Role, has_both_phases
from diptych.control.slo import Slo
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.fleet_plan import FleetPlan
from diptych.serving.fleet.host_cores import HostCores
from diptych.serving.fleet.joint_ready import joint_ready
from diptych.serving.fleet.worker_changes import DRAIN_LIMIT_S, ChangingFleet, WorkerChanges
from diptych.serving.fleet.worker_handle import WorkerHandle, WorkerState
from diptych.serving.front.engine_load import LearnedPrices
from diptych.serving.front.engine_spec import FrontOptions, in_order
from diptych.serving.front.external_worker import ExternalWorker
from diptych.serving.front.kv_events import require_zmq
from diptych.serving.front.relay_stream import RelayStream
from diptych.serving.link.engine_options import EngineOptions, MemoryOptions
from diptych.serving.link.messages import Ready

logger = logging.getLogger(__name__)

ENGINE_STATES = ("starting", "ready", "draining", "drained", "lost", "stopped")
NOT_OURS = "the engine is not this server's: {} cannot be changed from here"


class ExternalChanges(WorkerChanges):
    """What an operator may change of engines that others run. names: of the engines, by number."""

    def __init__(
        self,
        fleet: ChangingFleet,
        started: Sequence[SchedulerConfig],
        slo: Slo,
        cores: HostCores,
        names: Sequence[str],
    ) -> None:
        super().__init__(fleet, started, slo, cores)
        self._names = names

    def name(self, worker: int) -> str:
        return f"worker {worker} ({self._names[worker]})"

    def on_restarted(self, worker: int) -> None:
        """Another process of this engine serves: if it was drained for that, the drain is over."""
        if self.is_draining(worker) and not self.is_held(worker):
            logger.warning("%s: it was started again, which ends its drain", self.name(worker))
            self.use_again(worker)

    def change_role(self, worker: int, role: Role) -> None:
        raise ConflictError(NOT_OURS.format("its role"))

    def change_scheduler(self, worker: int, scheduler: SchedulerConfig) -> None:
        raise ConflictError(NOT_OURS.format("its scheduler"))

    def change_split(self, split: CoreSplit) -> None:
        raise ConflictError(NOT_OURS.format("its cores"))

    def check_share(self, worker: int, share: ComputeShare) -> None:
        raise ConflictError(NOT_OURS.format("what it computes on"))

    def pin(self, worker: int, is_pinned: bool) -> None:
        raise ConflictError("there is no planner in front of engines that are not this server's", param="pin")

    async def remove(self, worker: int, limit_s: float = DRAIN_LIMIT_S) -> None:
        raise ConflictError("an engine is drained here, and removed from the list with which this server is started")

    async def add(self) -> int:
        raise ConflictError("an engine is added to the list with which this server is started")


class ExternalLauncher:
    """A Launcher of ports to engines that run already."""

    def __init__(self, front: FrontOptions, clock: Callable[[], int]) -> None:
        self.fleet: ExternalFleet | None = None
        self._front = front
        self._clock = clock
        self._prices = LearnedPrices()

    async def open(self, join_port: int) -> None:
        """Do nothing: the engines run already."""

    async def close(self) -> None:
        """Do nothing: the engines go on."""

    def launch(self, number: int, options: EngineOptions, pass_fds: Sequence[int]) -> WorkerHandle:
        assert self.fleet is not None
        fleet = self.fleet

        def num_up() -> int:
            return fleet.core.members.num_usable

        spec = self._front.engines[number]
        return ExternalWorker(
            number,
            spec,
            self._front,
            fleet.relay_of,
            fleet.metrics.on_gaps,
            num_up,
            self._clock,
            self._prices,
            fleet.leave_recording,
            lambda: fleet.changes.is_draining(number),
        )


class ExternalFleet(Fleet):
    """A Fleet of external engines. slo: objectives of requests that name none. record: a file for the decisions.
    failures: see EngineOptions."""

    def __init__(
        self,
        front: FrontOptions,
        cluster: ClusterConfig | None = None,
        slo: Slo | None = None,
        record: Path | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        failures: str = "",
    ) -> None:
        self.front = replace(front, engines=in_order(front.engines))
        for param in ("kv_events", "step_events"):
            if any(getattr(engine, param) for engine in front.engines):
                require_zmq(param)
        roles = [engine.role for engine in self.front.engines]
        cluster = cluster or ClusterConfig()
        if front.hands_off and any(
            engine.kind == "sglang" for engine in front.engines
        ):  # no engine serves a request whole
            cluster = replace(cluster, routing=replace(cluster.routing, disaggregate="always"))
        options = EngineOptions(
            memory=MemoryOptions(block_size=front.block_size),
            slo=slo or Slo(),
            record=None if record is None else str(record),
            failures=failures,
        )
        workers = FleetOptions(
            prefill=roles.count("prefill"),
            decode=roles.count("decode"),
            both=roles.count("both"),
            cluster=replace(cluster, slo=slo or Slo()),
        )
        launcher = ExternalLauncher(self.front, clock)
        super().__init__(options, workers, launcher, clock=clock)
        self.clock = clock
        launcher.fleet = self
        self._first_ready = asyncio.Event()

    @property
    def engines(self) -> list[ExternalWorker]:
        """The workers as what they are."""
        return [worker for worker in self.workers if isinstance(worker, ExternalWorker)]

    def relay_of(self, request_id: str) -> RelayStream | None:
        """The open stream of a request."""
        stream = self.streams.get(request_id)
        return stream if isinstance(stream, RelayStream) else None

    def progress(self) -> Mapping[str, int]:
        """Progress of each open answer, asked when streams are to leave an engine. A stream that turned out to be no
        plain text (its tokens are not known) cannot move: it counts as complete, so that it ends where it is."""
        found = dict(super().progress())
        for request_id in found:
            stream = self.relay_of(request_id)
            if stream is not None and not stream.can_resume:
                found[request_id] = stream.request.max_tokens
        return found

    @property
    def external_changes(self) -> ExternalChanges:
        """What an operator may change of the engines."""
        assert isinstance(self.changes, ExternalChanges)
        return self.changes

    def make_changes(self, started: Sequence[SchedulerConfig], cores: HostCores) -> WorkerChanges:
        names = [engine.name for engine in self.front.engines]
        return ExternalChanges(self, started, self.options.slo, cores, names)

    def make_plan(self) -> FleetPlan:
        count = len(self.front.engines)
        return FleetPlan((self.options,) * count, self.fleet.cluster, (0,) * count)

    def recording_path(self, num_workers: int) -> Path | None:
        return None if self.options.record is None else Path(self.options.record)

    async def first_starts(self) -> None:
        assert self.ready is not None
        await self._first_ready.wait()
        if not self.ready.done():
            assert self.joint_ready is not None
            self.ready.set_result(self.joint_ready)

    def on_ready(self, worker: int, ready: Ready) -> None:
        super().on_ready(worker, ready)
        known = {number: self.known[number] for number in sorted(self.known) if number in self.core.members.infos}
        roles = {number: self.role(number) for number in known}
        if has_both_phases(roles.values()):
            kinds = "; ".join(dict.fromkeys(ready.description for ready in known.values()))
            summary = f"{len(known)} of {len(self.front.engines)} engines: {kinds}"
            self.joint_ready = msgspec.structs.replace(joint_ready(roles, known), summary=summary)
            self._first_ready.set()
        if self.engines[worker].has_restarted:
            self.external_changes.on_restarted(worker)

    def state_of(self, worker: int) -> str:
        """Where an engine is in its life, one of ENGINE_STATES. draining: it gets nothing new; drained: nothing is left
        there, either."""
        state = self.workers[worker].state
        if state is not WorkerState.READY or not self.changes.is_draining(worker):
            return state.value
        return "drained" if self.changes.is_drained(worker) else "draining"
