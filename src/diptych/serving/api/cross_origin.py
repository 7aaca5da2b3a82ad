"""What pages of other origins may do with this server, whose address the browser of its user can reach.

Any page can make a browser send a simple POST to 127.0.0.1, and a name that resolves to 127.0.0.1 makes a page of that
name count as this server's own (DNS rebinding). Programs send no Origin, and call a local server by an address or as
localhost: for them nothing changes.
"""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.control.errors import PermissionDeniedError
from diptych.serving.api.error_responses import error_response
from diptych.serving.api.http_policy import ANY_ORIGIN, host_name, is_own_name
from diptych.serving.api.other_scopes import HTTP, is_refused

ADMIN_PREFIX = "/admin/"
_RATE_LIMITS = (  # as the replies to a limited key name them, in OpenAI's dialect and in Anthropic's
    *(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
    *(f"anthropic-ratelimit-{of}-{what}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
)
_EXPOSED = ", ".join(("x-request-id", "request-id", "x-ignored-fields", "retry-after", *_RATE_LIMITS))
_KEPT_S = 600  # that a browser remembers the reply to a preflight


class CrossOrigin:
    """Answers the preflights of pages of ``origins``, lets them read replies, and refuses what pages of other origins
    send. hosts: names under which the server may be called, besides addresses and localhost (None: any). Never lets a
    page of another origin read ``/admin/``. Lets nothing through that is not HTTP."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], hosts: Sequence[str] | None) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await is_refused(scope, send):
            return
        if scope["type"] != HTTP:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._hosts is not None and not is_own_name(headers.get("host", ""), self._hosts):
            await error_response(unknown_host(headers.get("host", "")))(scope, receive, send)
            return
        origin = headers.get("origin")
        if origin is None or is_same_origin(headers) or scope["path"].startswith(ADMIN_PREFIX):
            await self._app(scope, receive, send)
            return
        if not self._origins & {origin, ANY_ORIGIN}:
            if scope["method"] in ("GET", "HEAD", "OPTIONS"):  # without our headers no page can read the reply
                await self._app(scope, receive, send)
                return
            message = f"pages of {origin[:200]} may not use this server; allow them with --cors-origin"
            await error_response(PermissionDeniedError(message))(scope, receive, send)
            return
        allowed = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers, allowed)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                exposed = (b"access-control-expose-headers", _EXPOSED.encode())
                message = {**message, "headers": [*message.get("headers", ()), *allowed, exposed]}
            await send(message)

        await self._app(scope, receive, with_headers)


def unknown_host(host: str) -> PermissionDeniedError:
    """The refusal of a request whose Host header is no name of this server."""
    name = host_name(host)[:200]
    message = f"this server was called as {name!r}, which is not one of its names; add it with --allowed-host"
    return PermissionDeniedError(message, code="unknown_host")


def is_same_origin(headers: Headers) -> bool:
    """Whether a request was made by a page of this very server, as the browser says, or as its addresses say (a proxy
    may have changed the one that it was called by)."""
    origin = headers.get("origin", "")
    return headers.get("sec-fetch-site") == "same-origin" or origin.partition("://")[2] == headers.get("host")


def _preflight(headers: Headers, allowed: list[tuple[bytes, bytes]]) -> Response:
    response = Response(status_code=204)
    response.raw_headers += [
        *allowed,
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-allow-headers", headers.get("access-control-request-headers", "*").encode("latin-1")),
        (b"access-control-max-age", str(_KEPT_S).encode()),
    ]
    if headers.get("access-control-request-private-network") == "true":
        response.raw_headers.append((b"access-control-allow-private-network", b"true"))
    return response
