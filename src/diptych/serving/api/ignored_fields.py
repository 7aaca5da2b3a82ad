"""Fields of a body that this server does not know: named in a header of the reply, or refused.

A misspelt ``max_tokens`` is answered with the default, which is easily overlooked; here a client can notice.
"""

from collections.abc import Sequence

from pydantic import BaseModel

from diptych.control.errors import InvalidRequestError
from diptych.serving.api.parameters import UNSUPPORTED

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
