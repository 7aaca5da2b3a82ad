"""What ClusterCore wants done, as frozen records. Drivers (serving.fleet, simulation.cluster) carry them out.

Every attempt to serve a request is a *attempt*: its id is the request's own for the first one and ``<id>~<epoch>``
later. Both workers of a handoff know it by the same attempt id; whatever names an older attempt is unknown to them and
ignored.
"""

from dataclasses import dataclass

from diptych.control.errors import DiptychError
from diptych.control.events import RequestFinished


def attempt_id_of(request_id: str, epoch: int) -> str:
    """The name of attempt number ``epoch`` (0: the first) of a request."""
    return f"{request_id}~{epoch}" if epoch else request_id


@dataclass(frozen=True, slots=True)
class Serve:
    """Prefill and decode the request on this worker: EngineCore.add_request of prompt and tokens so far."""

    worker: int
    request_id: str
    attempt_id: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Hold blocks on the decode worker: EngineCore.reserve. lease_ns: how long without a sign of life (0: for ever).

    borrowed: the prefill worker will write into these very blocks.
    """

    worker: int
    request_id: str
    attempt_id: str
    lease_ns: int
    borrowed: bool


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill for another worker: EngineCore.add_request with hands_off, then KV and commit to ``target``.

    num_cached_tokens: leading tokens that the target has already. block_ids: the target's blocks when they are
    borrowed (the prefill computes straight into them), else (). lease_ns: as for Reserve, of the finished blocks.
    """

    worker: int
    request_id: str
    attempt_id: str
    target: int
    num_cached_tokens: int
    block_ids: tuple[int, ...]
    lease_ns: int

    @property
    def borrowed(self) -> bool:
        """Whether the prefill computes into the target's blocks."""
        return bool(self.block_ids)


@dataclass(frozen=True, slots=True)
class Release:
    """The prefill worker may forget the attempt: EngineCore.release. Answered by HandoffReleased."""

    worker: int
    attempt_id: str


@dataclass(frozen=True, slots=True)
class Drop:
    """End the attempt on this worker wherever it is, and refuse it should it come later: EngineCore.drop. Answered by
    RequestFinished or HandoffReleased."""

    worker: int
    attempt_id: str


@dataclass(frozen=True, slots=True)
class Renew:
    """These attempts are still wanted: EngineCore.renew."""

    worker: int
    attempt_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Block events of this worker were missed: it should say everything that it holds."""

    worker: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """The request begins another attempt: from now on its tokens come under ``attempt_id``."""

    request_id: str
    attempt_id: str


@dataclass(frozen=True, slots=True)
class End:
    """The one end of a request: as a worker reported it (``finished``), or with an error of the front end's own."""

    request_id: str
    finished: RequestFinished | None = None
    error: DiptychError | None = None


Command = Serve | Reserve | Prefill | Release | Drop | Renew | AskSnapshot | Restarted | End
