"""Everything that happens on a worker, as frozen records: one vocabulary for messages, logs, metrics, timeline, replay.

Times are integer nanoseconds of the worker's own monotonic clock. A step's tokens are one event, not one per token.
``request_id`` is the engine's name of a request; in a fleet that is the id of an attempt (see commands.py).
"""

from dataclasses import dataclass
from typing import get_args

from diptych.control.compute_share import ComputeShare
from diptych.control.engine.kvcache.tier_records import Tier
from diptych.control.errors import ErrorRecord
from diptych.control.request import DEFAULT_OPTIONS, BlockTables, FinishReason, RequestOptions
from diptych.control.slo import LatencyBreakdown
from diptych.control.step import VerifyResult


@dataclass(frozen=True, slots=True)
class RequestQueued:
    """The engine took the request into its waiting queue."""

    time_ns: int
    request_id: str
    num_prompt_tokens: int
    options: RequestOptions = DEFAULT_OPTIONS


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """The request got the blocks of its whole prompt; the step that begins now computes its first chunk, or copies up
    what lies below. num_cached_tokens: tokens that need not be computed; num_tier_tokens: those of them found in a tier
    below the prefix cache."""

    time_ns: int
    request_id: str
    num_cached_tokens: int
    is_first: bool  # False when it comes back after a preemption
    num_tier_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """A request lost its place. swapped: its KV moved to the host tier (otherwise it will be recomputed). is_stream: it
    decoded (otherwise its prompt was being computed)."""

    time_ns: int
    request_id: str
    swapped: bool
    by_priority: bool
    is_stream: bool = True


@dataclass(frozen=True, slots=True)
class RequestRested:
    """A request of class batch left the decode batch for others. It keeps its KV, until these need its blocks."""

    time_ns: int
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestResumed:
    """A request that was swapped out, or rested, is back in the decode batch."""

    time_ns: int
    request_id: str


@dataclass(frozen=True, slots=True)
class HandoffReserved:
    """A decode worker holds the blocks of a prompt that another worker will compute.

    num_cached_tokens: leading tokens whose KV it has already; only the rest need travel. block_tables: all of its
    blocks, those included; of a window, those from the first on that is read behind the cached tokens, as far as they
    lie here (NO_BLOCK: the other worker has one of its own), or those that are read behind the prompt. num_tier_tokens:
    the cached tokens found in the tiers below the prefix cache.
    """

    time_ns: int
    request_id: str
    num_cached_tokens: int
    block_tables: BlockTables = ()
    num_tier_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HandoffRevoked:
    """A decode worker needs the blocks of this reservation for a stream that has lost its own. It gives them up when it
    is told to drop the attempt."""

    time_ns: int
    request_id: str


@dataclass(frozen=True, slots=True)
class HandoffDelivered:
    """A decode worker has the KV of the whole prompt and the first token, and continues the request.

    num_bytes: KV bytes that travelled. transfer_ns: from the first of them to the commit. wire_ns: of that, while some
    were coming in (they follow the prefill, which is what limits them otherwise; 0: not measured).
    """

    time_ns: int
    request_id: str
    num_bytes: int = 0
    transfer_ns: int = 0
    wire_ns: int = 0


@dataclass(frozen=True, slots=True)
class HandoffReleased:
    """A worker holds nothing of an attempt any more: a decode worker has taken it over, or it was dropped (also when
    the worker never got it)."""

    time_ns: int
    request_id: str


@dataclass(frozen=True, slots=True)
class HandoffExpired:
    """The lease of an attempt was not renewed in time: its blocks are free. is_sender: it was prefilled here."""

    time_ns: int
    request_id: str
    is_sender: bool


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """KV of an attempt cannot be moved, as seen by its sender or by its receiver."""

    time_ns: int
    request_id: str
    is_sender: bool
    message: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prefill of the request ended and its first token exists."""

    time_ns: int
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The one terminal event of a request. error: why, when the reason is ``error``."""

    time_ns: int
    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    latency: LatencyBreakdown
    slo_met: bool | None  # None: it had no objective
    error: ErrorRecord | None = None

    @property
    def message(self) -> str:
        """The error in words; empty without one."""
        return self.error.message if self.error else ""


@dataclass(frozen=True, slots=True)
class StepBegun:
    """A step that is expected to take long has begun: what viewers are shown until its StepFinished comes. Fields as
    there."""

    time_ns: int
    step_id: int
    prefills: tuple[tuple[str, int, int], ...]
    num_decodes: int
    predicted_ns: int


@dataclass(slots=True)
class StepFinished:
    """One step of the executor, with what it computed; the timeline and the step-time model read this.

    num_steps > 1 (only under virtual time): that number of decode steps in a row with the same batch and nothing
    between them. step_id, decode_context and predicted_ns are those of the first, end_ns is that of the last. Never
    changed (and not frozen only because one is made in every step). extra: tokens of members of the batch that computed
    more than one token; decode_context counts all of these.
    """

    step_id: int
    start_ns: int
    end_ns: int
    prefills: tuple[tuple[str, int, int], ...]  # (request_id, start, num_tokens); "": another's engine names none
    num_decodes: int
    decode_context: int
    predicted_ns: int
    num_steps: int = 1
    extra: tuple[VerifyResult, ...] = ()

    @property
    def num_extra_tokens(self) -> int:
        """Tokens that members of the decode batch got beside one each."""
        return sum([extra.num_accepted for extra in self.extra])


@dataclass(frozen=True, slots=True)
class KVEvents:
    """Changes of what can be found in one tier of the worker, numbered from 1 in each: hashes that can no longer be
    found, then hashes that can (of the prefix cache, which is the tier "device": parents first; of a model with
    windows, the hashes of the last blocks before boundaries, see Hit, and of no others). evicted_for: where a worker
    names them, the requests that needed the evicted blocks, with how many of them, in their order."""

    time_ns: int
    sequence: int
    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()
    evicted_for: tuple[tuple[str, int], ...] = ()
    tier: Tier = "device"


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """All hashes that can be found in one tier of the worker, as of its KVEvents number ``sequence``."""

    time_ns: int
    sequence: int
    hashes: tuple[bytes, ...]
    tier: Tier = "device"


@dataclass(frozen=True, slots=True)
class PeerForgotten:
    """Nothing on this worker writes into the memory of that peer, which is gone."""

    time_ns: int
    peer: int


@dataclass(frozen=True, slots=True)
class Resized:
    """The worker computes on ``share`` from its next step on. message: why it is not the one that it was ordered to use
    ("": it is)."""

    time_ns: int
    share: ComputeShare
    message: str = ""


Event = (
    RequestQueued
    | RequestAdmitted
    | RequestPreempted
    | RequestResumed
    | RequestRested
    | HandoffReserved
    | HandoffRevoked
    | HandoffDelivered
    | HandoffReleased
    | HandoffExpired
    | TransferFailed
    | FirstToken
    | RequestFinished
    | StepBegun
    | StepFinished
    | KVEvents
    | KVSnapshot
    | PeerForgotten
    | Resized
)

EVENT_CLASSES: dict[str, type[Event]] = {cls.__name__: cls for cls in get_args(Event)}  # by name, for messages and logs
