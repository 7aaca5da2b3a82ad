"""``GET /diagnosis``: what limits this server now, for its live page.

Computed in the process of the panels, which gives way to the server; here the newest records are only encoded, in
portions between which the event loop is free.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from diptych import __version__
from diptych.control.slo import NS_PER_S
from diptych.serving.fleet.settings_view import settings_of
from diptych.serving.served_fleet import ServedFleet
from diptych.timeline.watched_server import WatchedEngine, WatchedEngines, WatchedServer
from diptych.web.panel_host import PanelHost
from diptych.web.panel_wire import Call

MOST_RECORDS = 20_000  # that are looked at: the newest
PORTION = 1000  # about 2 ms of the event loop

Objectives = Annotated[str, Query(description="Such as ttft=300ms,tpot=50ms; none: the server's own", max_length=100)]
WithAdvice = Annotated[bool, Query(description="Simulate what settings would gain: some seconds")]
WINDOW_NS = 60 * NS_PER_S  # of the records that are looked at


class DiagnosisReply(BaseModel):
    """The reply of /diagnosis: that of ``diptych diagnose --json``."""

    verdict: str
    sentence: str
    num_requests: int
    num_unserved: int
    miss_share: float | None
    causes: list[dict[str, Any]]
    attribution: dict[str, dict[str, Any]]


class EngineDiagnosisReply(DiagnosisReply):
    """The diagnosis of the engine that loses most; servers: those of all, where there are several."""

    engine: str
    source: str
    servers: list[dict[str, Any]] = []


def add_diagnosis_routes(
    app: FastAPI, llm: ServedFleet, model_name: str, panels: PanelHost, errors: dict[int | str, dict[str, Any]]
) -> None:
    """Add ``/diagnosis``. panels: computes it. errors: documented replies from 400 on."""
    refusals: dict[int | str, dict[str, Any]] = {status: errors[status] for status in (400, 401, 503)}

    @app.get("/diagnosis", responses={**refusals, 200: {"model": DiagnosisReply}})
    async def diagnosis(request: Request, slo: Objectives = "", advice: WithAdvice = False) -> Response:
        """What limits this server, from its newest records: causes in seconds per request, and where the time goes."""
        misses = llm.fleet.misses
        watched = WatchedServer(
            records=await _encoded(llm),
            settings=settings_of(llm.fleet, __version__, model_name),
            now_ns=time.monotonic_ns(),
            kv_usage=max((stats.kv_usage for stats in llm.metrics.fleet.workers.values()), default=0.0),
            slo=slo,
            with_advice=advice,
            computed={} if misses is None else misses.spent_within(WINDOW_NS),
        )
        call = Call(kind="diagnosis", body=msgspec.msgpack.encode(watched))
        reply = await panels.ask(call, request.is_disconnected)
        return Response(reply.body, reply.status, media_type="application/json")


def add_engine_diagnosis_routes(
    app: FastAPI,
    llm: ServedFleet,
    watched: Callable[[], list[WatchedEngine]],
    panels: PanelHost,
    errors: dict[int | str, dict[str, Any]],
) -> None:
    """Add ``/diagnosis`` over engines of others, which report less than workers do: from their metrics. watched: of the
    engines that have any; raises ConflictError where none has."""
    refusals: dict[int | str, dict[str, Any]] = {status: errors[status] for status in (400, 401, 409, 503)}

    @app.get("/diagnosis", responses={**refusals, 200: {"model": EngineDiagnosisReply}})
    async def diagnosis(request: Request, slo: Objectives = "", advice: WithAdvice = False) -> Response:
        """What limits the engine that loses most time, from what the metrics of all said in the last minute."""
        asked = WatchedEngines(engines=watched(), own_slo=llm.options.slo, slo=slo, with_advice=advice)
        call = Call(kind="engines", body=msgspec.msgpack.encode(asked))
        reply = await panels.ask(call, request.is_disconnected)
        return Response(reply.body, reply.status, media_type="application/json")


async def _encoded(llm: ServedFleet) -> list[msgspec.Raw]:
    timeline = llm.timeline
    since, pages = max(timeline.first_sequence - 1, timeline.next_sequence - 1 - MOST_RECORDS), []
    while records := timeline.since(since, PORTION):
        pages.append(msgspec.Raw(msgspec.msgpack.encode(records)))
        since = records[-1].sequence
        if len(records) < PORTION:
            break
        await asyncio.sleep(0)
    return pages
