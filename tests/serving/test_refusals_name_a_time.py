"""Whoever is refused for now is told when to come again, whatever refuses: an error of ours, an engine, a state."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from diptych.control import errors
from diptych.serving.api.error_format import error_headers, http_error
from diptych.serving.api.reply_headers import REFUSALS, ReplyHeaders


def kinds(base: type[errors.DiptychError]) -> Iterator[type[errors.DiptychError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


@pytest.mark.parametrize("kind", sorted(set(kinds(errors.DiptychError)), key=lambda kind: kind.__name__))
def test_errors_of_every_kind_that_pass_name_a_time(kind: type[errors.DiptychError]) -> None:
    error = kind.__new__(kind)
    error.message = "x"
    has_time = "retry-after" in error_headers(error)
    assert has_time >= (kind.status in REFUSALS)


@pytest.mark.parametrize("status", REFUSALS)
def test_an_error_of_http_does_too(status: int) -> None:
    assert error_headers(http_error(status, "x", "x"))["retry-after"] == "1"


@pytest.mark.parametrize("status", [200, 400, 404, 429, 500, 502, 503])
@pytest.mark.parametrize("given", [(), ((b"Retry-After", b"7"),)], ids=["without", "with"])
def test_so_does_every_reply(status: int, given: tuple[tuple[bytes, bytes], ...]) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": list(given)})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        await ReplyHeaders(app)({"type": "http", "path": "/health", "headers": []}, None, send)  # type: ignore[arg-type]

    asyncio.run(ask())
    times = [value for name, value in sent[0]["headers"] if name.lower() == b"retry-after"]
    assert times == ([b"7"] if given else [b"1"] if status in REFUSALS else [])
