"""A function that a client describes in its own dialect, as a tool of a chat request."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from diptych.control.errors import InvalidRequestError
from diptych.serving.api.error_responses import invalid_body
from diptych.serving.api.protocol import FunctionBody, ToolBody


def function_tool(function: Mapping[str, Any], place: str) -> ToolBody:
    """A tool of a chat request. Raises InvalidRequestError that names the field below ``place``."""
    try:
        return ToolBody(function=FunctionBody.model_validate(function))
    except ValidationError as error:
        found = invalid_body(error)
        raise InvalidRequestError(f"{place}.{found.message}", param=f"{place}.{found.param}") from None
