"""What routes have in common: the body of a request as a checked model, its OpenAPI, and the owner of its key."""

from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from diptych.control.errors import PermissionDeniedError
from diptych.serving.api.error_responses import invalid_body, read_json
from diptych.serving.api.ignored_fields import ignored_fields, refuse_ignored
from diptych.serving.keys.key_record import KeyRecord

Model = TypeVar("Model", bound=BaseModel)
REF = "#/components/schemas/{model}"


async def read_body(request: Request, model: type[Model]) -> Model:
    """Raises InvalidRequestError that names the field. What is ignored of it is noted for the reply's header."""
    content = await read_json(request)
    try:
        body = model.model_validate(content)
    except ValidationError as error:
        raise invalid_body(error) from None
    if "model" in model.model_fields:
        check_key(request, getattr(body, "model", None))
    request.state.ignored_fields = []
    note_ignored(request, ignored_fields(body))
    return body


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
    """Those of the names of models that the caller's key may use."""
    key = key_in(request)
    return [name for name in names if key is None or key.may_use(name)]


def tenant_in(request: Request) -> str:
    """See middleware.ApiKey."""
    return str(request.scope.get("state", {}).get("tenant", ""))
