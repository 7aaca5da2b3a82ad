"""The guide and the comparison as a web application: no model, no torch, nothing but this package.

Owns the routes. Pages are rendered and panels are computed in a process of their own (panel_host.py), so that a server
that mounts these routes beside others is not disturbed; here replies are only passed on.
"""

import asyncio
import contextlib
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from anyio import CancelScope
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from diptych.base.stop_signals import stop_signals
from diptych.web.assets import Asset, packed, send, static_routes, without_slash
from diptych.web.panel_host import PanelHost
from diptych.web.panel_wire import MOST_QUERY_BYTES, Call, Reply, refusal

NAMES = ("phases", "interference", "chunked", "disaggregated", "transfer", "choose")  # of the chapters; see chapters.py
STREAMED = "choose"
HEADERS = {"cache-control": "no-cache", "vary": "accept-encoding", "x-content-type-options": "nosniff"}


def guide_routes(host: PanelHost, *, live: bool = False) -> list[Route]:
    """``/guide`` with its chapters, ``/compare``, and ``/guide/api/NAME`` for each panel. live: pages have a way to
    ``/ui`` of the same server."""
    pages: dict[str, Asset] = {}
    addresses = {"/guide": "index", "/compare": "compare"} | {f"/guide/{name}": name for name in NAMES}
    routes = [_page(path, name, host, pages, live) for path, name in addresses.items()]
    routes += [without_slash(path) for path in addresses]
    for name in NAMES:
        answer = _streaming(host) if name == STREAMED else _answering(name, host)
        routes.append(Route(f"/guide/api/{name}", answer, methods=["GET"], include_in_schema=False))
    return routes


def guide_app(host: PanelHost) -> Starlette:
    """What ``diptych guide`` serves."""

    async def home(request: Request) -> Response:
        return RedirectResponse("/guide")

    return Starlette(routes=[Route("/", home), *guide_routes(host), *static_routes()])


def run_guide(
    host: str,
    port: int,
    on_ready: Callable[[str], None],
    *,
    opens: bool = False,
    guarded: Callable[[ASGIApp], ASGIApp] | None = None,
    http: type[asyncio.Protocol] | None = None,
) -> None:
    """Serve the guide until a stop signal. port 0: a free one. on_ready: called with the address of the first
    page. guarded: put around the application. http: the protocol of a connection, with limits of its own (None:
    uvicorn's)."""
    panels = PanelHost()
    app = guide_app(panels) if guarded is None else guarded(guide_app(panels))
    config = uvicorn.Config(
        app, host=host, port=port, http=http or "auto", ws="none", log_level="warning", lifespan="off", use_colors=False
    )
    try:
        _Server(config, panels, on_ready, opens).run()
    finally:
        panels.close()


class _Server(uvicorn.Server):
    """Says where it listens, when the first page is there at once. Ends with a stop signal, without raising it again:
    what closes the process of the panels has to run."""

    def __init__(self, config: uvicorn.Config, panels: PanelHost, on_ready: Callable[[str], None], opens: bool) -> None:
        super().__init__(config)
        self._panels = panels
        self._on_ready = on_ready
        self._opens = opens

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to ``startup``."""
        yield

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and say where."""
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._end, number)
        await super().startup(sockets)
        if self.started:
            await self._panels.ask(Call(kind="page", name="index"))
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            url = f"http://{shown}:{port}/guide"
            self._on_ready(url)
            if self._opens:
                threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    def _end(self, number: int) -> None:
        self._panels.end()  # nobody waits for a panel any more
        self.handle_exit(number, None)


def _page(path: str, name: str, host: PanelHost, pages: dict[str, Asset], live: bool) -> Route:
    async def answer(request: Request) -> Response:
        if name not in pages:
            reply = await host.ask(Call(kind="page", name=name, query={"live": "on"} if live else {}))
            if reply.status != 200:
                return _passed_on(reply)
            pages[name] = packed(reply.body, "text/html; charset=utf-8")
        return send(request, pages[name])

    return Route(path, answer, methods=["GET"], include_in_schema=False)


def _answering(name: str, host: PanelHost) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        if refused := _long_query(request):
            return _passed_on(refused)
        packs = "gzip" in request.headers.get("accept-encoding", "")
        call = Call(kind="panel", name=name, query=dict(request.query_params), packs=packs)
        return _passed_on(await host.ask(call, request.is_disconnected))

    return answer


def _long_query(request: Request) -> Reply | None:
    """The refusal of a query that is longer than any of the pages sends: it is not even taken apart."""
    if (length := len(request.scope["query_string"])) <= MOST_QUERY_BYTES:
        return None
    return refusal(400, f"the query has {length} bytes; at most {MOST_QUERY_BYTES}")


def _passed_on(reply: Reply) -> Response:
    headers = HEADERS | ({"content-encoding": "gzip"} if reply.is_packed else {})
    if reply.status == 503:
        headers["retry-after"] = "1"
    return Response(reply.body, reply.status, headers=headers, media_type="application/json")


def _streaming(host: PanelHost) -> Callable[[Request], Any]:
    """Chapter 6 takes seconds: one JSON line after each simulation, the result at the end."""

    async def answer(request: Request) -> Response:
        if refused := _long_query(request):
            return _passed_on(refused)
        call = Call(kind="begin", name=STREAMED, query=dict(request.query_params))
        first = await host.ask(call, request.is_disconnected)
        if first.status != 200:
            return _passed_on(first)

        async def lines() -> AsyncIterator[bytes]:
            reply = first
            try:
                while reply.status == 200 and reply.body:
                    yield reply.body + b"\n"
                    reply = await host.ask(Call(kind="next", stream=first.stream))
                if reply.status != 200:
                    yield reply.body + b"\n"
            finally:
                with CancelScope(shield=True):  # the reader may be gone: forget the rest of its simulations
                    await host.ask(Call(kind="drop", stream=first.stream))

        return StreamingResponse(lines(), media_type="application/x-ndjson", headers=HEADERS)

    return answer
