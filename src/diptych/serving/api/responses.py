"""A generation on its way to one HTTP client, written with raw ASGI sends: one send per engine step.

Owns the connection: it notices when the client goes away and aborts the request before the worker's next step, and
turns failures into the right status (before the first byte) or into an error event (in a stream). Must never format
text: the Writer does.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.control.errors import DiptychError
from diptych.serving.api.errors import error_body, error_response
from diptych.serving.frontend import AsyncLLM
from diptych.serving.sequence import Delta, Generation

logger = logging.getLogger(__name__)

_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}
DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client closed the connection."""


class Writer(Protocol):
    """Formats one kind of reply."""

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """Server-sent events for what is new."""
        ...

    def last_events(self) -> bytes:
        """What comes after the last delta (usage), without the DONE marker."""
        ...

    def body(self, deltas: Iterable[Delta]) -> bytes:
        """The whole reply as JSON, given all deltas in order."""
        ...


class GenerationResponse(Response):
    """Sends a generation as a stream or as one JSON reply."""

    def __init__(self, llm: AsyncLLM, generation: Generation, writer: Writer, *, stream: bool) -> None:
        super().__init__()
        self._llm = llm
        self._generation = generation
        self._writer = writer
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run until the generation ends or the client goes away."""
        watch = asyncio.create_task(self._watch(receive))
        try:
            if self._stream:
                await self._send_stream(scope, receive, send)
            else:
                await self._send_json(scope, receive, send)
        except ClientGoneError:
            pass
        finally:
            watch.cancel()
            self._llm.abort(self._generation)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._llm.abort(self._generation)
        self._generation.fail(ClientGoneError())

    async def _send_json(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas: list[Delta] = []
        try:
            while not self._generation.is_exhausted:
                deltas += await self._generation.read()
            response = Response(self._writer.body(deltas), 200, media_type="application/json")
        except DiptychError as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, writer = self._generation, self._writer
        try:
            deltas = await generation.read()
        except DiptychError as error:
            await error_response(error)(scope, receive, send)
            return
        await send(_STREAM_START)
        try:
            while True:
                await send({"type": "http.response.body", "body": writer.events(deltas), "more_body": True})
                if generation.is_exhausted:
                    break
                deltas = await generation.read()
            tail = writer.last_events()
        except DiptychError as error:
            tail = b"data: " + error_body(error) + b"\n\n"
        except ClientGoneError:
            raise
        except Exception:
            logger.exception("a stream failed")
            tail = b"data: " + error_body(DiptychError("internal error; the server's log has the details")) + b"\n\n"
        await send({"type": "http.response.body", "body": tail + DONE, "more_body": False})
