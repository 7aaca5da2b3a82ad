"""What ClusterCore wants done, as frozen records. Drivers (serving.fleet, simulation.fleet) carry them out.

Every try to serve a request is an *attempt*: the first one has the id of the request, later ones ``<id>~<epoch>``. Both
workers of a handoff know it by the same attempt id; messages about an older attempt are ignored. To an engine an
attempt is a request: ``request_id`` in EngineCore and in its events is the id of the attempt.
"""

from dataclasses import dataclass

from diptych.control.compute_share import ComputeShare
from diptych.control.config import SchedulerConfig
from diptych.control.errors import DiptychError
from diptych.control.events import RequestFinished
from diptych.control.request import BlockTables, FinishReason, PeerRun, WaitClass

NOT_RESERVED = -1  # of Prefill.num_cached_tokens


def attempt_id_of(request_id: str, epoch: int) -> str:
    """The name of attempt number ``epoch`` (0: the first) of a request."""
    return f"{request_id}~{epoch}" if epoch else request_id


@dataclass(frozen=True, slots=True)
class Serve:
    """Prefill and decode the request on this worker. num_output_tokens: leading tokens of the answer that earlier
    attempts have given to the client; they belong to the prompt now, and count against max_tokens. peer_run: where
    another worker may have a part of the prompt (also in Reserve and Prefill)."""

    worker: int
    request_id: str
    attempt_id: str
    num_output_tokens: int
    peer_run: PeerRun | None = None


@dataclass(frozen=True, slots=True)
class Reserve:
    """Hold blocks on the decode worker. lease_ns: how long without a renewal (0: without limit). borrowed: the prefill
    worker will write into these blocks."""

    worker: int
    request_id: str
    attempt_id: str
    num_output_tokens: int
    lease_ns: int
    borrowed: bool
    peer_run: PeerRun | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill for another worker, then send KV and commit to ``target``.

    num_cached_tokens: leading tokens that the target has already (NOT_RESERVED: it has no blocks yet; nothing is sent
    and no token given before Send). block_tables: the target's when its blocks are borrowed (the prefill computes
    straight into them), else (). lease_ns: as for Reserve, of the finished blocks.
    """

    worker: int
    request_id: str
    attempt_id: str
    num_output_tokens: int
    target: int
    num_cached_tokens: int
    block_tables: BlockTables
    lease_ns: int
    peer_run: PeerRun | None = None

    @property
    def borrowed(self) -> bool:
        """Whether the prefill computes into the target's blocks."""
        return bool(self.block_tables)

    @property
    def is_early_prefill(self) -> bool:
        """Whether the prefill begins before the target has blocks."""
        return self.num_cached_tokens == NOT_RESERVED


@dataclass(frozen=True, slots=True)
class Send:
    """The target has blocks for an attempt whose Prefill was ahead of them, and the KV of ``num_cached_tokens`` leading
    tokens: send the rest, and give the first token."""

    worker: int
    attempt_id: str
    num_cached_tokens: int


def wait_class_of(command: Serve | Reserve | Prefill) -> WaitClass:
    """The wait class of an attempt when it comes to its worker."""
    if command.num_output_tokens:
        return WaitClass.STREAM
    return WaitClass.NEW if command.attempt_id == command.request_id else WaitClass.RETURNING


@dataclass(frozen=True, slots=True)
class Release:
    """The prefill worker may forget the attempt. Answered by HandoffReleased."""

    worker: int
    attempt_id: str


@dataclass(frozen=True, slots=True)
class Drop:
    """End the attempt on this worker wherever it is, and refuse it should it come later. Answered by RequestFinished
    (with this reason) or HandoffReleased."""

    worker: int
    attempt_id: str
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class Renew:
    """These attempts are still wanted."""

    worker: int
    attempt_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskKVSnapshot:
    """KV events of this worker were missed: it should report everything that its prefix cache holds."""

    worker: int


@dataclass(frozen=True, slots=True)
class ForgetPeer:
    """The process of worker ``peer`` has ended: write nothing into its memory from now on. Answered by
    PeerForgotten."""

    worker: int
    peer: int


@dataclass(frozen=True, slots=True)
class Configure:
    """Schedule by these settings from the next step on (see EngineCore.configure)."""

    worker: int
    scheduler: SchedulerConfig


@dataclass(frozen=True, slots=True)
class Resize:
    """Compute on this share of the machine from the next step on. Answered by Resized."""

    worker: int
    share: ComputeShare


@dataclass(frozen=True, slots=True)
class Restarted:
    """The request begins another attempt, now or when a worker can take it, after ``num_output_tokens`` of its answer:
    from now on its tokens come under ``attempt_id``, and none of an older attempt counts."""

    request_id: str
    attempt_id: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """The one end of a request: ``finished`` as its client sees it, over all attempts, or an error of the front end."""

    request_id: str
    finished: RequestFinished | None = None
    error: DiptychError | None = None


@dataclass(frozen=True, slots=True)
class Drained:
    """This worker holds nothing of any request any more, and gets nothing: it may be stopped."""

    worker: int


@dataclass(frozen=True, slots=True)
class Evacuate:
    """This request fits into few workers, and this one has too little free memory for it: answered by EvacuationReady,
    which says how far the requests there are."""

    worker: int
    request_id: str


WorkerCommand = (
    Serve | Reserve | Prefill | Send | Release | Drop | Renew | AskKVSnapshot | ForgetPeer | Configure | Resize
)
Command = WorkerCommand | Restarted | End | Drained | Evacuate
