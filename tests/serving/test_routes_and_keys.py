"""Every route there is asks for its key, but for those that load balancers and pages need: checked over the routes of
the applications themselves, so that a new one cannot be forgotten."""

import asyncio
from typing import Any

import httpx
import pytest
from app_routes import calls_of, front_app, is_open, server_app
from fastapi import FastAPI

from diptych.serving.api.middleware import ApiKey
from diptych.serving.keys.key_record import tenant_of
from diptych.serving.keys.keyring import Keyring

KEY, SECOND, ADMIN = "a key", "a second key", "an admin key"
WRONG: tuple[dict[str, str], ...] = (
    {},
    {"authorization": "Bearer"},
    {"authorization": KEY},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": "Bearer wrong", "x-api-key": KEY},
    {"x-api-key": f"Bearer {KEY}"},
    {"x-api-key": ""},
    {"cookie": f"key={KEY}"},
)
RIGHT: tuple[tuple[dict[str, str], str], ...] = (
    ({"authorization": f"Bearer {KEY}"}, KEY),
    ({"authorization": f"bearer {KEY}"}, KEY),
    ({"x-api-key": SECOND}, SECOND),
    ({"authorization": f"Bearer {SECOND}", "x-api-key": "wrong"}, SECOND),
)


BUILDERS = pytest.mark.parametrize("build", [server_app, front_app], ids=["serve", "front"])


async def statuses(app: FastAPI, calls: list[tuple[str, str]], headers: dict[str, str], host: str) -> list[int]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(host, 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return [(await client.request(method, path, headers=headers)).status_code for method, path in calls]


@BUILDERS
@pytest.mark.parametrize("headers", WRONG, ids=str)
def test_no_route_answers_without_the_key_but_those_of_load_balancers_and_pages(
    build: Any, headers: dict[str, str]
) -> None:
    app = build(api_keys=(KEY, SECOND), admin_key=ADMIN)
    closed = [(method, path) for method, path in calls_of(app) if not is_open(path)]
    assert len(closed) > 20
    found = asyncio.run(statuses(app, closed, headers, "127.0.0.1"))
    assert [call for call, status in zip(closed, found, strict=True) if status != 401] == []


@BUILDERS
def test_what_is_open_shows_nothing_of_the_server_and_changes_nothing(build: Any) -> None:
    app = build(api_keys=(KEY,), admin_key=ADMIN)
    opened = [(method, path) for method, path in calls_of(app) if is_open(path)]
    assert {method for method, _ in opened} <= {"GET", "HEAD"}
    assert {"/health", "/ready"} <= {path for _, path in opened}
    quick = [call for call in opened if not call[1].startswith(("/guide", "/compare"))]  # they compute what they show
    assert 401 not in asyncio.run(statuses(app, quick, {}, "10.0.0.7"))


@BUILDERS
@pytest.mark.parametrize("key", [KEY, ADMIN], ids=["with the key of clients", "with the key of operators"])
def test_the_keys_of_clients_and_of_operators_do_not_stand_in_for_each_other(build: Any, key: str) -> None:
    app = build(api_keys=(KEY,), admin_key=ADMIN)
    calls = [call for call in calls_of(app) if call[1].startswith("/admin/") == (key == KEY) and not is_open(call[1])]
    found = asyncio.run(statuses(app, calls, {"authorization": f"Bearer {key}"}, "127.0.0.1"))
    assert calls and set(found) == {401}


@BUILDERS
@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["without keys", "with keys"])
def test_without_an_admin_key_operators_are_on_this_machine(build: Any, keys: tuple[str, ...]) -> None:
    app = build(api_keys=keys)
    calls = [call for call in calls_of(app) if call[1].startswith("/admin/")]
    assert len(calls) >= 5
    bearer = {"authorization": f"Bearer {KEY}"}
    forwarded = [{"x-forwarded-for": "127.0.0.1"}, {"forwarded": "for=127.0.0.1"}, {"x-real-ip": "127.0.0.1"}]
    for headers, host in [({}, "10.0.0.7"), ({}, "192.168.127.0"), *((fields, "127.0.0.1") for fields in forwarded)]:
        assert set(asyncio.run(statuses(app, calls, {**bearer, **headers}, host))) == {403}
    foreign = {**bearer, "origin": "https://page.example"}
    assert set(asyncio.run(statuses(app, calls, foreign, "127.0.0.1"))) == {403}
    reads = [call for call in calls if call == ("GET", "/admin/workers")]
    assert reads and not {401, 403}.intersection(asyncio.run(statuses(app, reads, {}, "127.0.0.1")))


@pytest.mark.parametrize(("headers", "key"), RIGHT, ids=str)
def test_whoever_has_a_key_gets_through_as_the_tenant_of_that_key(headers: dict[str, str], key: str) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope.get("state", {}).get("tenant"))

    async def ask() -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        layer = ApiKey(app, Keyring((KEY, SECOND)))
        for path in ("/v1/completions", "/metrics", "/health"):
            await layer({"type": "http", "path": path, "headers": raw}, None, None)  # type: ignore[arg-type]
        await layer({"type": "lifespan"}, None, None)  # type: ignore[arg-type]

    asyncio.run(ask())
    assert seen == [tenant_of(key), tenant_of(key), None, None]
    assert key not in tenant_of(key) and tenant_of(KEY) != tenant_of(SECOND)
