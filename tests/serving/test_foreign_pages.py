"""Which requests of a page reach the server, over all methods: a rule about who asks, not about routes."""

import asyncio
from typing import Any

import pytest

from diptych.serving.api.cross_origin import CrossOrigin

OWN, FRIEND, STRANGER = "http://127.0.0.1:8000", "https://friend.example", "https://stranger.example"
READS = ("GET", "HEAD", "OPTIONS")
METHODS = (*READS, "POST", "PUT", "PATCH", "DELETE", "PURGE", "delete")


def ask(method: str, headers: dict[str, str], *, origins: tuple[str, ...] = (FRIEND,), path: str = "/v1/x") -> Any:
    """Whether the request came through, its status, and the headers of the reply."""
    reached: list[str] = []
    said: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["method"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"secret"})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            said.update(status=message["status"], headers={name.decode(): v.decode() for name, v in message["headers"]})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    fields = {"host": "127.0.0.1:8000", **headers}
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw, "query_string": b""}
    asyncio.run(CrossOrigin(app, origins, None)(scope, receive, send))
    return bool(reached), said["status"], said["headers"]


@pytest.mark.parametrize("method", METHODS)
def test_a_page_of_a_stranger_changes_nothing_and_reads_nothing(method: str) -> None:
    for origin in (STRANGER, "null", f"{FRIEND}.stranger.example", FRIEND.upper(), ""):
        reached, status, headers = ask(method, {"origin": origin})
        assert reached == (method in READS)
        assert status == (200 if reached else 403)
        assert not [name for name in headers if name.startswith("access-control-")]


@pytest.mark.parametrize("method", METHODS)
def test_programs_and_own_pages_may_do_all_and_friends_what_they_may_read(method: str) -> None:
    for fields in ({}, {"origin": OWN}, {"origin": STRANGER, "sec-fetch-site": "same-origin"}):
        reached, status, headers = ask(method, fields)
        assert reached and status == 200
        assert not [name for name in headers if name.startswith("access-control-")]
    for origins in ((FRIEND,), (STRANGER, FRIEND), ("*",)):
        reached, _, headers = ask(method, {"origin": FRIEND}, origins=origins)
        assert reached and headers["access-control-allow-origin"] == FRIEND
        assert headers["vary"] == "origin"


def test_a_preflight_is_answered_for_friends_alone_and_never_for_the_operators_routes() -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    reached, status, headers = ask("OPTIONS", {"origin": FRIEND, **asked})
    assert not reached and status == 204
    assert headers["access-control-allow-headers"] == "authorization"
    assert "POST" in headers["access-control-allow-methods"]
    assert "access-control-allow-private-network" not in headers
    _, _, headers = ask("OPTIONS", {"origin": FRIEND, **asked, "access-control-request-private-network": "true"})
    assert headers["access-control-allow-private-network"] == "true"
    for origin, path in ((STRANGER, "/v1/x"), (FRIEND, "/admin/workers")):
        _, _, headers = ask("OPTIONS", {"origin": origin, **asked}, path=path)
        assert not [name for name in headers if name.startswith("access-control-")]
    _, _, headers = ask("OPTIONS", {"origin": FRIEND})  # no preflight: the route may say what it takes
    assert headers["access-control-allow-origin"] == FRIEND and "access-control-allow-methods" not in headers
