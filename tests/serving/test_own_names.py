"""Who is answered, whatever else is set: every option beside every other one, for each class of routes, under each
kind of name and for pages of each kind of origin."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fake_llm import FakeLLM

from diptych.cli.http_options import http_policy
from diptych.serving.api.app import build_app
from diptych.serving.api.http_policy import is_loopback, is_own_name

pytestmark = pytest.mark.asyncio
FOREIGN = "https://page.example"
HOSTS = {"127.0.0.1:8000": True, "[::1]:8000": True, "LocalHost": True, "a.localhost:1": True, "10.1.2.3": True} | {
    "gpu.lan:8000": False, "evil.example": False, "127.0.0.1.evil.example:8000": False, "localhost.evil.example": False,
}  # fmt: skip
ROUTES = {  # with what the server is asked for at each
    ("GET", "/admin/workers"): "admin",
    ("POST", "/admin/workers/0"): "admin",
    ("DELETE", "/admin/workers/0"): "admin",
    ("GET", "/%61dmin/workers"): "admin",
    ("GET", "/v1/models"): "api",
    ("POST", "/v1/completions"): "api",
    ("GET", "/ui/state"): "api",
    ("GET", "/health"): "open",
    ("GET", "/ui"): "open",
}


@dataclass(frozen=True)
class Setting:
    """Options of the command line."""

    host: str
    api_key: str | None
    admin_key: str | None
    allowed_host: tuple[str, ...]
    cors_origin: tuple[str, ...]

    def layers(self) -> dict[str, Any]:
        """What an application is built with."""
        given = {
            "host": self.host,
            "api_key": [self.api_key] if self.api_key else None,
            "api_keys": None,
            "cors_origin": self.cors_origin,
            "allowed_host": self.allowed_host,
            "access_log": None,
        }
        keys = (self.api_key,) if self.api_key else ()
        return {"api_keys": keys, "admin_key": self.admin_key, "http_policy": http_policy(given)}

    def answers(self, method: str, kind: str, host: str, origin: str | None, *, has_key: bool) -> bool:
        """Whether such a request should be let in."""
        is_own = HOSTS[host] or host.partition(":")[0] in self.allowed_host
        asks_for_name = bool(self.allowed_host) or (is_loopback(self.host) and not self.api_key)
        asks_for_name |= kind == "admin" and not self.admin_key
        if asks_for_name and not is_own:
            return False
        is_foreign = origin == FOREIGN
        if is_foreign and (kind == "admin" or (method != "GET" and not self.cors_origin)):
            return False
        wanted = {"admin": self.admin_key, "api": self.api_key, "open": None}[kind]
        return has_key or not wanted


def settings() -> Iterator[Setting]:
    """All of them."""
    for values in itertools.product(
        ("127.0.0.1", "0.0.0.0"), (None, "key"), (None, "admin"), ((), ("GPU.lan", "gpu.lan")), ((), ("*",))
    ):
        yield Setting(*values)


def name_of(setting: Setting) -> str:
    given = (setting.host, setting.api_key, setting.admin_key, *setting.allowed_host[:1], *setting.cors_origin)
    return " ".join(value for value in given if value)


CALLS = list(itertools.product(ROUTES, HOSTS, (None, "own", FOREIGN), (False, True)))
SOME = 5  # of the calls every fifth is made, other ones in the next setting; all are made by the slow tests


async def check(setting: Setting, app: Any, first: int = 0, step: int = 1) -> None:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        for (method, path), host, origin, has_key in CALLS[first % step :: step]:
            kind = ROUTES[method, path]
            headers = {"host": host} | ({"origin": f"http://{host}" if origin == "own" else FOREIGN} if origin else {})
            key = setting.admin_key if kind == "admin" else setting.api_key
            if has_key and key:
                headers["authorization"] = f"Bearer {key}"
            body = {"prompt": [5], "max_tokens": 1} if method == "POST" else None
            reply = await client.request(method, path, json=body, headers=headers)
            is_let_in = reply.status_code not in (401, 403)
            wanted = setting.answers(method, kind, host, origin, has_key=has_key)
            assert is_let_in == wanted, (setting, method, path, headers, reply.status_code, reply.text[:200])


@pytest.mark.parametrize("step", [SOME, pytest.param(1, marks=pytest.mark.slow)], ids=["some calls", "all calls"])
@pytest.mark.parametrize(("number", "setting"), list(enumerate(settings())), ids=map(name_of, settings()))
async def test_no_option_switches_off_the_check_of_another(number: int, setting: Setting, step: int) -> None:
    await check(setting, build_app(FakeLLM(), "fake", **setting.layers()), number, step)  # type: ignore[arg-type]


async def test_the_live_page_knows_whether_admin_would_answer_it() -> None:
    for setting in settings():
        layers = setting.layers() | {"api_keys": ()}
        app = build_app(FakeLLM(), "fake", **layers)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            for host in HOSTS:
                headers = {"host": host}
                state = await client.get("/ui/state", headers=headers)
                if state.status_code == 200:
                    answered = (await client.get("/admin/workers", headers=headers)).status_code not in (401, 403)
                    assert (state.json()["admin"] == "open") == answered, (setting, host)


@pytest.mark.parametrize("client", ["10.0.0.5", "::2", "::10", "127evil", "::ffff:10.0.0.5", ""])
async def test_without_a_key_admin_answers_no_other_machine(client: str) -> None:
    app = build_app(FakeLLM(), "fake")  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(client, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
        assert (await http.get("/admin/workers")).status_code == 403


async def test_addresses_of_this_machine_are_known_in_each_of_their_forms() -> None:
    for host in ("127.0.0.1", "127.9.8.7", "localhost", "::1", "[::1]", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "127evil.example", "localhost.evil.example", "::1a", "10.0.0.1", ""):
        assert not is_loopback(host), host
    for host in ("127.0.0.1.", "127.0.0.1.:80", "[::1]:80", "LOCALHOST.:80", "", ":80"):
        assert is_own_name(host, ()), host
    for host in (
        "127.0.0.1@evil.example",
        "evil.example:80:80",
        "localhost:80.evil.example",
        "xlocalhost",
        "[::1].evil.example",
    ):
        assert not is_own_name(host, ()), host
