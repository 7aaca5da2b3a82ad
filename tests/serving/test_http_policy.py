"""Ids, origins, names of hosts, the access log, and fields that the server does not know."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_llm import FakeLLM

from diptych.control.admission.quota import Allowance
from diptych.control.errors import ConfigError, WorkerError
from diptych.serving.api.app import build_app
from diptych.serving.api.http_policy import HttpPolicy, is_loopback
from diptych.serving.api.key_limits import _anthropic, _openai
from diptych.serving.api.parameters import template_arguments
from diptych.serving.api.protocol import ChatBody
from diptych.workload.traces import load_trace

pytestmark = pytest.mark.asyncio
PAGE = "https://page.example"
COMPLETION = {"prompt": [5, 6], "max_tokens": 3}


async def call(
    method: str, path: str, body: Any = None, headers: dict[str, str] | None = None,
    http_policy: HttpPolicy | None = None,
    **options: Any,
) -> httpx.Response:  # fmt: skip
    app = build_app(FakeLLM(), "fake", http_policy=http_policy, **options)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        return await client.request(method, path, json=body, headers=headers)


async def complete(
    headers: dict[str, str] | None = None, http_policy: HttpPolicy | None = None, **fields: Any
) -> httpx.Response:
    return await call("POST", "/v1/completions", {**COMPLETION, **fields}, headers, http_policy)


async def test_every_reply_has_an_id_that_of_its_body_or_of_its_client() -> None:
    for stream in (False, True):
        reply = await complete(stream=stream)
        assert reply.headers["x-request-id"].startswith("cmpl-")
        assert reply.headers["x-request-id"] in reply.text
    assert (await complete({"x-request-id": "mine-1"})).headers["x-request-id"] == "mine-1"
    for odd in ("", "two words", "x" * 129, "line\tbreak"):
        assert (await complete({"x-request-id": odd})).headers["x-request-id"].startswith("cmpl-")
    refused = await complete(temperature=1000)
    assert refused.status_code == 400 and refused.headers["x-request-id"].startswith("req-")
    ids = {(await complete(stream=True)).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


async def test_fields_that_are_ignored_are_named_and_refused_when_asked() -> None:
    reply = await complete(max_token=5, temprature=0.1, user="me", store=False, best_of=1, verbosity="low", odd=None)
    assert reply.status_code == 200
    assert reply.headers["x-ignored-fields"] == "max_token, temprature, verbosity"
    assert "x-ignored-fields" not in (await complete(user="me")).headers
    many = await complete(**{f"field{number}": 1 for number in range(50)}, **{"bad name\r\n": 1})
    assert many.headers["x-ignored-fields"].endswith("field19, and 30 more")
    refused = await complete(http_policy=HttpPolicy(is_strict=True), max_token=5)
    assert (refused.status_code, refused.json()["error"]["param"], refused.json()["error"]["code"]) == (
        400, "max_token", "unknown_field",
    )  # fmt: skip
    assert (await complete(http_policy=HttpPolicy(is_strict=True), user="me", metadata={"a": "b"})).status_code == 200


async def test_pages_of_allowed_origins_may_use_the_api_and_read_replies() -> None:
    http_policy = HttpPolicy(cors_origins=(PAGE,))
    preflight = {
        "origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization",
        "access-control-request-private-network": "true",
    }  # fmt: skip
    reply = await call("OPTIONS", "/v1/completions", None, preflight, http_policy, api_keys=("key",))
    assert reply.status_code == 204
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["access-control-allow-headers"] == "authorization"
    assert reply.headers["access-control-allow-private-network"] == "true"
    for stream in (False, True):
        reply = await complete({"origin": PAGE}, http_policy, stream=stream)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, PAGE)
        exposed = set(reply.headers["access-control-expose-headers"].split(", "))
        allowance = Allowance(2, 1, 10**9)
        limits = [_openai(of, allowance) + _anthropic(of, allowance) for of in ("requests", "tokens")]
        assert {"x-request-id", *(name.decode() for headers in limits for name, _ in headers)} <= exposed
    assert "access-control-allow-origin" not in (await complete(http_policy=http_policy)).headers
    anyone = await complete({"origin": "null"}, HttpPolicy(cors_origins=("*",)))
    assert anyone.headers["access-control-allow-origin"] == "null"
    admin = await call("GET", "/admin/workers", None, {"origin": PAGE}, http_policy)
    assert admin.status_code == 403 and "access-control-allow-origin" not in admin.headers


async def test_pages_of_other_origins_may_send_nothing_and_read_nothing() -> None:
    refused = await complete({"origin": PAGE})
    assert refused.status_code == 403
    assert "--cors-origin" in refused.json()["error"]["message"]
    read = await call("GET", "/v1/models", None, {"origin": PAGE})
    assert read.status_code == 200 and "access-control-allow-origin" not in read.headers
    preflight = {"origin": PAGE, "access-control-request-method": "POST"}
    reply = await call("OPTIONS", "/v1/completions", None, preflight)
    assert "access-control-allow-origin" not in reply.headers
    assert (await complete({"origin": "http://127.0.0.1:8000"})).status_code == 200
    behind_a_proxy = {"origin": "https://own.example", "sec-fetch-site": "same-origin"}
    assert (await complete(behind_a_proxy)).status_code == 200


async def test_a_local_server_answers_only_to_its_own_names() -> None:
    http_policy = HttpPolicy(only_local=True, allowed_hosts=("gpu.lan",))
    for host in (
        "127.0.0.1:8000",
        "localhost",
        "LOCALHOST:1",
        "[::1]:8000",
        "app.localhost",
        "gpu.lan:8000",
        "10.1.2.3",
    ):
        assert (await complete({"host": host}, http_policy)).status_code == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "gpu.lan.evil.example"):
        reply = await complete({"host": host}, http_policy)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "unknown_host"), host
    assert (await complete({"host": "evil.example"})).status_code == 200  # on other addresses any name is right


async def test_the_access_log_has_a_line_for_each_request_and_can_be_simulated(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    http_policy = HttpPolicy(access_log=str(path))
    await complete({"x-request-id": "mine"}, http_policy)
    await complete(None, http_policy, stream=True, n=2)
    await complete(None, http_policy, temperature=1000)
    await call("GET", "/health", http_policy=http_policy)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/v1/completions", 200), ("/v1/completions", 200), ("/v1/completions", 400), ("/health", 200),
    ]  # fmt: skip
    first, second = lines[:2]
    assert first["request_id"] == "mine" and first["reply_id"].startswith("cmpl-")
    assert (first["prompt_tokens"], first["output_tokens"], first["finish_reasons"]) == (2, 3, ["length"])
    assert (second["prompt_tokens"], second["output_tokens"]) == (4, 6)
    assert second["request_id"] == second["reply_id"]
    assert first["duration_s"] > 0 and first["arrival_s"] <= second["arrival_s"] and first["time"].endswith("+00:00")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines if "prompt_tokens" in line))
    assert sorted(load_trace(str(trace)).prompt_tokens) == [2, 4]


async def test_the_access_log_names_what_failed_in_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    for llm, stream in (
        (FakeLLM(error=WorkerError("lost"), fail_after=2), True),
        (FakeLLM(error=WorkerError("lost"), fail_after=2), False),
        (FakeLLM(), True),
    ):
        app = build_app(llm, "fake", http_policy=HttpPolicy(access_log=str(path)))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
            await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["status"], line.get("error")) for line in lines] == [
        (200, "worker_failed"), (500, None), (200, None)
    ]  # fmt: skip


async def test_what_cannot_be_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"cors_origin is 'page\.example'; expected an origin such as"):
        HttpPolicy(cors_origins=("page.example",))
    with pytest.raises(ConfigError, match="access_log is '/nowhere/log': No such file or directory"):
        await complete(http_policy=HttpPolicy(access_log="/nowhere/log"))
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and not is_loopback("0.0.0.0")


async def test_reasoning_effort_goes_to_the_template() -> None:
    def given(**fields: Any) -> dict[str, Any]:
        return template_arguments(ChatBody(messages=[{"role": "user", "content": "hi"}], **fields))  # type: ignore[list-item]

    assert given() == {}
    assert given(reasoning_effort="low") == {"reasoning_effort": "low", "enable_thinking": True}
    assert given(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    own = {"enable_thinking": True}
    assert given(reasoning_effort="none", chat_template_kwargs=own)["enable_thinking"] is True


async def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_know() -> None:
    reply = await complete(max_tokens=100_000)
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 8192 tokens")
