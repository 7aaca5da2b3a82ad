"""The live page and the snapshot that it asks for, and the guide beside it.

Owns the shape of ``/ui/state``. Measures nothing: it reads metrics, timeline and fleet.
"""

import time
from collections.abc import Callable
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import BaseModel
from starlette.routing import Route

from diptych import __version__
from diptych.control.engine.reports import TierStats
from diptych.control.planner.planner_events import Decision, PlannerVerdict
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.serving.api.admin_routes import is_operator
from diptych.serving.api.diagnosis_routes import add_diagnosis_routes, add_engine_diagnosis_routes
from diptych.serving.fleet.fleet_planner import FleetPlanner
from diptych.serving.metrics.rolling_window import WINDOW_S, Recent
from diptych.serving.served_fleet import ServedFleet
from diptych.timeline.watched_server import WatchedEngine
from diptych.web.assets import page_route, static_routes, without_slash
from diptych.web.guide_app import guide_routes
from diptych.web.panel_host import PanelHost

_ROLES = ("prefill", "decode", "both")


class PercentilesReply(BaseModel):
    """Milliseconds, over the window; count: of the values."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


class WorkerReply(BaseModel):
    """One worker, as it reported last. cache_hits: share of the prompt tokens looked up that were found, 0 to 1 (null:
    none was looked up). computes_on: for people ("": its whole device). shape: how it schedules prompts
    beside streams, unified or chunked ("": as its engine likes)."""

    worker: int
    role: str
    state: str
    is_up: bool
    restarts: int
    waiting: int
    prefilling: int
    decoding: int
    swapped: int
    kv_usage: float
    cache_hits: float | None
    preemptions: int
    step_time_error: float
    computes_on: str
    shape: str


class PhaseView(BaseModel):
    """All workers of one role together. kv_usage: the mean of theirs."""

    role: str
    workers: int
    up: int
    waiting: int
    prefilling: int
    decoding: int
    kv_usage: float
    cache_hits: float | None


class Objectives(BaseModel):
    """Objectives of requests that name none; null: no objective."""

    ttft_ms: float | None
    tpot_ms: float | None


class Model(BaseModel):
    """What is served, and how long a prompt may be. null: not known before the workers are ready. has_chat: whether it
    answers conversations (the bundled one has a template for them, and was not trained to)."""

    name: str
    description: str
    max_model_len: int | None
    kv_capacity_tokens: int | None
    vocab_size: int | None
    has_text: bool
    has_chat: bool


class WindowReply(BaseModel):
    """The last seconds. Rates are per second; goodput and attainment count requests that have an objective.
    transfer: first byte to commit of the KV of handoffs; handoff: how long streams stood still for it."""

    span_s: float
    limit_s: float
    requests_per_s: float | None
    goodput_per_s: float | None
    attainment: float | None
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    ttft: PercentilesReply | None
    tpot: PercentilesReply | None
    itl: PercentilesReply | None
    transfer: PercentilesReply | None
    handoff: PercentilesReply | None
    handoffs: int
    kv_bytes_per_s: float | None


class PlanCandidate(BaseModel):
    """A configuration that the planner had simulated. goodput_rps, attainment: as predicted."""

    layout: str
    workers: int
    goodput_rps: float
    attainment: float


class PlanDecision(BaseModel):
    """Why the fleet changed, or did not. age_s: how long ago. rates: requests per second, now and as forecast."""

    number: int
    age_s: float
    verdict: PlannerVerdict
    reason: str
    present: str
    chosen: str
    rate: float
    forecast: float
    is_closed_loop: bool
    candidates: list[PlanCandidate]


class PlanView(BaseModel):
    """The planner and its last decisions, the newest first. longest_tick_ms: that a tick has taken in the front end."""

    mode: Literal["auto", "advise"]
    longest_tick_ms: float
    decisions: list[PlanDecision]


class TierReply(BaseModel):
    """The tiers of one worker. host_used: share of the host blocks that hold something. had_disk: whether it was given
    a disk; has_disk: whether it uses it. loading: requests that wait for a load. reads_peers: whether it reads the host
    memories of other workers."""

    worker: int
    host_used: float
    host_hit_tokens: int
    disk_hit_tokens: int
    reads_peers: bool
    peer_hit_tokens: int
    had_disk: bool
    has_disk: bool
    disk_bytes: int
    disk_blocks: int
    missed_blocks: int
    loading: int


class UiState(BaseModel):
    """The reply of /ui/state. queued: requests that no worker has been given yet. length_errors: of expected output
    lengths, learned and static, as shares of the mean length. admin: whether /admin would answer this page: as it is,
    with the admin key, or not at all. explains_misses: whether there is a /cache/misses. has_batches: whether
    batches are taken."""

    version: str
    state: str
    model: Model
    objectives: Objectives
    shape: str
    scheduling: str
    workers: list[WorkerReply]
    phases: list[PhaseView]
    queued: int
    open_requests: int
    length_errors: dict[str, float]
    window: WindowReply
    admin: Literal["open", "key", "closed"]
    plan: PlanView | None
    explains_misses: bool
    has_batches: bool
    tiers: list[TierReply]


async def _to_live_page(request: Request) -> Response:
    """Redirect the bare address, which people click, to the live page. The way there is relative, as in
    ``without_slash``."""
    return RedirectResponse("ui", 307)


def add_ui_routes(
    app: FastAPI,
    llm: ServedFleet,
    model_name: str,
    errors: dict[int | str, dict[str, Any]],
    *,
    has_admin_key: bool,
    watched: Callable[[], list[WatchedEngine]] | None = None,
) -> None:
    """Add ``/ui``, its files and ``/ui/state``, ``/docs``, ``/guide`` and ``/compare``. errors: documented replies from
    400 on. watched: engines of others, which are diagnosed by their metrics (None: workers of ours)."""
    recent = _recent(llm)
    app.router.routes += [page_route("/ui", "ui/index.html"), without_slash("/ui"), *static_routes()]
    app.router.routes.append(Route("/", _to_live_page, methods=["GET"], include_in_schema=False))
    app.router.routes.append(page_route("/docs", "reference/index.html"))
    panels = app.state.panels = PanelHost(is_background=True)
    app.router.routes += guide_routes(panels, live=True)
    if watched is None:
        add_diagnosis_routes(app, llm, model_name, panels, errors)
    else:
        add_engine_diagnosis_routes(app, llm, watched, panels, errors)

    @app.get("/ui/state", responses={401: errors[401], 200: {"model": UiState}})
    async def state(request: Request) -> Response:
        """The server at this moment and over the last seconds, for the live page."""
        recent.take(time.monotonic())
        found = _state(llm, model_name, recent)
        is_open = is_operator(request.scope, request.app.state.allowed_hosts)
        found.admin = "key" if has_admin_key else "open" if is_open else "closed"
        found.has_batches = request.app.state.batches is not None
        return Response(found.model_dump_json(), media_type="application/json")


def _recent(llm: ServedFleet) -> Recent:
    metrics = llm.metrics
    histograms = {
        "ttft": metrics.time_to_first_token,
        "itl": metrics.inter_token_latency,
        "tpot": metrics.time_per_output_token,
        "transfer": metrics.fleet.transfer_seconds,
        "handoff": metrics.fleet.handoff_seconds,
    }

    def counters() -> dict[str, int]:
        return {
            "ended": sum(metrics.num_ended.values()),
            "with_slo": metrics.num_with_slo,
            "meeting_slo": metrics.num_meeting_slo,
            "output_tokens": metrics.num_generated_tokens,
            "prompt_tokens": metrics.num_prompt_tokens,
            "handoffs": metrics.fleet.num_transfers,
            "kv_bytes": metrics.fleet.transferred_bytes,
        }

    return Recent(histograms, counters)


def _state(llm: ServedFleet, model_name: str, recent: Recent) -> UiState:
    view, ready, slo = llm.metrics.fleet.view(), llm.ready, llm.options.slo
    workers = [_worker(llm, number, role) for number, role in enumerate(view.roles)]
    roles = {role: view.roles.count(role) for role in _ROLES}
    return UiState(
        version=__version__,
        state=llm.state,
        model=Model(
            name=model_name,
            description=ready.description if ready else llm.loading.stage,
            max_model_len=ready.max_model_len if ready else None,
            kv_capacity_tokens=llm.kv_capacity_tokens,
            vocab_size=(ready.vocab_size or None) if ready else None,
            has_text=llm.has_text,
            has_chat=llm.has_chat,
        ),
        objectives=Objectives(ttft_ms=_ms(slo.ttft_ns), tpot_ms=_ms(slo.tpot_ns)),
        shape=" + ".join(f"{count} {role}" for role, count in roles.items() if count),
        scheduling=llm.scheduling,
        workers=workers,
        phases=[_phase(role, [worker for worker in workers if worker.role == role]) for role in _ROLES if roles[role]],
        queued=view.num_queued,
        open_requests=llm.num_open,
        length_errors=dict(view.length_errors),
        window=_window(recent),
        admin="closed",
        plan=_plan(llm.fleet.planner),
        explains_misses=llm.fleet.misses is not None,
        has_batches=False,
        tiers=[_tier(llm, number) for number in range(len(workers)) if _tiers_of(llm, number).num_host_blocks],
    )


def _tiers_of(llm: ServedFleet, number: int) -> TierStats:
    return llm.metrics.fleet.stats_of(number).tiers


def _tier(llm: ServedFleet, number: int) -> TierReply:
    tiers = _tiers_of(llm, number)
    return TierReply(
        worker=number,
        host_used=tiers.host_blocks_used / tiers.num_host_blocks,
        host_hit_tokens=tiers.host_hit_tokens,
        disk_hit_tokens=tiers.disk_hit_tokens,
        reads_peers=tiers.reads_peers,
        peer_hit_tokens=tiers.peer_hit_tokens,
        had_disk=llm.options.memory.disk is not None,
        has_disk=tiers.has_disk,
        disk_bytes=tiers.disk_bytes,
        disk_blocks=tiers.disk_blocks,
        missed_blocks=tiers.missed_blocks,
        loading=tiers.num_loading,
    )


def _plan(planner: FleetPlanner | None) -> PlanView | None:
    if planner is None or planner.planner.config.mode == "off":
        return None
    now = time.monotonic_ns()
    return PlanView(
        mode=planner.planner.config.mode,
        longest_tick_ms=planner.longest_tick_ns / NS_PER_MS,
        decisions=[_decision(decision, now) for decision in reversed(planner.decisions)],
    )


def _decision(decision: Decision, now: int) -> PlanDecision:
    return PlanDecision(
        number=decision.number,
        age_s=(now - decision.time_ns) / NS_PER_S,
        verdict=decision.verdict,
        reason=decision.reason,
        present=decision.present,
        chosen=decision.chosen,
        rate=decision.demand.rate,
        forecast=decision.demand.forecast,
        is_closed_loop=decision.demand.is_closed_loop,
        candidates=[
            PlanCandidate(
                layout=candidate.layout,
                workers=candidate.num_workers,
                goodput_rps=candidate.prediction.goodput_rps,
                attainment=candidate.prediction.attainment,
            )
            for candidate in decision.candidates
        ],
    )


def _worker(llm: ServedFleet, number: int, role: str) -> WorkerReply:
    fleet = llm.metrics.fleet
    view, stats = fleet.view(), fleet.stats_of(number)
    known, info = llm.timeline.workers.get(number), llm.fleet.members.infos.get(number)
    return WorkerReply(
        worker=number,
        role=role,
        state=known.state if known else "starting",
        is_up=bool(view.is_up[number]),
        restarts=view.num_restarts[number],
        waiting=stats.num_waiting,
        prefilling=stats.num_prefilling,
        decoding=stats.num_decoding,
        swapped=stats.num_swapped,
        kv_usage=stats.kv_usage,
        cache_hits=_share(stats.prefix_hit_tokens, stats.prefix_queried_tokens),
        preemptions=stats.num_preemptions,
        step_time_error=stats.step_time_error,
        computes_on=str(info.share) if info and info.share.num_units else "",
        shape=llm.shape_of(number),
    )


def _phase(role: str, workers: list[WorkerReply]) -> PhaseView:
    known = [worker.cache_hits for worker in workers if worker.cache_hits is not None]
    return PhaseView(
        role=role,
        workers=len(workers),
        up=sum(worker.is_up for worker in workers),
        waiting=sum(worker.waiting for worker in workers),
        prefilling=sum(worker.prefilling for worker in workers),
        decoding=sum(worker.decoding for worker in workers),
        kv_usage=sum(worker.kv_usage for worker in workers) / len(workers),
        cache_hits=sum(known) / len(known) if known else None,
    )


def _window(recent: Recent) -> WindowReply:
    return WindowReply(
        span_s=recent.span_s,
        limit_s=WINDOW_S,
        requests_per_s=recent.per_second("ended"),
        goodput_per_s=recent.per_second("meeting_slo"),
        attainment=_share(recent.count("meeting_slo"), recent.count("with_slo")),
        output_tokens_per_s=recent.per_second("output_tokens"),
        prompt_tokens_per_s=recent.per_second("prompt_tokens"),
        ttft=_percentiles(recent, "ttft"),
        tpot=_percentiles(recent, "tpot"),
        itl=_percentiles(recent, "itl"),
        transfer=_percentiles(recent, "transfer"),
        handoff=_percentiles(recent, "handoff"),
        handoffs=recent.count("handoffs"),
        kv_bytes_per_s=recent.per_second("kv_bytes"),
    )


def _percentiles(recent: Recent, name: str) -> PercentilesReply | None:
    found = recent.percentiles(name)
    if found is None:
        return None
    p50_ms, p90_ms, p99_ms, max_ms = (value * 1000 for value in (found.p50_s, found.p90_s, found.p99_s, found.max_s))
    return PercentilesReply(count=found.count, p50_ms=p50_ms, p90_ms=p90_ms, p99_ms=p99_ms, max_ms=max_ms)


def _ms(value_ns: int | None) -> float | None:
    return None if value_ns is None else value_ns / NS_PER_MS


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
