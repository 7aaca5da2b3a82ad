"""What ClusterCore is told, as frozen records. The drivers (serving.fleet, simulation.cluster) make them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diptych.control.engine.load_report import LoadReport
from diptych.control.events import Event
from diptych.control.slo import Slo


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as the cluster knows it: counts and hashes, never tokens.

    hashes: of the full blocks of the prompt. tenant: whose it is, for fairness ("": nobody's). service_class:
    interactive, standard or batch. deadline_ns: when its first token is of no use any more. hands_off: whether two
    workers may share it (False: one must serve it whole).
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    hashes: tuple[bytes, ...] = ()
    priority: int = 0
    slo: Slo | None = None
    tenant: str = ""
    service_class: str = "standard"
    deadline_ns: int | None = None
    hands_off: bool = True


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request comes in."""

    submission: Submission


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client went away, or has all that it wants: the request is over, and no End follows. num_tokens: how many it
    has got."""

    request_id: str
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker is ready, and holds nothing."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """A worker is gone for certain (its process has ended). progress: for each of its requests, how many tokens the
    client has got in all. crashed: it may have died of what it was computing."""

    worker: int
    progress: Mapping[str, int] = field(default_factory=dict)
    crashed: bool = False


@dataclass(frozen=True, slots=True)
class Reported:
    """What happened on a worker, in order; names in it are attempt ids."""

    worker: int
    events: Sequence[Event] = ()
    load: LoadReport | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """Changes of a worker's prefix cache, numbered from 1."""

    worker: int
    sequence: int
    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a worker's prefix cache holds, as of its publication ``sequence``."""

    worker: int
    sequence: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """KV of an attempt cannot be moved, said by the sending or by the receiving worker."""

    worker: int
    attempt_id: str
    is_sender: bool
    message: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: see ClusterCore.next_time."""


ClusterEvent = Arrived | Cancelled | WorkerUp | WorkerDown | Reported | Published | Snapshot | TransferFailed | Tick
