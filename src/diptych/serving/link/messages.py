"""The messages between a front end and its worker, as msgspec structs in msgpack (never pickle).

Owns the vocabulary and its encoding. Must never touch sockets or decide anything. A step's tokens travel as one
record; the control code's events travel as [class name, fields], so that both sides speak one vocabulary.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from diptych.control import errors, events
from diptych.control.engine.reports import LoadReport
from diptych.control.request import FinishReason, SamplingParams
from diptych.control.slo import LatencyBreakdown, Slo

# Events that the timeline wants but no token record carries.
_EVENT_CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        events.RequestQueued,
        events.RequestAdmitted,
        events.RequestPreempted,
        events.RequestResumed,
        events.HandoffReserved,
        events.HandoffDelivered,
        events.HandoffReleased,
        events.HandoffExpired,
        events.FirstToken,
        events.RequestFinished,
        events.StepFinished,
    )
}
_ERROR_CLASSES: dict[str, type[errors.DiptychError]] = {
    cls.__name__: cls
    for cls in (
        errors.InvalidRequestError,
        errors.ContextLengthError,
        errors.OverloadedError,
        errors.UnavailableError,
        errors.ConfigError,
        errors.UnsupportedModelError,
        errors.WorkerError,
    )
}


class WireRequest(msgspec.Struct, frozen=True, array_like=True):
    """One attempt of a sequence to generate. ``prompt``, ``output``: token ids as packed little-endian uint32; the
    output is what other workers have sampled already (sampling.max_tokens counts it)."""

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    priority: int = 0
    slo: Slo | None = None
    cache_salt: str | None = None
    output: bytes = b""


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way to the client."""

    kind: str
    message: str
    param: str | None = None


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Take these requests."""

    requests: list[WireRequest]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End these requests before the next step. reason stop: the front end found a stop string."""

    request_ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class ReserveAttempt(msgspec.Struct, frozen=True, array_like=True, tag="reserve"):
    """Hold blocks for this attempt, which another worker prefills (control.commands.Reserve)."""

    request: WireRequest
    lease_ns: int
    borrowed: bool


class PrefillAttempt(msgspec.Struct, frozen=True, array_like=True, tag="prefill"):
    """Prefill this attempt and hand it to the connector at ``address`` (control.commands.Prefill)."""

    request: WireRequest
    address: str
    num_cached_tokens: int
    block_ids: list[int]  # of the target, when they are borrowed
    lease_ns: int
    target: int = -1  # its number (see ForgetPeer)


class ReleaseAttempts(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Forget these attempts: another worker has them."""

    attempt_ids: list[str]


class DropAttempts(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """End these attempts wherever they are, and refuse them should they come later."""

    attempt_ids: list[str]


class RenewAttempts(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """These attempts are still wanted."""

    attempt_ids: list[str]


class AskBlocks(msgspec.Struct, frozen=True, array_like=True, tag="ask_blocks"):
    """Say everything that the prefix cache holds (a Blocks record with ``is_snapshot``)."""


class ForgetPeer(msgspec.Struct, frozen=True, array_like=True, tag="forget_peer"):
    """The worker with this number is gone; answer with PeerForgotten once nothing here touches its memory (attempts
    that are prefilled into its blocks are dropped first, and answered as such)."""

    worker: int


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Leave the loop and exit."""


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """How far the start-up is; fraction in [0, 1] of this stage, or None when it cannot be known."""

    stage: str
    fraction: float | None = None


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The worker serves; what it holds."""

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int
    max_waiting: int
    max_num_seqs: int
    eos_token_ids: list[int]
    description: str  # one line for people: dtype, device, threads, cache
    address: str = ""  # of its KV connector
    num_blocks: int = 0
    block_size: int = 0


class Happened(msgspec.Struct, frozen=True, array_like=True, tag="happened"):
    """Events that the cluster's decisions need at once: RequestAdmitted, HandoffReserved, HandoffReleased,
    HandoffExpired, and FirstToken of an attempt that is handed off. (RequestFinished comes in a Tokens record,
    HandoffDelivered as Delivered.) The next Stats record has all of them once more, for the timeline."""

    events: list[tuple[str, Any]]


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag="delivered"):
    """The worker has taken over a handoff. first_token: what the prefill worker sampled (it has said so itself,
    unless it died)."""

    attempt_id: str
    time_ns: int
    first_token: int
    logprobs: "TokenLogprobs | None" = None
    num_bytes: int = 0  # that travelled
    transfer_ns: int = 0  # from the first byte to the commit


class TransferLost(msgspec.Struct, frozen=True, array_like=True, tag="transfer_lost"):
    """KV of this attempt cannot be moved."""

    attempt_id: str
    is_sender: bool
    message: str


class Blocks(msgspec.Struct, frozen=True, array_like=True, tag="blocks"):
    """What the prefix cache gained and lost since the last publication, or (is_snapshot) all that it holds."""

    sequence: int
    stored: list[bytes]
    evicted: list[bytes]
    is_snapshot: bool = False


class PeerForgotten(msgspec.Struct, frozen=True, array_like=True, tag="peer_forgotten"):
    """Nothing here touches that worker's memory any more."""

    worker: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The worker cannot start; it exits after this."""

    error: WireError


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token and of its best alternatives, best first, as (token id, log-probability)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The one end of a request, from the RequestFinished event. num_prompt_tokens counts what other workers had
    sampled (WireRequest.output), and the latency begins with this attempt."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    latency: LatencyBreakdown
    slo_met: bool | None
    error: WireError | None = None


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """What one step gave: parallel lists of ids and tokens, then who ended with it."""

    request_ids: list[str]
    token_ids: list[int]
    finished: list[Finished] = []
    cached: dict[str, int] = {}  # cached prompt tokens of requests that were admitted since the last record
    logprobs: dict[str, TokenLogprobs] = {}
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = {}  # position of the first, then one per position


class Stats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """A snapshot of the worker (EngineStats as a map) and the events since the last one."""

    worker: dict[str, Any]
    events: list[tuple[str, Any]] = []
    load: LoadReport | None = None


FrontendMessage = (
    Submit
    | Abort
    | ReserveAttempt
    | PrefillAttempt
    | ReleaseAttempts
    | DropAttempts
    | RenewAttempts
    | AskBlocks
    | ForgetPeer
    | Shutdown
)
WorkerMessage = Loading | Ready | Failed | Tokens | Stats | Happened | Delivered | TransferLost | Blocks | PeerForgotten

_encoder = msgspec.msgpack.Encoder()
_from_frontend: msgspec.msgpack.Decoder[FrontendMessage] = msgspec.msgpack.Decoder(FrontendMessage)
_from_worker: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


def encode(message: FrontendMessage | WorkerMessage) -> bytes:
    """A message as msgpack."""
    return _encoder.encode(message)


def decode_from_frontend(data: bytes) -> FrontendMessage:
    """What a worker received. Raises msgspec.DecodeError."""
    return _from_frontend.decode(data)


def decode_from_worker(data: bytes) -> WorkerMessage:
    """What a front end received. Raises msgspec.DecodeError."""
    return _from_worker.decode(data)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as packed uint32. The caller has checked that each fits."""
    return array("I", token_ids).tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The token ids of ``pack_tokens``."""
    ids = array("I")
    ids.frombytes(data)
    return ids.tolist()


def pack_events(happened: Iterable[events.Event]) -> list[tuple[str, Any]]:
    """Events for a Stats record (block events stay on the worker until a router asks for them)."""
    return [(type(event).__name__, event) for event in happened if type(event).__name__ in _EVENT_CLASSES]


def unpack_events(packed: Iterable[tuple[str, Any]]) -> list[Any]:
    """The events of ``pack_events``, as the control code's own classes."""
    return [msgspec.convert(fields, _EVENT_CLASSES[name]) for name, fields in packed]


def pack_error(error: errors.DiptychError) -> WireError:
    """An error for the wire."""
    return WireError(type(error).__name__, error.message, error.param)


def pack_finished(event: events.RequestFinished, refusal: errors.RequestError | None = None) -> Finished:
    """The terminal event for the wire; ``refusal``: the error behind it, where there was one."""
    error = None
    if event.reason is FinishReason.ERROR:
        error = pack_error(refusal) if refusal else WireError(errors.WorkerError.__name__, event.message)
    return Finished(
        event.request_id,
        event.reason,
        event.num_prompt_tokens,
        event.num_cached_tokens,
        event.num_preemptions,
        event.latency,
        event.slo_met,
        error,
    )


def unpack_error(error: WireError) -> errors.DiptychError:
    """The exception that ``pack_error`` was given; an unknown kind becomes a WorkerError."""
    cls = _ERROR_CLASSES.get(error.kind, errors.WorkerError)
    if issubclass(cls, errors.OverloadedError | errors.UnavailableError):
        return cls(error.message)
    return cls(error.message, param=error.param)
