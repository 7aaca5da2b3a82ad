"""Diptych's own telemetry as an Observation: the records of a timeline, with what else the server says of itself.

Exact: every completed request whose life is in the records is split. The same function reads a live server, a recording
that was decided again, and a simulation.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.fleet_settings import FleetSettings
from diptych.control.misses.prefix_miss import NEW, ROUNDING, MissReason
from diptych.control.slo import NS_PER_S, Slo
from diptych.control.step import StepFeatures, chunk_attention
from diptych.diagnosis.observation import Missing, Observation
from diptych.diagnosis.observed_arrivals import arrivals_of
from diptych.diagnosis.request_parts import KnownWorker, PartsReader, RequestParts, transfers, worker_uses
from diptych.diagnosis.step_sums import Terms
from diptych.timeline.records import AnswerRecord, Record, RequestRecord, StepBegunRecord, StepRecord, WorkerRecord

NUM_LEARNED = 2000  # newest steps of a worker from which its step-time model is fitted
SLICES = 10  # of the window, for bursts
UNSENT_BYTES = 65_536  # that a client which reads has not left at the end of an answer
UNREAD_SHARE = 0.1  # of an answer's time


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSource:
    """What is known beside the records. kv_usage, cpu_wait: by worker. reread: see Observation's signals."""

    source: str
    version: str = ""
    settings: FleetSettings | None = None
    slo: Slo = field(default_factory=Slo)
    signals: Mapping[str, float] = field(default_factory=dict)
    missing: tuple[Missing, ...] = ()
    notes: tuple[str, ...] = ()


def observe(records: Sequence[Record], about: TimelineSource, since_ns: int = 0) -> Observation:
    """The observation of these records. since_ns: the beginning of the window; what ended before it counts only as work
    that the server had."""
    views = _views(records, about.settings)
    reader = PartsReader(records, views, about.slo)
    requests = reader.requests(since_ns)
    start_ns, end_ns = _window(records, since_ns)
    signals = {
        **_of_requests(requests, reader, start_ns, end_ns),
        "failed": float(reader.num_failed(since_ns)),
        **_of_workers(records, reader, views, start_ns, end_ns),
        **_of_queues(records, start_ns, end_ns),
        **about.signals,
    }
    return Observation(
        engine="diptych",
        source=about.source,
        version=about.version,
        window_s=(end_ns - start_ns) / NS_PER_S,
        is_exact=True,
        requests=tuple(requests),
        arrivals=arrivals_of(records, about.slo, since_ns),
        steps=tuple((features_of(step), step.end_ns - step.start_ns) for step in steps_of(records)),
        signals=signals,
        slo=about.slo,
        fleet=about.settings,
        missing=about.missing,
        notes=about.notes,
    )


def reread_signals(spent: Mapping[str, int]) -> dict[str, float]:
    """The share of the computed prompt tokens that had been computed before. spent: tokens by what they were computed
    for (see control/misses/prefix_miss.py)."""
    total = sum(spent.values())
    if not total:
        return {}
    again = total - spent.get(NEW, 0) - spent.get(ROUNDING, 0)
    evicted = spent.get(MissReason.EVICTED, 0)
    return {"reread_share": again / total, "reread_evicted": evicted / again if again else 0.0}


def newest(records: Sequence[Record], window_s: float) -> tuple[list[Record], int]:
    """The records of the last ``window_s`` seconds, with what came before of the requests that ended in them or have
    not ended, and of those that the server served meanwhile; and when these seconds begin."""
    if not records:
        return [], 0
    window_ns = round(window_s * NS_PER_S)
    since_ns = max(map(end_of, records)) - window_ns
    queued: dict[str, int] = {}
    ended: dict[str, int] = {}
    for record in records:
        if isinstance(record, RequestRecord):
            if record.what == "queued":
                queued.setdefault(record.request_id, record.time_ns)
            elif record.what == "finished":
                ended[record.request_id] = record.time_ns
    # one that is under way for longer than another window is left out: its steps cannot be kept for ever
    alive = {request_id for request_id, at in queued.items() if request_id not in ended and at >= since_ns - window_ns}
    there = alive | {request_id for request_id, at in ended.items() if at >= since_ns}
    first_ns = min((queued[request_id] for request_id in there if request_id in queued), default=since_ns)
    first_ns = min(first_ns, since_ns)
    kept = [
        record
        for record in records
        if end_of(record) >= first_ns
        and (
            not isinstance(record, RequestRecord)
            or record.time_ns >= since_ns
            or record.request_id in there
            or queued.get(record.request_id, first_ns - 1) >= first_ns
        )
    ]
    return kept, since_ns


def _views(records: Sequence[Record], settings: FleetSettings | None) -> dict[int, KnownWorker]:
    """Each worker with the terms of its step-time model: as it reports them, else fitted to its steps."""
    told = {worker.worker: worker for worker in settings.workers} if settings else {}
    roles = {record.worker: record.role for record in records if isinstance(record, WorkerRecord) and record.role}
    views = {}
    for worker in {record.worker for record in records if isinstance(record, StepRecord)}:
        known = told.get(worker)
        terms = known.terms_ns if known and len(known.terms_ns) == 5 else _fitted(records, worker)
        role = known.role if known else roles.get(worker, "both")
        views[worker] = KnownWorker(role, terms, known.engine.scheduler.max_num_seqs if known else 0)
    return views


def _fitted(records: Sequence[Record], worker: int) -> Terms:
    """The step-time model of the worker's newest steps."""
    model = StepTimeModel()
    for step in [step for step in steps_of(records) if step.worker == worker][-NUM_LEARNED:]:
        model.observe(features_of(step), step.end_ns - step.start_ns)
    fixed, token, pair, stream, context = model.coefficients
    return fixed, token, pair, stream, context


def steps_of(records: Sequence[Record]) -> list[StepRecord]:
    """The steps among them."""
    return [record for record in records if isinstance(record, StepRecord)]


def features_of(step: StepRecord) -> StepFeatures:
    """What a step computed."""
    tokens = sum(count for _, _, count in step.prefills)
    pairs = sum(chunk_attention(start, count) for _, start, count in step.prefills)
    return StepFeatures(tokens, pairs, step.num_decodes, step.decode_context)


def _window(records: Sequence[Record], since_ns: int) -> tuple[int, int]:
    steps = steps_of(records)
    if not steps:
        return 0, 0
    start_ns, end_ns = min(step.start_ns for step in steps), max(step.end_ns for step in steps)
    return min(end_ns, max(start_ns, since_ns)), end_ns


def _of_requests(requests: Sequence[RequestParts], reader: PartsReader, start_ns: int, end_ns: int) -> dict[str, float]:
    """What the requests were like."""
    signals = {"requests": float(len(requests))}
    if not requests:
        return signals
    seconds = max(1, end_ns - start_ns) / NS_PER_S
    prompts = sorted(parts.num_prompt_tokens for parts in requests)
    computed = {parts.request_id: max(1, parts.num_prompt_tokens - parts.num_cached_tokens) for parts in requests}
    total = sum(computed.values())
    half = len(requests) // 2
    span_ns = requests[-1].arrival_ns - requests[0].arrival_ns + 1
    slices = Counter((parts.arrival_ns - requests[0].arrival_ns) * SLICES // span_ns for parts in requests)
    signals |= {
        "rate": len(requests) / seconds,
        "burst": max(slices.values()) * SLICES / len(requests),
        "prompt_mean": fmean(prompts),
        "prompt_p50": median(prompts),
        "prompt_p95": prompts[min(len(prompts) - 1, len(prompts) * 95 // 100)],
        "output_mean": fmean(parts.num_output_tokens for parts in requests),
        "hit_share": _hits(requests),
        "hit_share_early": _hits(requests[:half]),
        "hit_share_late": _hits(requests[half:]),
        "preemptions": fmean(parts.num_preemptions for parts in requests),
        "batch_share": sum(computed[parts.request_id] for parts in requests if parts.service_class == "batch") / total,
        "long_share": sum(computed[parts.request_id] for parts in requests if parts.request_id in reader.long_prompts)
        / total,
        "stall_s": fmean(parts.decode["mixed_prefill"] + parts.decode["stalled_by_prefill"] for parts in requests)
        / NS_PER_S,
        "chunks_per_prompt": reader.chunks_per_prompt,
        "unread_share": fmean(_is_unread(parts) for parts in requests),
    }
    return signals


def _is_unread(parts: RequestParts) -> bool:
    return parts.unsent_bytes >= UNSENT_BYTES or parts.unread_ns > UNREAD_SHARE * max(1, parts.decode_ns)


def _hits(requests: Sequence[RequestParts]) -> float:
    prompts = sum(parts.num_prompt_tokens for parts in requests)
    return sum(parts.num_cached_tokens for parts in requests) / prompts if prompts else 0.0


def _of_workers(
    records: Sequence[Record], reader: PartsReader, views: Mapping[int, KnownWorker], start_ns: int, end_ns: int
) -> dict[str, float]:
    """What the workers did."""
    signals: dict[str, float] = {}
    uses = worker_uses(reader, start_ns, end_ns)
    if not uses:
        return signals
    busy = {worker: 1 - parts["idle"] for worker, parts in uses.items()}
    signals["busy"] = fmean(busy.values())
    stepping = sum(busy.values())
    signals["slow_share"] = sum(parts["slow"] for parts in uses.values()) / stepping if stepping else 0.0
    for role in ("prefill", "decode"):
        of_role = [busy[worker] for worker in uses if views[worker].role == role]
        if of_role:
            signals[f"busy_{role}"] = fmean(of_role)
    steps = [step for step in steps_of(records) if step.end_ns > start_ns]
    computed = sum(step.num_decodes * (step.end_ns - max(start_ns, step.start_ns)) for step in steps)
    signals["running"] = computed / max(1, end_ns - start_ns)
    if steps:
        signals["running_max"] = float(max(step.num_decodes for step in steps))
        tokens = sorted(step.num_decodes + sum(count for _, _, count in step.prefills) for step in steps)
        signals["step_tokens_p95"] = float(tokens[len(tokens) * 95 // 100])
    if places := [view.max_num_seqs for view in views.values() if view.max_num_seqs]:
        signals["max_num_seqs"] = float(sum(places))
    ready = [record.time_ns for record in records if isinstance(record, WorkerRecord) and record.state == "ready"]
    if ready:
        signals["worker_age_s"] = max(0.0, (end_ns - max(ready)) / NS_PER_S)
    if (waited := _cpu_wait(records)) is not None:
        signals["cpu_wait"] = waited
    if moved := transfers(records):
        signals["transfer_s"] = fmean((move.end_ns - move.start_ns) / NS_PER_S for move in moved)
        signals["transfer_bytes"] = fmean(move.num_bytes for move in moved)
    return signals


def _cpu_wait(records: Sequence[Record]) -> float | None:
    """The share of the time in which the worst worker waited for a core, between its first and its last answer."""
    spans: dict[int, tuple[AnswerRecord, AnswerRecord]] = {}
    for record in records:
        if isinstance(record, AnswerRecord) and record.cpu_wait_ns:
            first, _ = spans.get(record.worker, (record, record))
            spans[record.worker] = first, record
    shares = [
        (last.cpu_wait_ns - first.cpu_wait_ns) / (last.time_ns - first.time_ns)
        for first, last in spans.values()
        if last.time_ns > first.time_ns
    ]
    return min(1.0, max(0.0, *shares)) if shares else None


def _of_queues(records: Sequence[Record], start_ns: int, end_ns: int) -> dict[str, float]:
    """How many requests waited on average: the time that they waited, over the window."""
    queued: dict[str, int] = {}
    waited = 0
    for record in records:
        if isinstance(record, AnswerRecord):
            continue
        if isinstance(record, RequestRecord):
            if record.what == "queued" or (record.what == "preempted" and not record.detail.get("is_stream", True)):
                queued[record.request_id] = record.time_ns
            elif record.what in ("admitted", "finished") and record.request_id in queued:
                waited += max(0, record.time_ns - max(start_ns, queued.pop(record.request_id)))
    waited += sum(max(0, end_ns - max(start_ns, time_ns)) for time_ns in queued.values())
    return {"waiting": waited / max(1, end_ns - start_ns)}


def end_of(record: Record) -> int:
    """When what it says was over."""
    if isinstance(record, RequestRecord | AnswerRecord | WorkerRecord | StepBegunRecord):
        return record.time_ns
    return record.end_ns
