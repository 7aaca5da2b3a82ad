"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}} with the right status and headers.

Free of the web framework, which takes longer to import than a socket to listen.
"""

from http import HTTPStatus

import msgspec

from diptych.control.errors import DiptychError, InvalidRequestError, RequestError


def error_body(error: DiptychError) -> bytes:
    """The JSON of one error."""
    detail = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": detail})


def error_headers(error: DiptychError) -> dict[str, str]:
    """Retry-After where the error says when to come back; the way to log in where it asks for that."""
    headers = {}
    if isinstance(error, RequestError) and error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_bytes(error: DiptychError) -> bytes:
    """A whole reply of HTTP/1.1, for a connection that ends behind it."""
    body = error_body(error)
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in (headers | error_headers(error)).items()]
    return "\r\n".join((*lines, "", "")).encode() + body


def http_error(status: int, message: str, code: str) -> InvalidRequestError:
    """What is wrong with a request as HTTP, which has a status of its own for it."""
    error = InvalidRequestError(message, code=code)
    error.status = status
    return error
