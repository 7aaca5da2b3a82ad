"""The access log: a JSON object a line for each request, when its reply has ended.

No prompt and no answer is in it. The fields of requests for answers are those of a trace (``arrival_s``,
``prompt_tokens``, ``output_tokens``), so that these lines can be simulated; ``arrival_s`` counts from 1970, so that
servers may append to the file of another or of an earlier start.
"""

import logging
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.base.limited_log import LimitedLog
from diptych.base.private_files import open_private
from diptych.control.errors import ConfigError, DiptychError
from diptych.serving.answers.answer_stream import Generation
from diptych.serving.keys.key_record import KeyRecord

STANDARD_ERROR = "-"
OWNER_AND_GROUP, GROUP_WRITES = 0o640, 0o660  # of a new log; of one that is there, at most
logger = logging.getLogger(__name__)


def open_log(path: str) -> int:
    """A file descriptor to append lines to; ``-``: standard error. Raises ConfigError."""
    if path == STANDARD_ERROR:
        return os.dup(2)
    try:
        return open_private(Path(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNER_AND_GROUP, GROUP_WRITES)
    except OSError as error:
        raise ConfigError(f"access_log is {path!r}: {error.strerror}", param="access_log") from None


class AccessLog:
    """Writes to ``file``, a descriptor that is open for appending; a line is one write."""

    def __init__(self, app: ASGIApp, file: int) -> None:
        self._app = app
        self._file = file
        self._log = LimitedLog(logger)
        self._epoch_s = time.time() - time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        now, begin = datetime.now(UTC), time.monotonic()
        status = 0  # the client left before there was a reply

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            fields = {"time": now.isoformat(timespec="milliseconds"), "arrival_s": round(self._epoch_s + begin, 6)}
            self._write(fields | entry(scope, status, begin, time.monotonic()))

    def _write(self, fields: dict[str, Any]) -> None:
        try:
            os.write(self._file, msgspec.json.encode(fields) + b"\n")
        except OSError as error:  # a full disk must not end requests
            self._log.error("write", "the access log cannot be written, and lacks requests: %s", error)


def entry(scope: Scope, status: int, begin: float, end: float) -> dict[str, Any]:
    """What a line says of a request. begin, end: seconds of the monotonic clock, which first tokens have, too."""
    state = scope.get("state", {})
    fields: dict[str, Any] = {
        "client": str((scope.get("client") or ("",))[0]),
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "duration_s": round(end - begin, 6),
        "request_id": state.get("request_id", ""),
    }
    if tenant := state.get("tenant"):
        fields["tenant"] = tenant
    key: KeyRecord | None = state.get("key")
    if key is not None and not key.is_option:
        fields["key"] = key.name
    generation: Generation | None = state.get("generation")
    if generation is not None:
        fields |= _answers(generation, begin)
        if status == 200 and isinstance(error := generation.error, DiptychError):
            fields["error"] = error.code or error.type
    return fields


def _answers(generation: Generation, begin: float) -> dict[str, Any]:
    """Log fields of all answers of a request: prompts count once for each answer, as they were computed or found in a
    cache."""
    streams = generation.streams
    first = [stream.first_token_s for stream in streams if stream.first_token_s]
    return {
        "reply_id": generation.request_id,
        "prompt_tokens": sum(stream.num_prompt_tokens for stream in streams),
        "cached_tokens": sum(stream.cached_tokens for stream in streams),
        "output_tokens": sum(stream.num_used_tokens + stream.num_resumed for stream in streams),
        "ttft_s": round(min(first) - begin, 6) if first else None,
        "finish_reasons": [stream.finish_reason or "aborted" for stream in streams],
    }
