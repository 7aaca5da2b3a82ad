"""Fields behind a body (trailers, RFC 9112 section 7.1.2) never count as headers: no proxy in front has seen them."""

from typing import Any

import pytest
import test_connection
from test_connection import CHUNKED, GET, App, replies

NAMES = ("Host", "Authorization", "X-Api-Key", "Origin", "Content-Type", "X-Request-Id", "X-Other")


class Headers(App):
    """Keeps the headers of each request, as they are when its body is read."""

    seen_headers: list[dict[str, str]]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.__dict__.setdefault("seen_headers", []).append(headers)


@pytest.mark.asyncio
@pytest.mark.parametrize("cut", [1, 7, 10_000], ids=["byte by byte", "in pieces", "at once"])
async def test_a_trailer_is_no_header_of_its_request_nor_of_the_next_one(
    cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_connection, "App", Headers)
    trailers = b"".join(f"{name}: forged\r\n".encode() for name in NAMES)
    data = CHUNKED + b"5\r\nabcde\r\n0\r\n" + trailers + b"\r\n" + GET
    client = await replies(*(data[at : at + cut] for at in range(0, len(data), cut)))
    assert client.wire.statuses == [200, 200]
    with_body, without = client.app.seen_headers  # type: ignore[attr-defined]
    assert with_body == {"host": "x", "transfer-encoding": "chunked"}
    assert without == {"host": "x"}
