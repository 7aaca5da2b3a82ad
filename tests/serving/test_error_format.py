"""An error says what a request was at fault in, and does not send the request back."""

import json
from collections.abc import Callable

import pytest

from diptych.control.errors import DiptychError, InvalidRequestError, NotFoundError
from diptych.serving import edge_limits
from diptych.serving.api.api_flavour import anthropic_error, response_error
from diptych.serving.api.error_format import error_body

MOST = edge_limits.ERROR_CHARACTERS


@pytest.mark.parametrize(
    "said",
    [
        lambda error: json.loads(error_body(error))["error"],
        lambda error: json.loads(anthropic_error(error))["error"],
        response_error,
    ],
)
def test_the_message_of_an_error_is_bounded(said: Callable[[DiptychError], dict[str, str]]) -> None:
    for length in (0, 1, MOST - 1, MOST):
        error = InvalidRequestError("x" * length, param="y" * length)
        assert (said(error)["message"], said(error)["param"]) == ("x" * length, "y" * length)
    for length in (MOST + 1, 10**6):
        name = "a" * (length - 2) + "é"
        found = said(NotFoundError(f"<{name}", param=f"[{name}"))
        for text, first in ((found["message"], "<a"), (found["param"], "[a")):
            assert len(text) == MOST and text.startswith(first) and text.endswith("aé")
            assert f"({length} characters)" in text
