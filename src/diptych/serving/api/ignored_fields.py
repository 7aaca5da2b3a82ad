"""Fields of a body that this server does not know: named in a header of the reply, or refused.

A misspelt ``max_tokens`` is answered with the default and nobody notices; here somebody can.
"""

from pydantic import BaseModel

from diptych.control.errors import InvalidRequestError
from diptych.serving.api.parameters import UNSUPPORTED

# Known, and without a meaning for the answer.
WITHOUT_EFFECT = frozenset(
    (
        *("user", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "metadata", "stream_options"),
    )
)


def ignored_fields(body: BaseModel) -> list[str]:
    """The names of fields that change nothing here and might elsewhere, as the client wrote them."""
    given = body.model_extra or {}
    return [
        name
        for name, value in given.items()
        if name not in UNSUPPORTED and name not in WITHOUT_EFFECT and value is not None
    ]


def refuse_ignored(names: list[str]) -> None:
    """Raise InvalidRequestError for the first of them."""
    if names:
        message = f"{names[0][:64]} is not a field of this server, which refuses unknown fields (--strict)"
        raise InvalidRequestError(message, param=names[0][:64], code="unknown_field")
