"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}} with the right status and headers.

Imports no web framework: that would take longer than opening the socket.
"""

from http import HTTPStatus

import msgspec

from diptych.control.errors import DiptychError, InvalidRequestError, RequestError
from diptych.serving import edge_limits


def error_body(error: DiptychError) -> bytes:
    """The JSON of one error."""
    detail = {"message": shortened(error.message), "type": error.type, "param": param_of(error), "code": error.code}
    return msgspec.json.encode({"error": detail})


def shortened(message: str) -> str:
    """A message of at most ERROR_CHARACTERS: what a client sent, a name of a model or a field, may stand in it, and
    may have megabytes."""
    most = edge_limits.ERROR_CHARACTERS
    if len(message) <= most:
        return message
    note = f" ... ({len(message)} characters) ... "
    kept = most - len(note)
    return message[: kept - kept // 2] + note + message[len(message) - kept // 2 :]


def param_of(error: DiptychError) -> str | None:
    """The field that an error names, which the client named."""
    return None if error.param is None else shortened(error.param)


def error_headers(error: DiptychError) -> dict[str, str]:
    """Retry-After where the error says when to come back, or is one that passes (429, 503: a second); how to
    authenticate where the key is missing."""
    headers = {}
    if isinstance(error, RequestError) and error.retry_after:
        headers["retry-after"] = error.retry_after
    elif isinstance(error, RequestError) and error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    elif error.status in (429, 503):
        headers["retry-after"] = "1"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_bytes(error: DiptychError) -> bytes:
    """A whole HTTP/1.1 reply, for a connection that is closed after it."""
    body = error_body(error)
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in (headers | error_headers(error)).items()]
    return "\r\n".join((*lines, "", "")).encode() + body


def http_error(status: int, message: str, code: str) -> InvalidRequestError:
    """An error in the HTTP of a request, with the status that HTTP has for it."""
    error = InvalidRequestError(message, code=code)
    error.status = status
    return error
