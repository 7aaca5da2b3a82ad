"""The guide and the comparison as a web application: no model, no torch, nothing but this package.

Owns the routes, the templates of the pages and how panels are called: in threads, few at a time, with every mistake in
the address answered by 400 and a sentence. What a panel computes is panels/'s business.
"""

import gzip
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import anyio.to_thread
import jinja2
import msgspec
import uvicorn
from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from diptych.control.errors import ConfigError, DiptychError
from diptych.web.assets import Asset, packed, send, static_routes
from diptych.web.panels import choose, chunked, disaggregated, interference, roofline, transfer
from diptych.web.panels.machine import catalogue
from diptych.web.panels.query import Query, controls, read

PAGES = Path(__file__).parent / "pages"
MAX_AT_ONCE = 2  # panels that are computed at the same time; others wait
GZIP_LEVEL = 5

Panel = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Chapter:
    """name: in addresses. panel: None where its answer is a stream."""

    name: str
    title: str
    about: str
    query: type[Query]
    panel: Panel | None


CHAPTERS = (
    Chapter(
        "phases",
        "Two phases, one roof",
        "Why reading a prompt and writing an answer want different things from a GPU.",
        roofline.RooflineQuery,
        roofline.panel,
    ),
    Chapter(
        "interference",
        "Interference",
        "What a long prompt does to everybody who shares its worker.",
        interference.InterferenceQuery,
        interference.panel,
    ),
    Chapter(
        "chunked",
        "Chunked prefill",
        "Prompts in pieces, between the tokens of the others.",
        chunked.ChunkedQuery,
        chunked.panel,
    ),
    Chapter(
        "disaggregated",
        "Two pools",
        "Prefill and decode on workers of their own, and what happens when one dies.",
        disaggregated.DisaggregatedQuery,
        disaggregated.panel,
    ),
    Chapter(
        "transfer",
        "The KV transfer",
        "How large the KV cache is, how long it travels, and when that hurts.",
        transfer.TransferQuery,
        transfer.panel,
    ),
    Chapter(
        "choose",
        "When to use what",
        "Your load, your objectives, your GPUs: all three shapes, simulated.",
        choose.ChooseQuery,
        None,
    ),
)


def guide_routes() -> list[Route]:
    """The pages, and ``/guide/api/NAME`` for each panel."""
    limiter = CapacityLimiter(MAX_AT_ONCE)
    routes = [
        _page("/guide", "index.html", None),
        _page("/compare", "compare.html", None),
        Route("/guide/api/choose", _choosing(limiter), methods=["GET"], include_in_schema=False),
    ]
    for chapter in CHAPTERS:
        routes.append(_page(f"/guide/{chapter.name}", f"{chapter.name}.html", chapter))
        if chapter.panel is not None:
            answer = _answering(chapter.query, chapter.panel, limiter)
            routes.append(Route(f"/guide/api/{chapter.name}", answer, methods=["GET"], include_in_schema=False))
    return routes


def guide_app() -> Starlette:
    """What ``diptych guide`` serves."""

    async def home(request: Request) -> Response:
        return RedirectResponse("/guide")

    return Starlette(routes=[Route("/", home), *guide_routes(), *static_routes()])


def run_guide(host: str, port: int, on_ready: Callable[[str], None], *, opens: bool = False) -> None:
    """Serve the guide until it is told to end. port 0: a free one. on_ready: told the address of the first page."""
    config = uvicorn.Config(guide_app(), host=host, port=port, log_level="warning", lifespan="off")
    server = _Server(config, on_ready, opens)
    server.run()


class _Server(uvicorn.Server):
    """Says where it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[str], None], opens: bool) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._opens = opens

    async def startup(self, sockets: Any = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            url = f"http://{shown}:{port}/guide"
            self._on_ready(url)
            if self._opens:
                threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


@cache
def page(template: str, chapter: Chapter | None) -> Asset:
    """A page as it is sent."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    number = CHAPTERS.index(chapter) if chapter else -1
    text = environment.get_template(template).render(
        chapters=CHAPTERS,
        chapter=chapter,
        number=number + 1,
        before=CHAPTERS[number - 1] if number > 0 else None,
        after=CHAPTERS[number + 1] if 0 <= number < len(CHAPTERS) - 1 else None,
        controls=controls(chapter.query) if chapter else {},
        catalogue=catalogue(),
    )
    return packed(text.encode(), "text/html; charset=utf-8")


def _page(path: str, template: str, chapter: Chapter | None) -> Route:
    async def answer(request: Request) -> Response:
        return send(request, page(template, chapter))

    return Route(path, answer, methods=["GET"], include_in_schema=False)


def _answering(kind: type[Query], panel: Panel, limiter: CapacityLimiter) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        def compute() -> bytes:
            return msgspec.json.encode(panel(read(kind, dict(request.query_params))))

        try:
            body = await anyio.to_thread.run_sync(compute, limiter=limiter)
        except DiptychError as error:
            return _refusal(error)
        headers = {"cache-control": "no-cache", "vary": "accept-encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["content-encoding"] = gzip.compress(body, GZIP_LEVEL, mtime=0), "gzip"
        return Response(body, headers=headers, media_type="application/json")

    return answer


def _choosing(limiter: CapacityLimiter) -> Callable[[Request], Any]:
    """Chapter 6 takes seconds: one JSON line after each simulation, the result at the end."""

    async def answer(request: Request) -> Response:
        def begin() -> tuple[Iterator[dict[str, Any]], dict[str, Any]]:
            events = choose.steps(read(choose.ChooseQuery, dict(request.query_params)))
            return events, next(events)

        try:
            events, first = await anyio.to_thread.run_sync(begin, limiter=limiter)
        except DiptychError as error:
            return _refusal(error)

        async def lines() -> AsyncIterator[bytes]:
            event: dict[str, Any] | None = first
            while event is not None:
                yield msgspec.json.encode(event) + b"\n"
                event = await anyio.to_thread.run_sync(next, events, None, limiter=limiter)

        return StreamingResponse(lines(), media_type="application/x-ndjson", headers={"cache-control": "no-cache"})

    return answer


def _refusal(error: DiptychError) -> Response:
    body = {"error": {"message": error.message, "param": error.param}}
    status = 400 if isinstance(error, ConfigError) else error.status
    return Response(msgspec.json.encode(body), status, media_type="application/json")
