"""Headers of every reply: the id of the request, and what was ignored: fields of its body, and keywords of its schemas.

A client may give an id (X-Request-Id: up to 128 letters, digits and ._:-); it comes back, and is in the access log
beside the id that the reply has in its body, in the timeline and in recordings. Without one, the two are the same.
"""

import re
import uuid
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID, IGNORED, NOT_ENFORCED = b"x-request-id", b"x-ignored-fields", b"x-diptych-not-enforced"
ANTHROPIC_ID, ANTHROPIC_PATH = b"request-id", "/v1/messages"  # where Anthropic's clients look for the same
REFUSALS, RETRY_AFTER = (429, 503), b"retry-after"
MAX_IGNORED = 20  # fields or keywords that are named
MAX_PATH = 200  # characters of the path of a keyword
_GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_FIELD = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ReplyHeaders:
    """Adds the headers to each reply; one that refuses for now always says when to come again.

    ``scope["state"]`` has ``request_id`` from the start; a route may set ``reply_id``, ``generation`` and
    ``ignored_fields`` before it replies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["request_id"] = given if _GIVEN_ID.fullmatch(given) else ""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_id = state["request_id"] or state.get("reply_id") or f"req-{uuid.uuid4().hex}"
                state["request_id"] = request_id
                headers = [(REQUEST_ID, request_id.encode())]
                if scope["path"].startswith(ANTHROPIC_PATH):
                    headers.append((ANTHROPIC_ID, request_id.encode()))
                if ignored := state.get("ignored_fields"):
                    headers.append((IGNORED, shown(ignored).encode()))
                generation = state.get("generation")
                if generation is not None and generation.not_enforced:
                    headers.append((NOT_ENFORCED, shown_paths(generation.not_enforced).encode()))
                own = message.get("headers", ())
                if message["status"] in REFUSALS and all(name.lower() != RETRY_AFTER for name, _ in own):
                    headers.append((RETRY_AFTER, b"1"))  # an engine's, or the state of /ready: they name no time
                message = {**message, "headers": [*own, *headers]}
            await send(message)

        await self._app(scope, receive, with_headers)


def shown(fields: Iterable[str]) -> str:
    """Names of fields for a header; what could not stand there is left out."""
    names = [name for name in fields if _FIELD.fullmatch(name)]
    more = [f"and {len(names) - MAX_IGNORED} more"] if len(names) > MAX_IGNORED else []
    return ", ".join(names[:MAX_IGNORED] + more)


def shown_paths(paths: Sequence[str]) -> str:
    """Paths of keywords for a header, percent-encoded where a character could not stand there."""
    names = [quote(path[:MAX_PATH], safe="/$.-_~#[]()*+=") for path in paths[:MAX_IGNORED]]
    more = [f"and {len(paths) - MAX_IGNORED} more"] if len(paths) > MAX_IGNORED else []
    return ", ".join(names + more)
