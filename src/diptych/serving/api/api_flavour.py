"""Error format and stream terminator of each API: errors, and the end of a stream.

Owns what a client reads when a request fails, before its reply has begun or in its stream, and what it gets while there
is nothing to say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from diptych.control.errors import ContextLengthError, DiptychError, RequestError
from diptych.serving.api.error_format import error_body, param_of, shortened

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

TOO_LONG = "prompt is too long"
COMMENT = b": keep-alive\n\n"  # a server-sent comment, which is no event
PING = b'event: ping\ndata: {"type":"ping"}\n\n'  # Anthropic's


@dataclass(frozen=True, slots=True)
class ApiFlavour:
    """error_body: of a reply that failed. done: the end of every stream. names: how the path of a field begins in chat
    requests, and what clients of this flavour call that."""

    error_body: Callable[[DiptychError], bytes]
    done: bytes = b""
    names: tuple[tuple[str, str], ...] = ()

    def named(self, error: DiptychError) -> DiptychError:
        """The error with the field as the client wrote it."""
        for name, own in self.names:
            if error.param is not None and error.param.startswith(name):
                error.param = own + error.param.removeprefix(name)
                error.message = error.message.replace(name, own)
        return error


def anthropic_error(error: DiptychError) -> bytes:
    """Anthropic's error, with OpenAI's param and code. Clients know a full context by Anthropic's words."""
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    is_known = TOO_LONG in error.message or not isinstance(error, ContextLengthError)
    message = shortened(error.message if is_known else f"{TOO_LONG}: {error.message}")
    detail = {"type": kind, "message": message, "param": param_of(error), "code": error.code}
    return msgspec.json.encode({"type": "error", "error": detail})


def response_error(error: DiptychError) -> dict[str, Any]:
    """The ``error`` of a response that failed, with OpenAI's codes: by them a client decides whether it asks again.
    (Codex asks five times more after each code that it does not know.)"""
    message = shortened(error.message)
    if isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    elif error.status == 429:
        code = "rate_limit_exceeded"
        if isinstance(error, RequestError) and error.retry_after_s:  # there is no header any more
            message = f"{message}. Please try again in {error.retry_after_s:g}s."
    elif error.status < 500 or error.code == "poison_request":
        code = "invalid_prompt"
    else:
        code = "server_error"
    return {"code": code, "message": message, "type": error.type, "param": param_of(error)}


def chat_failure(error: DiptychError) -> bytes:
    """The event with which a stream of chunks fails."""
    return b"data: " + error_body(error) + b"\n\n"


def messages_failure(error: DiptychError) -> bytes:
    """The event with which a stream of Anthropic's events fails."""
    return b"event: error\ndata: " + anthropic_error(error) + b"\n\n"


CHAT = ApiFlavour(error_body, b"data: [DONE]\n\n")
MESSAGES = ApiFlavour(anthropic_error, names=(("response_format.json_schema", "output_config.format"),))
RESPONSES = ApiFlavour(
    error_body, names=(("response_format.json_schema", "text.format"), ("response_format", "text.format"))
)


def flavour_of(path: str) -> ApiFlavour:
    """The API flavour of a path of the server."""
    if path.startswith("/v1/messages"):
        return MESSAGES
    return RESPONSES if path.startswith("/v1/responses") else CHAT
