"""The inputs of ClusterCore, as frozen records. The drivers (serving.fleet, simulation.fleet) make them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from diptych.control.compute_share import ComputeShare
from diptych.control.config import SchedulerConfig
from diptych.control.engine.reports import LoadReport
from diptych.control.events import Event
from diptych.control.request import FinishReason, Submission
from diptych.control.router.topology import Role, WorkerInfo


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request comes in. num_tokens: of its answer, that its client has already, from a front end of before."""

    submission: Submission
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client wants no more tokens of a request; it has ``num_tokens``. reason abort: the client disconnected; the
    request is over, and no End follows. reason stop: the answer is complete (a stop string); an End follows."""

    request_id: str
    num_tokens: int = 0
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A process of this worker is ready, and holds nothing."""

    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """A worker is lost for certain (its process has ended). progress: for each of its requests, how many tokens the
    client has got in all. crashed: it may have died of what it was computing. why: for people."""

    worker: int
    progress: Mapping[str, int] = field(default_factory=dict)
    crashed: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """A worker has another role from now on, also when it is started again. A worker that only prefills from now on
    hands its streams to others, where there are others; nothing else moves. progress: as of WorkerDown."""

    worker: int
    role: Role
    progress: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """A worker gets nothing new and hands its streams to others; Drained follows when nothing is left there.
    progress: as of WorkerDown."""

    worker: int
    progress: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """A worker is used again. What has left it stays where it is."""

    worker: int


@dataclass(frozen=True, slots=True)
class EvacuationReady:
    """The answer to Evacuate: streams of this worker that others can take go on there, as far as the request needs
    their memory. progress: as of WorkerDown."""

    worker: int
    request_id: str
    progress: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulerChanged:
    """A worker schedules by these settings from now on, also when it is started again."""

    worker: int
    scheduler: SchedulerConfig


@dataclass(frozen=True, slots=True)
class PartitionChanged:
    """These workers compute on other shares of the machine from now on, also when they are started again. shares:
    (worker, share), pairs because the keys of a recording are text."""

    shares: tuple[tuple[int, ComputeShare], ...]


@dataclass(slots=True)
class Reported:
    """What happened on a worker, in order, and its load after that. Never changed (see StepFinished)."""

    worker: int
    events: Sequence[Event] = ()
    load: LoadReport | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: see ClusterCore.next_time."""


ClusterEvent = (
    Arrived
    | Cancelled
    | WorkerUp
    | WorkerDown
    | RoleChanged
    | DrainStarted
    | DrainEnded
    | SchedulerChanged
    | PartitionChanged
    | EvacuationReady
    | Reported
    | Tick
)

CLUSTER_EVENT_CLASSES: dict[str, type[ClusterEvent]] = {cls.__name__: cls for cls in get_args(ClusterEvent)}
