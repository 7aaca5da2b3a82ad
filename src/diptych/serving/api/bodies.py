"""What routes have in common: the body of a request as a checked model, its OpenAPI, and the owner of its key."""

from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from diptych.serving.api.error_responses import invalid_body, read_json
from diptych.serving.api.ignored_fields import ignored_fields, refuse_ignored

Model = TypeVar("Model", bound=BaseModel)
REF = "#/components/schemas/{model}"


async def read_body(request: Request, model: type[Model]) -> Model:
    """Raises InvalidRequestError that names the field. What is ignored of it is noted for the reply's header."""
    content = await read_json(request)
    try:
        body = model.model_validate(content)
    except ValidationError as error:
        raise invalid_body(error) from None
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


def tenant_in(request: Request) -> str:
    """See middleware.ApiKey."""
    return str(request.scope.get("state", {}).get("tenant", ""))
