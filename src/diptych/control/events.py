"""Everything that happens, as frozen records: one vocabulary for wire, log, metrics, timeline and replay.

Times are integer nanoseconds of the worker's own monotonic clock. Events are per step, not per token.
"""

from dataclasses import dataclass

from diptych.control.request import FinishReason
from diptych.control.slo import LatencyBreakdown


@dataclass(frozen=True, slots=True)
class RequestQueued:
    """A worker took the request into its waiting queue."""

    time_ns: int
    request_id: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """The request got the blocks of its whole prompt; the step that begins now computes its first chunk."""

    time_ns: int
    request_id: str
    num_cached_tokens: int
    is_first: bool  # False when it comes back after a preemption


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """A decode lost its place. swapped: its KV moved to the host tier (otherwise it will be recomputed)."""

    time_ns: int
    request_id: str
    swapped: bool
    by_priority: bool


@dataclass(frozen=True, slots=True)
class RequestResumed:
    """A swapped request is back in the decode batch."""

    time_ns: int
    request_id: str


@dataclass(frozen=True, slots=True)
class HandoffReserved:
    """A decode worker holds the blocks of a prompt that another worker will compute.

    num_cached_tokens: leading tokens whose KV it has already; only the rest need travel. block_ids: all of its blocks,
    those included.
    """

    time_ns: int
    request_id: str
    num_cached_tokens: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HandoffDelivered:
    """A decode worker has the KV of the whole prompt and the first token, and goes on with it."""

    time_ns: int
    request_id: str


@dataclass(frozen=True, slots=True)
class HandoffReleased:
    """A worker has forgotten an attempt: a decode worker took it over, or it was dropped (known or not)."""

    time_ns: int
    request_id: str


@dataclass(frozen=True, slots=True)
class HandoffExpired:
    """Nobody renewed the lease of an attempt here in time: its blocks are free. is_sender: it was prefilled here."""

    time_ns: int
    request_id: str
    is_sender: bool


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prefill of the request ended and its first token exists."""

    time_ns: int
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The one terminal event of a request."""

    time_ns: int
    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    latency: LatencyBreakdown
    slo_met: bool | None  # None: it had no objective
    message: str = ""  # why, when reason is error


@dataclass(frozen=True, slots=True)
class StepFinished:
    """One step of the executor, with what it computed; the timeline and the step-time model read this.

    num_steps > 1 (only under virtual time): so many decode steps in a row with the same batch and nothing between
    them. step_id, decode_context and predicted_ns are those of the first, end_ns is that of the last.
    """

    step_id: int
    start_ns: int
    end_ns: int
    prefills: tuple[tuple[str, int, int], ...]  # (request_id, start, num_tokens)
    num_decodes: int
    decode_context: int
    predicted_ns: int
    num_steps: int = 1


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that now can be found by hash on this worker (parent hash first in ``hashes`` order)."""

    time_ns: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlocksEvicted:
    """Blocks that can no longer be found by hash on this worker."""

    time_ns: int
    hashes: tuple[bytes, ...]


Event = (
    RequestQueued
    | RequestAdmitted
    | RequestPreempted
    | RequestResumed
    | HandoffReserved
    | HandoffDelivered
    | HandoffReleased
    | HandoffExpired
    | FirstToken
    | RequestFinished
    | StepFinished
    | BlocksStored
    | BlocksEvicted
)
