"""The layers in front of every route, as plain ASGI: the body limit, the API key, and the handling of panics of native
libraries. Replies are not buffered: streams pass through untouched.

Bodies that are being read share one budget of memory, in bytes, for all connections of an app together.
"""

import logging
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.base.byte_size import size_words
from diptych.base.limited_log import LimitedLog, kind_of
from diptych.control.errors import AuthenticationError, BodyTooLargeError, InvalidRequestError, UnavailableError
from diptych.serving import edge_limits
from diptych.serving.answers.native_panic import is_panic
from diptych.serving.api.api_flavour import flavour_of
from diptych.serving.api.direct_body import DIRECT_BODY, DirectBody
from diptych.serving.api.error_format import http_error
from diptych.serving.api.error_responses import error_response
from diptych.serving.api.other_scopes import HTTP, is_refused
from diptych.serving.keys.keyring import Keyring


class BodyBudget:
    """Bounds the bytes of half-read bodies. Beyond ``max_bytes`` the body that has been read longest is refused: who
    never ends a body makes room for those who do."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # never more than max_bytes
        self._readings: dict[HalfReadBody, None] = {}  # those that hold bytes, the oldest first

    def add(self, body: "HalfReadBody", num_bytes: int) -> None:
        """Count bytes that came for ``body``. Raises UnavailableError where it is the one to be refused: when it is the
        oldest, or when the oldest cannot be woken."""
        self._readings.setdefault(body)
        while self.num_bytes + num_bytes > self.max_bytes:
            oldest = next(iter(self._readings))
            if oldest is body or oldest.wake is None:
                self._refuse(body)
                raise self.refusal()
            self._refuse(oldest)
            oldest.wake()
        body.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def release(self, body: "HalfReadBody") -> None:
        """Give back what ``body`` holds; nothing the second time."""
        self._readings.pop(body, None)
        self.num_bytes -= body.num_bytes
        body.num_bytes = 0

    def _refuse(self, body: "HalfReadBody") -> None:
        self.release(body)
        body.is_refused = True

    def refusal(self) -> UnavailableError:
        """What a refused request is answered."""
        message = f"bodies that are being read hold {size_words(self.max_bytes)}, the limit; send it again"
        return UnavailableError(message, retry_after_s=1.0, code="too_many_bodies")


class HalfReadBody:
    """The body of one request while it is read. wake: ends the wait for its next bytes, so that its task sees
    ``is_refused``; None where that cannot be done."""

    __slots__ = ("is_refused", "num_bytes", "wake")

    def __init__(self, wake: Callable[[], None] | None) -> None:
        self.wake = wake
        self.num_bytes = 0
        self.is_refused = False


logger = logging.getLogger(__name__)

OPEN_PATHS = ("/", "/health", "/ready", "/ui", "/ui/", "/docs", "/guide", "/compare", "/compare/")
OPEN_PREFIXES = ("/static/", "/guide/", "/admin/")  # AdminAccess guards the last
CLOSED_PREFIX = "/guide/api/"  # paths that compute something


class BodyLimit:
    """Refuses bodies of more than ``max_bytes``, by their header or while they come, compressed ones, and the oldest
    of those that are half read while all together exceed the budget. larger: the limits of paths that take more: those
    write what they read to disk, and have no part in the budget. on_end: called when a request is over with the bytes
    of its body, or of its reply where those are more."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        larger: Mapping[str, int] = {},
        on_end: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._larger = larger
        self._on_end = on_end
        self.budget = BodyBudget(max(edge_limits.UNREAD_BODIES_BYTES, max_bytes))  # one body always fits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._larger.get(scope["path"], self._max_bytes)
        error = BodyTooLargeError(f"the body is larger than {size_words(max_bytes)}, the limit")
        flavour, headers = flavour_of(scope["path"]), Headers(scope=scope)
        encoding, length = headers.get("content-encoding", "").strip(), headers.get("content-length", "")
        if encoding.lower() not in ("", "identity"):
            message = f"Content-Encoding is {encoding[:40]!r}; bodies are taken as they are (identity)"
            response = error_response(http_error(415, message, "unsupported_encoding"), flavour)
            response.headers["accept-encoding"] = "identity"
            await response(scope, receive, send)
            return
        if length.isdecimal() and int(length) > max_bytes:
            await error_response(error, flavour)(scope, receive, send)
            return
        num_bytes = num_reply_bytes = 0
        body = HalfReadBody(_wake_receive(scope))
        is_kept = scope["path"] not in self._larger

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise error
            if body.is_refused:
                raise self.budget.refusal()
            if not message.get("more_body", False):  # the body is complete, or the client is gone
                self.budget.release(body)
            elif is_kept and message["body"]:
                self.budget.add(body, len(message["body"]))
            return message

        async def counted_reply(message: Message) -> None:
            nonlocal num_reply_bytes
            num_reply_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, counted, counted_reply)
        finally:
            self.budget.release(body)
            self._on_end(max(num_bytes, num_reply_bytes))


def _wake_receive(scope: Scope) -> Callable[[], None] | None:
    body: DirectBody | None = scope.get("extensions", {}).get(DIRECT_BODY, {}).get("body")
    return None if body is None else body.wake_receive


class NativePanics:
    """Refuses a request that a native library panics on (see native_panic.py). Callers that know the field catch the
    panic themselves; this is for the rest, such as a parser."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._log = LimitedLog(logger)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def noted(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except BaseException as error:
            if not is_panic(error) or scope["type"] != "http":
                raise
            self._log.error(kind_of(error), "a native library panicked at %s: %s", scope["path"][:200], error)
            if has_started:
                raise RuntimeError("a native library panicked in the middle of a reply") from error
            refusal = InvalidRequestError(f"a native library failed on this request: {error}", code="native_panic")
            await error_response(refusal, flavour_of(scope["path"]))(scope, receive, send)


class ApiKey:
    """Asks for ``Authorization: Bearer KEY``, or ``x-api-key: KEY``, everywhere but at the paths that load balancers
    ask, and at the files of the pages (the live page asks for the key, and shows nothing of the server without it).

    ``scope["state"]["key"]`` is the entry of the key, and ``["tenant"]`` its tenant: tenants share the workers fairly.
    """

    def __init__(self, app: ASGIApp, keys: Keyring) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await is_refused(scope, send):
            return
        if scope["type"] == HTTP and not _is_open(scope["path"]):
            headers = Headers(scope=scope)
            record = self._keys.find(given_key(headers) or headers.get("x-api-key", "").encode("latin-1", "replace"))
            if record is None or self._keys.is_expired(record):
                message = "the API key is missing or wrong (Authorization: Bearer ...)"
                if record is None:
                    self._keys.usage.num_unknown += 1
                else:
                    self._keys.usage.of(record.name).refused["expired"] += 1
                    message = f"the API key of {record.name!r} has expired"
                await error_response(AuthenticationError(message), flavour_of(scope["path"]))(scope, receive, send)
                return
            state = scope.setdefault("state", {})
            state["key"], state["tenant"] = record, record.tenant
        await self._app(scope, receive, send)


def given_key(headers: Headers) -> bytes:
    """The key of ``Authorization: Bearer KEY``; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or (path.startswith(OPEN_PREFIXES) and not path.startswith(CLOSED_PREFIX))
