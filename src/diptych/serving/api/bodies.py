"""What routes have in common: the body of a request as a checked model, its OpenAPI, and the owner of its key.

Fields that this server does not know are named in a header of the reply, or refused: a misspelt ``max_tokens`` is
answered with the default, which somebody should notice.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from diptych.control.errors import InvalidRequestError, PermissionDeniedError
from diptych.serving import edge_limits, sliced_json
from diptych.serving.api.error_responses import invalid_body
from diptych.serving.api.parameters import UNSUPPORTED
from diptych.serving.keys.key_record import KeyRecord
from diptych.serving.long_work import LONG, LongWork

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Response]]
REF = "#/components/schemas/{model}"


async def read_body(request: Request, model: type[Model]) -> Model:
    """Raises InvalidRequestError that names the field, or OverloadedError while too many long bodies wait to be read.
    What is ignored of it is noted for the reply's header."""
    body = await read_checked(request, model)
    if "model" in model.model_fields:
        check_key(request, getattr(body, "model", None))
    request.state.ignored_fields = []
    note_ignored(request, ignored_fields(body))
    return body


async def read_checked(request: Request, model: type[Model]) -> Model:
    """The same without a word about what is ignored."""
    data = await request.body()
    return await in_turn(request, lambda: checked(data, model))


async def in_turn(request: Request, work: Callable[[], Result], more: int = 0) -> Result:
    """What ``work`` makes of the body of this request: at once when it is short, else in its tenant's turn and in a
    thread. more: bytes that it reads besides. Raises OverloadedError while too much waits."""
    long_work: LongWork = request.app.state.long_work
    return await long_work.run(work, await num_bytes(request) + more, tenant_in(request))


async def num_bytes(request: Request) -> int:
    """The length of its body."""
    return len(await request.body())


def while_client_waits(handler: Handler) -> Handler:
    """A route that ends when the client of a long body leaves before the reply begins: what waits for its turn is
    dropped, what is under way ends."""

    @wraps(handler)
    async def watched(request: Request) -> Response:
        if await num_bytes(request) < LONG:
            return await handler(request)
        answer = asyncio.ensure_future(handler(request))
        leaving = asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientDisconnect
            return answer.result()
        finally:
            answer.cancel()
            leaving.cancel()
            await asyncio.wait((answer, leaving))

    return watched


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def checked(data: bytes, model: type[Model]) -> Model:
    """The body that these bytes are. Raises InvalidRequestError that names the field. Others get their turn while it
    works: every object has a check in Python (see protocol.Fields)."""
    content = sliced_json.decode(data, edge_limits.BODY_FIELDS)
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise invalid_body(error) from None


def note_ignored(request: Request, names: Sequence[str]) -> None:
    """Name in the reply's header what the answer ignores of the request. Raises InvalidRequestError with --strict."""
    if request.app.state.is_strict:
        refuse_ignored(names)
    request.state.ignored_fields += names


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI of a route that takes such a body."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def key_in(request: Request) -> KeyRecord | None:
    """The entry of the caller's key; None on a server that asks for none. See middleware.ApiKey."""
    found: KeyRecord | None = request.scope.get("state", {}).get("key")
    return found


def check_key(request: Request, model: str | None) -> None:
    """Raise PermissionDeniedError for a model that the caller's key may not use. model: as it was asked for (None: the
    one that is served by default)."""
    key = key_in(request)
    if key is None or key.models is None:
        return
    wanted = request.app.state.default_model() if model is None else model
    if not key.may_use(wanted):
        allowed = ", ".join(map(repr, key.models))
        message = f"model {wanted!r} is not for the key {key.name!r}; it may use {allowed}"
        raise PermissionDeniedError(message, param="model", code="model_not_allowed")


def usable(request: Request, names: Sequence[str]) -> list[str]:
    """The names of models that the caller's key may use."""
    key = key_in(request)
    return [name for name in names if key is None or key.may_use(name)]


def tenant_in(request: Request) -> str:
    """The tenant of the request's API key, as middleware.ApiKey has found it."""
    return str(request.scope.get("state", {}).get("tenant", ""))


# What the bodies of other APIs may say in the words of this server's own chat requests.
OWN_FIELDS = ("service_class", "gives_way_ms", "priority", "deadline_ms", "ttft_slo_ms", "tpot_slo_ms", "cache_salt")
# Known, and without a meaning for the answer.
WITHOUT_EFFECT = frozenset(
    (
        *("user", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "metadata", "client_metadata", "stream_options"),
    )
)


def ignored_fields(body: BaseModel) -> list[str]:
    """The names of fields that change nothing here and might elsewhere, as the client wrote them. A body may have a set
    ``without_effect`` of its own: fields that it reads or refuses elsewhere, or that mean nothing for the answer."""
    known: frozenset[str] = getattr(body, "without_effect", frozenset()) | WITHOUT_EFFECT
    given = body.model_extra or {}
    return [
        name for name, value in given.items() if name not in UNSUPPORTED and name not in known and value is not None
    ]


def refuse_ignored(names: Sequence[str]) -> None:
    """Raise InvalidRequestError for the first of them."""
    if names:
        message = f"{names[0][:64]} is nothing that this server knows; it refuses what it would ignore (--strict)"
        raise InvalidRequestError(message, param=names[0][:64], code="unknown_field")
