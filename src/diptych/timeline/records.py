"""The records of the live timeline, as the ring holds them and as clients of ``GET /timeline`` read them.

Owns their shape (docs/api.md describes it), how they come from the workers' events, and the way back. They hold ids of
requests, never attempts: ``epoch`` tells the attempts apart. (gc=False: they live long and can be in no cycle, so that
the garbage collector need not look at a full ring.)
"""

from typing import Any

import msgspec

from diptych.control.commands import attempt_id_of
from diptych.control.errors import ErrorRecord, WorkerError
from diptych.control.events import (
    FirstToken,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestRested,
    RequestResumed,
    StepBegun,
    StepFinished,
)
from diptych.control.request import FinishReason, RequestOptions
from diptych.control.slo import LatencyBreakdown
from diptych.control.step import VerifyResult
from diptych.timeline.lanes import phase_of
from diptych.timeline.roster import Changes

MAX_MESSAGE = 200  # characters of an error

Milestone = (
    RequestQueued
    | RequestAdmitted
    | FirstToken
    | RequestPreempted
    | RequestRested
    | RequestResumed
    | HandoffReserved
    | HandoffDelivered
    | HandoffReleased
    | HandoffExpired
    | RequestFinished
)
Decoding = dict[int, list[str]]  # worker -> requests in its decode batch
AttemptIds = tuple[str, ...]
Chunks = tuple[tuple[str, int, int], ...]  # (request, first token, tokens)

_CLASSES: dict[str, type[Any]] = {
    "queued": RequestQueued,
    "admitted": RequestAdmitted,
    "first_token": FirstToken,
    "preempted": RequestPreempted,
    "rested": RequestRested,
    "resumed": RequestResumed,
    "handoff_reserved": HandoffReserved,
    "handoff_delivered": HandoffDelivered,
    "handoff_released": HandoffReleased,
    "handoff_expired": HandoffExpired,
    "finished": RequestFinished,
}
_NAMES = {cls: name for name, cls in _CLASSES.items()}


class StepRecord(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="step", omit_defaults=True):
    """One step. prefills: (request, first token, tokens); a request "" where an engine of others does not name its
    prompts, which share the step's tokens equally then. joined, left: changes of the decode batch since the worker's
    step before (first take away, then add); in a step with num_decodes 0 the whole batch had to wait. extra: (request,
    tokens computed besides its newest one, of these right, of these forced), of those of the batch that had any."""

    sequence: int
    worker: int
    step_id: int
    start_ns: int
    end_ns: int
    phase: str
    num_decodes: int
    decode_context: int
    predicted_ns: int
    prefills: tuple[tuple[str, int, int], ...] = ()
    epochs: tuple[int, ...] = ()  # of the prefills' requests, unless all are 0
    joined: AttemptIds = ()
    left: AttemptIds = ()
    extra: tuple[tuple[str, int, int, int], ...] = ()


class StepBegunRecord(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="step_begun", omit_defaults=True):
    """A step that should take long has begun; its ``step`` follows with the same ``step_id`` when it ends, unless the
    worker is lost meanwhile. Fields as there. Who is in the decode batch is what was known before it."""

    sequence: int
    worker: int
    step_id: int
    time_ns: int
    phase: str
    num_decodes: int
    predicted_ns: int
    prefills: tuple[tuple[str, int, int], ...] = ()
    epochs: tuple[int, ...] = ()


class RequestRecord(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="request", omit_defaults=True):
    """A milestone of one request on one worker. epoch: how often it had been dispatched again. What ``detail`` holds
    depends on ``what``."""

    sequence: int
    worker: int
    time_ns: int
    what: str
    request_id: str
    epoch: int = 0
    detail: dict[str, Any] = {}


class TransferRecord(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="transfer", omit_defaults=True):
    """KV that travelled from the worker ``sender`` to ``worker``; exposed_ns: the time after the end of the prefill."""

    sequence: int
    worker: int
    sender: int
    request_id: str
    num_bytes: int
    start_ns: int
    end_ns: int
    exposed_ns: int
    epoch: int = 0


class WorkerRecord(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="worker", omit_defaults=True):
    """A worker changed its state, its role or its compute units; left: the requests that were in its decode batch, when
    it holds none any more. computes_on: its units, in words ("": the whole device)."""

    sequence: int
    worker: int
    time_ns: int
    state: str
    role: str = ""
    detail: str = ""
    left: AttemptIds = ()
    computes_on: str = ""


class AnswerRecord(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="answer", omit_defaults=True):
    """An answer as the front end saw it, at its end. worker: that fed it last. submitted_ns: its prompt was tokens by
    then. first_token_ns, last_token_ns: they came to the front end (0: there was none). unread_ns: how long tokens
    waited because the client did not read; unsent_bytes: what it had not taken at the end. ttft_slo_ns, tpot_slo_ns:
    its own objectives (0: none). cpu_wait_ns: of its worker until then (see EngineStats)."""

    sequence: int
    worker: int
    time_ns: int
    request_id: str
    submitted_ns: int
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    reason: str = ""
    unread_ns: int = 0
    ttft_slo_ns: int = 0
    tpot_slo_ns: int = 0
    service_class: str = "standard"
    unsent_bytes: int = 0
    cpu_wait_ns: int = 0


class GapRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="gap"):
    """Records ``first`` to ``last`` were overwritten before they could be read; decoding: the batches after them."""

    first: int
    last: int
    decoding: Decoding


class HeaderRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="header"):
    """What a reader needs first. A time t is the Unix time ``unix_ns_at_zero + t``. decoding: the decode batches before
    the first record that follows."""

    version: int
    run_id: str
    unix_ns_at_zero: int
    now_ns: int
    first_sequence: int
    next_sequence: int
    workers: dict[int, dict[str, str]]
    decoding: Decoding


Record = StepRecord | StepBegunRecord | RequestRecord | TransferRecord | WorkerRecord | AnswerRecord


def split_attempt_id(attempt_id: str) -> tuple[str, int]:
    """The request's own id and the epoch, of an id that control.commands.attempt_id_of made."""
    if "~" not in attempt_id:
        return attempt_id, 0
    request_id, _, epoch = attempt_id.rpartition("~")
    return (request_id, int(epoch)) if epoch.isascii() and epoch.isdigit() else (attempt_id, 0)


def requests_of(attempts: AttemptIds) -> AttemptIds:
    """The requests' own ids."""
    return tuple([split_attempt_id(attempt_id)[0] for attempt_id in attempts]) if attempts else ()


def step_begun_record(sequence: int, worker: int, step: StepBegun) -> StepBegunRecord:
    """The beginning of a long step for the ring."""
    prefills, epochs = _split_epochs(step.prefills)
    return StepBegunRecord(
        sequence,
        worker,
        step.step_id,
        step.time_ns,
        phase_of(step),
        step.num_decodes,
        step.predicted_ns,
        prefills,
        epochs,
    )


def step_record(sequence: int, worker: int, step: StepFinished, changes: Changes) -> StepRecord:
    """A step for the ring. changes: the attempts that joined and left the decode batch."""
    prefills, epochs = _split_epochs(step.prefills)
    return StepRecord(
        sequence,
        worker,
        step.step_id,
        step.start_ns,
        step.end_ns,
        phase_of(step),
        step.num_decodes,
        step.decode_context,
        step.predicted_ns,
        prefills,
        epochs,
        requests_of(changes[0]),
        requests_of(changes[1]),
        tuple(
            [
                (split_attempt_id(extra.request_id)[0], extra.num_tokens, extra.num_accepted, extra.num_forced)
                for extra in step.extra
            ]
        ),
    )


def request_record(sequence: int, worker: int, event: Milestone) -> RequestRecord:
    """A milestone for the ring. Block ids are left out, and errors cut to 200 characters."""
    request_id, epoch = split_attempt_id(event.request_id)
    return RequestRecord(sequence, worker, event.time_ns, _NAMES[type(event)], request_id, epoch, _detail(event))


def event_of(record: StepRecord | RequestRecord) -> StepFinished | Milestone:
    """The event that a record was made of (but for the epochs of ``extra``)."""
    if isinstance(record, StepRecord):
        epochs = record.epochs or (0,) * len(record.prefills)
        prefills = tuple(
            (attempt_id_of(request_id, epoch), start, num_tokens)
            for (request_id, start, num_tokens), epoch in zip(record.prefills, epochs, strict=True)
        )
        times = (record.start_ns, record.end_ns)
        return StepFinished(
            record.step_id, *times, prefills, record.num_decodes, record.decode_context, record.predicted_ns,
            extra=tuple(VerifyResult(*fields) for fields in record.extra),
        )  # fmt: skip
    attempt_id, detail = attempt_id_of(record.request_id, record.epoch), dict(record.detail)
    if record.what == "finished":
        names = ("queue_ns", "prefill_ns", "decode_ns", "num_output_tokens", "handoff_ns")
        detail["latency"] = LatencyBreakdown(*(detail.pop(name) for name in names))
        detail["reason"] = FinishReason(detail["reason"])
        message = detail.pop("message")
        detail["error"] = ErrorRecord(WorkerError.__name__, message) if message else None
    elif record.what == "queued":
        detail["options"] = RequestOptions(metadata=detail.pop("metadata", {}))
    event: Milestone = _CLASSES[record.what](record.time_ns, attempt_id, **detail)
    return event


def _split_epochs(prefills: Chunks) -> tuple[Chunks, tuple[int, ...]]:
    """Chunks by their requests' own ids, and the epochs unless all are 0."""
    if not any("~" in chunk[0] for chunk in prefills):
        return prefills, ()
    split = [split_attempt_id(chunk[0]) for chunk in prefills]
    named = tuple((own[0], *chunk[1:]) for own, chunk in zip(split, prefills, strict=True))
    return named, tuple(epoch for _, epoch in split)


def _detail(event: Milestone) -> dict[str, Any]:
    """The fields of an event but time and id, flat."""
    if isinstance(event, RequestQueued):
        metadata = {"metadata": dict(event.options.metadata)} if event.options.metadata else {}
        return {"num_prompt_tokens": event.num_prompt_tokens, **metadata}
    if isinstance(event, RequestAdmitted):
        return {"num_cached_tokens": event.num_cached_tokens, "is_first": event.is_first}
    if isinstance(event, RequestPreempted):
        return {"swapped": event.swapped, "by_priority": event.by_priority, "is_stream": event.is_stream}
    if isinstance(event, HandoffReserved):
        return {"num_cached_tokens": event.num_cached_tokens}
    if isinstance(event, HandoffExpired):
        return {"is_sender": event.is_sender}
    if not isinstance(event, RequestFinished):
        return {}
    latency = event.latency
    return {
        "reason": str(event.reason),
        "num_prompt_tokens": event.num_prompt_tokens,
        "num_cached_tokens": event.num_cached_tokens,
        "num_preemptions": event.num_preemptions,
        "num_output_tokens": latency.num_output_tokens,
        "queue_ns": latency.queue_ns,
        "prefill_ns": latency.prefill_ns,
        "handoff_ns": latency.handoff_ns,
        "decode_ns": latency.decode_ns,
        "slo_met": event.slo_met,
        "message": event.message[:MAX_MESSAGE],
    }
