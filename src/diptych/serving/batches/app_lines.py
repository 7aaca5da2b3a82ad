"""Runs the lines of batches as requests to the server's own routes, in this process: what a client would be answered
over HTTP, without the layers that guard the door (keys, limits of bodies, origins).
"""

import asyncio
import logging
from collections.abc import Callable, Collection

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Scope

from diptych.base.limited_log import LimitedLog, kind_of
from diptych.control.errors import DiptychError
from diptych.serving.api.error_format import error_body
from diptych.serving.batches.batch_runner import LineReply
from diptych.serving.batches.batch_service import BatchService, LineHost
from diptych.serving.metrics.batch_metrics import batch_families
from diptych.serving.served_fleet import ServedFleet

logger = logging.getLogger(__name__)


class AppLines:
    """The LineExecutor of a served application. entry: its routes with their handlers of errors."""

    def __init__(self, app: FastAPI, entry: ASGIApp) -> None:
        self._log = LimitedLog(logger)
        self._app = app
        self._entry = entry

    async def __call__(self, path: str, body: bytes, tenant: str, key: str) -> LineReply:
        """Run a line as a request to the route. A failure of the route is a reply of status 500."""
        scope = self._scope(path, body, tenant, key)
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        parts: list[bytes] = []
        start: Message = {}

        async def receive() -> Message:
            if request:
                return request.pop()
            await asyncio.Event().wait()  # the client of a line does not go away; its task is cancelled instead
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        try:
            await self._entry(scope, receive, send)
        except Exception as error:  # the line gets a 500, and its batch goes on
            self._log.error(kind_of(error), "a line of a batch failed at %s", path, error=error)
            start = {}  # what was sent of its reply is not the whole of it
        if not start:
            return LineReply(500, error_body(DiptychError("internal error; the server's log has the details")))
        headers = {bytes(name).lower(): bytes(value) for name, value in start.get("headers", ())}
        retry_after = headers.get(b"retry-after", b"0")
        return LineReply(
            start["status"],
            b"".join(parts),
            str(scope["state"].get("reply_id", "")),
            float(retry_after) if retry_after.isdigit() else 0.0,
        )

    def _scope(self, path: str, body: bytes, tenant: str, key: str) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
            "client": None,
            "server": None,
            "extensions": {},
            "state": {"tenant": tenant, "batch_key": key},
            "app": self._app,
        }


def serve_lines(
    app: FastAPI,
    service: BatchService | None,
    llm: ServedFleet,
    models: Callable[[], Collection[str]],
    endpoints: tuple[str, ...],
    *,
    workers_have_best_effort: bool,
) -> None:
    """Run lines by the routes of ``app``. Call it before the layers that guard the door are added: lines pass only
    those that are there by then. Sets ``app.state.batches``, which the server starts and stops.
    workers_have_best_effort: they set lines aside for other requests, so that lines can be sent to them at any time."""
    app.state.batches = service
    if service is None:
        return

    def others() -> int | None:
        if not llm.is_routable or llm.ready is None:
            return None
        return 0 if workers_have_best_effort else llm.fleet.streams.num_besides("batch")

    service.connect(LineHost(AppLines(app, app.build_middleware_stack()), others, models, endpoints))
    runner = service.runner
    assert runner is not None
    llm.metrics.more_families.append(lambda model: batch_families(runner, model))
