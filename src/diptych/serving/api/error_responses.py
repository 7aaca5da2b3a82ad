"""From exceptions to replies: every failure of the application in the format of error_format.py. A fault of the
server must not look like a fault of the client.
"""

import logging
from collections.abc import Iterator

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from diptych.base.limited_log import LimitedLog, kind_of
from diptych.control.errors import DiptychError, InvalidRequestError, NotFoundError, RequestError
from diptych.serving.api.api_flavour import CHAT, ApiFlavour, flavour_of
from diptych.serving.api.error_format import error_headers, http_error
from diptych.serving.freed_memory import forget_frames

logger = logging.getLogger(__name__)


def error_response(error: DiptychError, flavour: ApiFlavour = CHAT) -> Response:
    """A whole reply."""
    return Response(flavour.error_body(flavour.named(error)), error.status, error_headers(error), "application/json")


def invalid_body(error: ValidationError) -> InvalidRequestError:
    """The first error in a body as a message; param names the field."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    field = ".".join(_path(found[0]["loc"]))
    top = field.split(".")[0]
    related = {entry["msg"] for entry in found if entry["loc"] and str(entry["loc"][0]) == top}
    message = found[0]["msg"] if len(related) <= 1 else "; or ".join(sorted(related)[:4])
    if found[0]["type"] == "missing":
        message = "this field is required"
    return InvalidRequestError(f"{field or 'body'}: {message}", param=(top if len(related) > 1 else field) or None)


def _path(location: tuple[int | str, ...]) -> Iterator[str]:
    """The parts of a location that the client wrote: pydantic puts the names of union members in between."""
    for part in location:
        text = str(part)
        if isinstance(part, int) or (text.isidentifier() and text not in ("str", "int", "float", "bool")):
            yield text


def install(app: FastAPI) -> None:
    """Make every failure of the app answer in this format."""
    log = LimitedLog(logger)

    async def on_diptych_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, DiptychError)
        if error.status >= 500 and not isinstance(error, RequestError):
            log.error(kind_of(error), "%s: %s", type(error).__name__, error.message)
        forget_frames(error)
        return error_response(error, flavour_of(request.scope["path"]))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        forget_frames(error)
        flavour = flavour_of(request.scope["path"])
        if error.status_code == 404:
            missing = NotFoundError(f"there is no path {request.scope['path']}", code="unknown_path")
            return error_response(missing, flavour)
        response = error_response(http_error(error.status_code, str(error.detail), "http_error"), flavour)
        response.headers.update(error.headers or {})
        return response

    async def on_disconnect(_: Request, error: Exception) -> Response:
        forget_frames(error)
        return Response(status_code=499)  # the client is gone: the server sends nothing, and there is nothing to log

    async def on_bug(request: Request, error: Exception) -> Response:
        log.error(kind_of(error), "unexpected failure at %s", request.scope["path"][:200], error=error)
        failure = DiptychError("internal error; the server's log has the details")
        return error_response(failure, flavour_of(request.scope["path"]))

    app.add_exception_handler(DiptychError, on_diptych_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_bug)
