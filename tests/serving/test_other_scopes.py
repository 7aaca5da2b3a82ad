"""Connections that are not HTTP's reach no route, whichever layers a server has: each that guards refuses them."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fake_llm import FakeLLM
from fastapi import WebSocket

from diptych.cli.guide import _guarded
from diptych.serving.api.admin_routes import AdminAccess
from diptych.serving.api.app import build_app
from diptych.serving.api.cross_origin import CrossOrigin
from diptych.serving.api.middleware import ApiKey
from diptych.serving.keys.keyring import Keyring

LAYERS: dict[str, Callable[[Any], Any]] = {
    "CrossOrigin of a local server": lambda app: CrossOrigin(app, (), ()),
    "CrossOrigin that lets all in": lambda app: CrossOrigin(app, ("*",), None),
    "ApiKey": lambda app: ApiKey(app, Keyring(("a key",))),
    "AdminAccess": lambda app: AdminAccess(app, None),
    "AdminAccess with a key": lambda app: AdminAccess(app, "a key"),
    "the guide": _guarded,
}


def passed_on(layer: Callable[[Any], Any], scope: dict[str, Any]) -> tuple[bool, list[dict[str, Any]]]:
    """Whether a connection came through, and what was sent."""
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def receive() -> Any:
        raise AssertionError("nothing is to be read")

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(layer(app)(scope, receive, send))
    return bool(reached), sent


def websocket(path: str, **headers: str) -> dict[str, Any]:
    given = {"host": "127.0.0.1:8000", **headers}
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    return {"type": "websocket", "path": path, "headers": raw, "query_string": b"", "subprotocols": []}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("path", ["/", "/health", "/v1/x", "/admin/workers", "/static/x"])
def test_a_websocket_is_closed_before_it_is_accepted(name: str, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer a key"}, {"origin": "http://127.0.0.1:8000"}):
        reached, sent = passed_on(LAYERS[name], websocket(path, **headers))
        assert not reached and [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1008)]


@pytest.mark.parametrize("name", LAYERS)
def test_a_kind_that_is_not_known_is_no_reason_to_let_it_through(name: str) -> None:
    with pytest.raises(RuntimeError, match="webtransport"):
        passed_on(LAYERS[name], {"type": "webtransport", "path": "/health", "headers": []})


@pytest.mark.parametrize("name", LAYERS)
def test_the_life_of_the_server_passes(name: str) -> None:
    assert passed_on(LAYERS[name], {"type": "lifespan"}) == (True, [])


@pytest.mark.parametrize("keys", [(), ("a key",)])
def test_a_route_for_websockets_would_not_be_reached(keys: tuple[str, ...]) -> None:
    app = build_app(FakeLLM(), "fake", api_keys=keys)  # type: ignore[arg-type]
    reached = []

    @app.websocket("/socket")
    async def socket(connection: WebSocket) -> None:
        reached.append(connection)
        await connection.accept()

    sent: list[str] = []

    async def ask() -> None:
        async def send(message: Any) -> None:
            sent.append(message["type"])

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        await app(websocket("/socket", authorization="Bearer a key"), receive, send)

    asyncio.run(ask())
    assert sent == ["websocket.close"] and not reached
