"""The answers of /v1/models: OpenAI's list, and Anthropic's for its clients, which say so in a header."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers

Card = dict[str, Any]
ANTHROPIC_HEADER = "anthropic-version"


def model_list(cards: Sequence[Card], headers: Headers) -> dict[str, Any]:
    """All models. cards: as OpenAI's list has them."""
    if ANTHROPIC_HEADER not in headers:
        return {"object": "list", "data": cards}
    data = [_info(card) for card in cards]
    first_id, last_id = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": first_id, "last_id": last_id}


def one_model(card: Card, headers: Headers) -> dict[str, Any]:
    """One of them."""
    return _info(card) if ANTHROPIC_HEADER in headers else card


def _info(card: Card) -> dict[str, Any]:
    created = datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    info = {"type": "model", "id": card["id"], "display_name": card["id"], "created_at": created}
    return {**info, "max_input_tokens": card["max_model_len"]}
