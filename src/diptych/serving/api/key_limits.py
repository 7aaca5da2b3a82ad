"""The layer that holds each name to its limits, and counts what it used: for requests of clients, and lines of batches.

A request is let in before its body is read, and its use is counted when it has ended, whatever ended it. Says in
headers what is left, as OpenAI and Anthropic do.
"""

import math
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.control.admission.quota import Allowance, QuotaRefusal
from diptych.control.errors import OverloadedError, RequestError, UnavailableError
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.serving import edge_limits
from diptych.serving.api.api_flavour import MESSAGES, flavour_of
from diptych.serving.api.error_responses import error_response
from diptych.serving.keys.key_record import KeyRecord
from diptych.serving.keys.keyring import Keyring

UNCOUNTED_PATHS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")  # that compute no tokens
BYTES_PER_TOKEN = 4  # of a body, until its prompts are known
REVOKED_RETRY_S = 30.0
MOST_RETRY_S = 60  # that clients wait for; where it takes longer, they would ask again too soon
_WORDS = {
    "max_requests": "requests at once",
    "max_queued": "requests that wait",
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "tokens_per_day": "tokens per day",
}


class KeyLimits:
    """paths: to which a POST counts. ``scope["state"]`` has ``key`` (see ApiKey), or of a line ``batch_key``, the name
    whose batch it is; gets ``meter``, which a reply tells its generation."""

    def __init__(self, app: ASGIApp, keys: Keyring, paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._paths = frozenset((*paths, *UNCOUNTED_PATHS))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        state, flavour = scope.setdefault("state", {}), flavour_of(scope["path"])
        try:
            record = self._owner(state)
        except RequestError as error:
            await error_response(error, flavour)(scope, receive, send)
            return
        if record is None:
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = self._headers(record, is_anthropic=flavour is MESSAGES)
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        meter = self._keys.admit(record, _expected_tokens(scope), counts_open="batch_key" not in state)
        if isinstance(meter, QuotaRefusal):
            response = error_response(limit_error(record.name, meter), flavour)
            if meter.retry_ns > MOST_RETRY_S * NS_PER_S:
                response.headers["x-should-retry"] = "false"  # the libraries of OpenAI and Anthropic heed it
            await response(scope, receive, with_headers)
            return
        state["meter"] = meter
        try:
            await self._app(scope, receive, with_headers)
        finally:
            meter.end()

    def _owner(self, state: dict[str, Any]) -> KeyRecord | None:
        """The key whose limits a request counts for; None if there is none. Raises UnavailableError for a line whose
        key is revoked: it is tried again, until its batch expires."""
        name = state.get("batch_key")
        if name is None:
            return state.get("key")
        if not name:  # its batch was created without a key that has a name
            return None
        record = self._keys.named(name)
        if record is None or self._keys.is_expired(record):
            self._keys.usage.of(name).refused["revoked"] += 1
            message = f"the key {name!r}, which created this batch, is revoked or has expired"
            raise UnavailableError(message, retry_after_s=REVOKED_RETRY_S, code="key_revoked")
        state["key"] = record
        return record

    def _headers(self, record: KeyRecord, *, is_anthropic: bool) -> list[tuple[bytes, bytes]]:
        quota, now = self._keys.quota(record), self._keys.now_ns()
        found = {"requests": quota.requests(now), "tokens": quota.tokens(now)}
        return [
            header
            for what, allowance in found.items()
            if allowance is not None
            for header in (_anthropic(what, allowance) if is_anthropic else _openai(what, allowance))
        ]


def limit_error(name: str, refusal: QuotaRefusal) -> OverloadedError:
    """The error of a request that a limit refuses, in the words and codes by which clients of OpenAI know it."""
    retry_s = max(1, math.ceil(refusal.retry_ns / NS_PER_S))
    message = (
        f"Rate limit reached for {name}: at most {refusal.limit} {_WORDS[refusal.limit_name]} "
        f"({refusal.limit_name}), {refusal.used} are used. Please try again in {retry_s}s."
    )
    is_quota = refusal.limit_name == "tokens_per_day"
    error = OverloadedError(
        message, retry_after_s=float(retry_s), code="insufficient_quota" if is_quota else "rate_limit_exceeded"
    )
    if is_quota:
        error.type = "insufficient_quota"
    return error


def go_duration(duration_ns: int) -> str:
    """A time as OpenAI's headers write it: ``6m0s``, ``1s``, ``120ms``; rounded up."""
    if duration_ns < NS_PER_S:
        return f"{-(-duration_ns // NS_PER_MS)}ms" if duration_ns else "0s"
    minutes, seconds = divmod(-(-duration_ns // NS_PER_S), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{seconds}s"


def _openai(what: str, allowance: Allowance) -> list[tuple[bytes, bytes]]:
    values = {"limit": allowance.limit, "remaining": allowance.remaining, "reset": go_duration(allowance.reset_ns)}
    return [(f"x-ratelimit-{name}-{what}".encode(), str(value).encode()) for name, value in values.items()]


def _anthropic(what: str, allowance: Allowance) -> list[tuple[bytes, bytes]]:
    reset = datetime.now(UTC) + timedelta(microseconds=-(-allowance.reset_ns // 1000))
    values = {
        "limit": allowance.limit,
        "remaining": allowance.remaining,
        "reset": (reset + timedelta(seconds=1)).replace(microsecond=0).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return [(f"anthropic-ratelimit-{what}-{name}".encode(), str(value).encode()) for name, value in values.items()]


def _expected_tokens(scope: Scope) -> int:
    """Estimate the tokens of a request whose body is not read, until ``KeyMeter.begin``."""
    if scope["path"] in UNCOUNTED_PATHS:
        return 0
    length = Headers(scope=scope).get("content-length", "")
    num_bytes = int(length) if length.isdecimal() and len(length) < 16 else 0
    return num_bytes // BYTES_PER_TOKEN + edge_limits.HELD_TOKENS
