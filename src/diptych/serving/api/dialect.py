"""What differs between the APIs that are spoken here besides the replies: errors, and the end of a stream."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from diptych.control.errors import ContextLengthError, DiptychError
from diptych.serving.api.error_format import error_body

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


@dataclass(frozen=True, slots=True)
class Dialect:
    """error_body: of a reply that failed. error_event: in a stream that failed. done: the end of every stream."""

    error_body: Callable[[DiptychError], bytes]
    error_event: Callable[[DiptychError], bytes]
    done: bytes = b""


def anthropic_error(error: DiptychError) -> bytes:
    """Anthropic's error, with OpenAI's param and code. Clients know a full context by Anthropic's words."""
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    is_known = TOO_LONG in error.message or not isinstance(error, ContextLengthError)
    message = error.message if is_known else f"{TOO_LONG}: {error.message}"
    detail = {"type": kind, "message": message, "param": error.param, "code": error.code}
    return msgspec.json.encode({"type": "error", "error": detail})


def _responses_event(error: DiptychError) -> bytes:
    detail = {"type": "error", "code": error.code or error.type, "message": error.message, "param": error.param}
    return b"event: error\ndata: " + msgspec.json.encode(detail) + b"\n\n"


CHAT = Dialect(error_body, lambda error: b"data: " + error_body(error) + b"\n\n", b"data: [DONE]\n\n")
MESSAGES = Dialect(anthropic_error, lambda error: b"event: error\ndata: " + anthropic_error(error) + b"\n\n")
RESPONSES = Dialect(error_body, _responses_event)


def dialect_of(path: str) -> Dialect:
    """Of a path of the server."""
    if path.startswith("/v1/messages"):
        return MESSAGES
    return RESPONSES if path.startswith("/v1/responses") else CHAT
