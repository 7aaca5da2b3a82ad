"""What clients take for granted of an HTTP API: HEAD, encodings, names of the model, errors of their dialect."""

import gzip
import json
from typing import Any

import httpx
import pytest
from fake_llm import FakeLLM
from fastapi import FastAPI

from diptych.serving.api.app import build_app
from diptych.serving.api.parameters import check_model

pytestmark = pytest.mark.asyncio
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BODIES: dict[str, Any] = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 3},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
}
PATHS = ("/health", "/ready", "/version", "/v1/models", "/v1/models/fake", "/metrics", "/openapi.json", "/ui", "/docs")


apps: dict[str, FastAPI] = {}  # by their options


async def call(method: str, path: str, content: Any = None, headers: Any = None, **options: Any) -> httpx.Response:
    if repr(options) not in apps:
        apps[repr(options)] = build_app(FakeLLM(), "fake", **options)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(apps[repr(options)], raise_app_exceptions=False)
    body = content if isinstance(content, bytes) or content is None else json.dumps(content).encode()
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, content=body, headers=headers)


@pytest.mark.parametrize("path", [*PATHS, "/v1/models/other", "/nothing", "/static/nothing.css", "/v1/responses/none"])
async def test_head_is_get_without_a_body(path: str) -> None:
    head, get = await call("HEAD", path), await call("GET", path)
    assert head.status_code == get.status_code
    assert head.content == b""
    own = ("x-request-id", "date")
    if path != "/metrics":  # its numbers have other lengths each time
        assert {name: value for name, value in head.headers.items() if name not in own} == {
            name: value for name, value in get.headers.items() if name not in own
        }


async def test_head_of_a_stream_ends_with_its_head() -> None:
    reply = await call("HEAD", "/timeline")
    assert (reply.status_code, reply.content) == (200, b"")
    assert reply.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("path", BODIES)
async def test_head_of_what_only_takes_post_is_refused(path: str) -> None:
    assert (await call("HEAD", path)).status_code == (await call("GET", path)).status_code == 405


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP", "gzip, identity"])
@pytest.mark.parametrize("path", BODIES)
async def test_compressed_bodies_are_refused_by_name(path: str, encoding: str) -> None:
    packed = gzip.compress(json.dumps(BODIES[path]).encode())
    reply = await call("POST", path, packed, {"content-encoding": encoding})
    assert (reply.status_code, reply.headers["accept-encoding"]) == (415, "identity")
    assert encoding in reply.json()["error"]["message"]
    plain = await call("POST", path, BODIES[path], {"content-encoding": "Identity"})
    assert plain.status_code in (200, 400)  # 400: the model has no chat template


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("before", ["", "ä" * 50, '", "b": "'])
async def test_the_byte_that_is_no_utf8_is_named(path: str, before: str) -> None:
    head = ('{"a": "' + before).encode()
    reply = await call("POST", path, head + b'caf\xe9"}')
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert f"byte {len(head) + 3} (0xe9) is not UTF-8" in message


async def test_a_model_has_several_names() -> None:
    names = {"also_served_as": ("small", "org/model", "fake")}
    listed = (await call("GET", "/v1/models", **names)).json()
    assert [card["id"] for card in listed["data"]] == ["fake", "small", "org/model"]
    for name in ("fake", "small", "org/model", None):
        reply = await call("POST", "/v1/completions", {**BODIES["/v1/completions"], "model": name}, **names)
        assert reply.json()["model"] == "fake"  # the first, as with other servers
        for path in ("/v1/responses", "/v1/embeddings"):
            assert (await call("POST", path, {**BODIES[path], "model": name}, **names)).json()["model"] == "fake"
    assert (await call("GET", "/v1/models/org/model", **names)).json()["id"] == "org/model"
    for path, body in BODIES.items():
        if path != "/tokenize":
            refused = await call("POST", path, {**body, "model": "other"}, **names)
            assert refused.status_code == 404, path
    check_model("small", ("fake", "small"))


async def test_anthropic_s_clients_get_their_own_form_of_the_list() -> None:
    headers, names = {"anthropic-version": "2023-06-01"}, {"also_served_as": ("small",)}
    listed = (await call("GET", "/v1/models?limit=1000", None, headers, **names)).json()
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("fake", "small", False)
    assert [(model["type"], model["id"], model["display_name"]) for model in listed["data"]] == [
        ("model", "fake", "fake"),
        ("model", "small", "small"),
    ]
    assert listed["data"][0]["created_at"].endswith("Z")
    assert (await call("GET", "/v1/models/small", None, headers, **names)).json()["type"] == "model"
    assert (await call("GET", "/v1/models")).json()["object"] == "list"


async def test_anthropic_s_clients_list_models() -> None:
    anthropic, httpx2 = pytest.importorskip("anthropic"), pytest.importorskip("httpx2")
    transport = httpx2.ASGITransport(build_app(FakeLLM(), "fake"))  # type: ignore[arg-type]
    async with httpx2.AsyncClient(transport=transport) as http:
        client = anthropic.AsyncAnthropic(base_url="http://test", api_key="x", http_client=http)
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).created_at.year >= 2024


@pytest.mark.parametrize(
    ("method", "headers", "content", "options", "status"),
    [
        ("POST", {}, b"{}", {"api_keys": ["k"]}, 401),
        ("POST", {}, b"x" * 2000, {"max_body_bytes": 1000}, 413),
        ("POST", {"content-encoding": "br"}, b"{}", {}, 415),
        ("POST", {}, b"{", {}, 400),
        ("GET", {}, None, {}, 405),
    ],
)
async def test_every_error_has_the_form_of_its_dialect(
    method: str, headers: Any, content: Any, options: Any, status: int
) -> None:
    for path, kind in (("/v1/messages", "error"), ("/v1/chat/completions", None), ("/v1/responses", None)):
        reply = await call(method, path, content, headers, **options)
        assert reply.status_code == status
        assert reply.json().get("type") == kind
        if kind is not None and status in (405, 415):
            assert reply.json()["error"]["type"] == "invalid_request_error"
        assert reply.json()["error"]["message"]
    assert (await call("POST", "/v1/messages/nothing", b"{}")).json()["error"]["type"] == "not_found_error"
