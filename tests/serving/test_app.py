"""The routes in front of an AsyncLLM without workers: every reply is in the documented format, whatever comes."""

import asyncio
import json
import logging
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import pytest
from fake_llm import FakeLLM
from fastapi import FastAPI
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from diptych.control.errors import DiptychError
from diptych.control.events import RequestAdmitted
from diptych.control.misses.prefix_miss import MissReason
from diptych.serving import edge_limits
from diptych.serving.api.app import build_app
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.keys.key_record import tenant_of
from diptych.serving.link.engine_options import ExplainMisses
from diptych.serving.misses.difference import TextDifference
from diptych.serving.misses.hashed_prompts import HashedPrompt
from diptych.serving.misses.miss_recorder import ExplainedMiss

pytestmark = pytest.mark.asyncio
COMPLETION = {"prompt": [5, 6], "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def panic() -> BaseException:
    """A real one, of the tokenizers library."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    try:
        fast.encode("x" * 40)
    except BaseException as error:
        assert not isinstance(error, Exception)
        return error
    raise AssertionError("it did not panic")


@cache
def usual_app() -> FastAPI:
    """What is asked without options and without an engine to look at, by all tests."""
    return build_app(FakeLLM(), "fake")  # type: ignore[arg-type]


async def call(
    method: str, path: str, body: Any = None, *, llm: FakeLLM | None = None, headers: Any = None, **options: Any
) -> httpx.Response:
    is_usual = llm is None and not options
    app = usual_app() if is_usual else build_app(llm or FakeLLM(), "fake", **options)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, content=content, headers=headers)


def error_of(reply: httpx.Response) -> dict[str, Any]:
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert reply.headers["content-type"] == "application/json"
    return dict(error)


async def test_texts_and_token_ids_are_served() -> None:
    reply = await call("POST", "/v1/completions", {**COMPLETION, "return_token_ids": True, "n": 2})
    assert reply.status_code == 200
    assert [choice["token_ids"] for choice in reply.json()["choices"]] == [[2, 3, 4]] * 2
    llm = FakeLLM()
    reply = await call("POST", "/v1/completions", {**COMPLETION, "prompt": ["a b", "c"], "echo": True}, llm=llm)
    assert reply.json()["choices"][0]["text"].startswith("a b")
    assert llm.submitted[0].prompts == [llm.tokenizer.encode("a b"), llm.tokenizer.encode("c")]
    reply = await call("POST", "/v1/completions", {**COMPLETION, "prompt": [[5, 6], [7]], "echo": True}, llm=llm)
    assert reply.json()["choices"][1]["text"].startswith(llm.tokenizer.decode([7]))


async def test_what_a_request_asks_for_reaches_the_engine() -> None:
    llm = FakeLLM()
    key = {"authorization": "Bearer me"}
    body = {**COMPLETION, "priority": 4, "service_class": "batch", "temperature": 0.5, "logprobs": 2, "echo": True}
    reply = await call("POST", "/v1/completions", body, llm=llm, api_keys=["me"], headers=key)
    assert reply.status_code == 200
    [submitted] = llm.submitted
    assert (submitted.options.priority, submitted.options.service_class) == (4, "batch")
    assert submitted.options.tenant == tenant_of("me")
    assert (submitted.sampling.temperature, submitted.sampling.logprobs, submitted.sampling.prompt_logprobs) == (
        0.5,
        2,
        2,
    )


async def test_too_many_prompts_are_refused_before_any_is_encoded() -> None:
    llm = FakeLLM(refusal=AssertionError("encoded"))
    for prompt in (["x"] * 81, [[1]] * 81):
        reply = await call("POST", "/v1/completions", {"prompt": prompt}, llm=llm)
        assert (reply.status_code, error_of(reply)["param"]) == (400, "prompt")
        assert "81 answers in one request; between 1 and 80" in reply.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/nothing", 404),
        ("GET", "/%00%ff%0d%0a", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/v1/completions", 405),
        ("HEAD", "/v1/completions", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("DELETE", "/metrics", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/static/nothing.css", 404),
        ("GET", f"/static/{'x' * 300}.css", 404),
        ("GET", "/static/%00.css", 404),
        ("GET", "/static/../../setup.py", 404),
        ("GET", "/timeline/records?limit=x", 400),
        ("GET", "/timeline/records?limit=nan", 400),
        ("GET", f"/timeline/records?workers={'9' * 5000}", 400),
        ("GET", "/timeline/records?since=%00", 400),
        ("GET", "/timeline/perfetto?last_s=-1", 400),
    ],
)
async def test_unknown_paths_methods_and_values_are_errors_in_our_format(method: str, path: str, status: int) -> None:
    reply = await call(method, path)
    assert reply.status_code == status
    if method != "HEAD":
        error_of(reply)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"true",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": NaN}',
        b'{"prompt": -Infinity}',
        b'{"prompt": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"\\udc00": 1}',
        b'{"prompt": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"{}{}",
        b"{'prompt': 1}",
        '{"prompt": "x"}'.encode("utf-16"),
        b"\x00",
    ],
)
async def test_what_is_no_json_is_a_400_on_every_path(path: str, body: bytes) -> None:
    reply = await call("POST", path, body)
    assert reply.status_code == 400
    assert error_of(reply)["type"] == "invalid_request_error"


async def test_of_equal_keys_the_last_one_counts() -> None:
    llm = FakeLLM()
    reply = await call("POST", "/v1/completions", b'{"prompt": [1], "prompt": [2, 3], "max_tokens": 1}', llm=llm)
    assert reply.status_code == 200
    assert llm.submitted[0].prompts == [[2, 3]]


async def test_a_deep_value_in_an_ignored_field_is_ignored() -> None:
    most = edge_limits.BODY_DEPTH - 1  # in the body's own object
    for depth, status in ((most, 200), (most + 1, 400)):
        deep = b"[" * depth + b"]" * depth
        reply = await call("POST", "/v1/completions", b'{"prompt": [1], "z": %b}' % deep)
        assert reply.status_code == status
    assert error_of(reply)["code"] == "body_too_deep"


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})])
async def test_a_panic_that_comes_up_to_the_routes_is_a_400(
    path: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        reply = await call("POST", path, body, llm=FakeLLM(refusal=panic()))
    assert reply.status_code == 400
    assert error_of(reply)["code"] == "native_panic"
    assert "retry-limit" in reply.text
    [record] = caplog.records
    assert record.exc_info is None  # a line, no traceback


async def test_a_bug_is_a_500_without_its_details(caplog: pytest.LogCaptureFixture) -> None:
    reply = await call("POST", "/tokenize", {"prompt": "x"}, llm=FakeLLM(refusal=RuntimeError("secret")))
    assert reply.status_code == 500
    assert "secret" not in reply.text
    error_of(reply)
    assert "secret" in caplog.text


async def test_an_interrupt_is_no_error_of_a_request() -> None:
    with pytest.raises(asyncio.CancelledError):
        await call("POST", "/tokenize", {"prompt": "x"}, llm=FakeLLM(refusal=asyncio.CancelledError()))


@pytest.mark.parametrize("keys", [[], ["secret"]])
async def test_a_client_that_leaves_within_its_body_leaves_nothing_in_the_log(
    keys: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    app = build_app(FakeLLM(), "fake", api_keys=keys)  # type: ignore[arg-type]
    messages = [{"type": "http.request", "body": b'{"pro', "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0) if len(messages) > 1 else messages[0]

    async def send(message: Any) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"authorization", b"Bearer secret")],
        "client": ("x", 1),
        "server": ("x", 2),
        "scheme": "http",
        "root_path": "",
        "http_version": "1.1",
    }
    with caplog.at_level(logging.DEBUG):
        await app(scope, receive, send)
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


@pytest.mark.parametrize("length", ["x", "\u00b2", "-1", "1e9", ""])
async def test_a_content_length_that_is_no_number_does_no_harm(length: str) -> None:
    headers = {"content-length": length.encode("latin-1")}
    assert (await call("POST", "/v1/completions", COMPLETION, headers=headers)).status_code == 200


async def test_a_body_over_the_limit_is_refused_by_its_header_and_by_its_size() -> None:
    for body in (b"x" * 101, [b"x" * 50, b"x" * 51]):
        app = build_app(FakeLLM(), "fake", max_body_bytes=100)  # type: ignore[arg-type]

        async def pieces(parts: Any = body) -> Any:
            for part in parts:
                yield part

        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            content = body if isinstance(body, bytes) else pieces()
            reply = await client.post("/v1/completions", content=content)
        assert (reply.status_code, error_of(reply)["code"]) == (413, "body_too_large")


async def test_errors_of_the_engine_keep_their_status() -> None:
    class Teapot(DiptychError):
        status = 418

    reply = await call("POST", "/v1/completions", COMPLETION, llm=FakeLLM(error=Teapot("no coffee")))
    assert (reply.status_code, error_of(reply)["message"]) == (418, "no coffee")


async def test_tokenize_and_detokenize_are_inverse() -> None:
    tokens = (await call("POST", "/tokenize", {"prompt": "def f():"})).json()["tokens"]
    assert (await call("POST", "/detokenize", {"tokens": tokens})).json() == {"prompt": "def f():"}
    assert (await call("POST", "/detokenize", {"tokens": []})).json() == {"prompt": ""}
    wrong = await call("POST", "/detokenize", {"tokens": [1, 4096]})
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, "tokens")


def explaining(explain: ExplainMisses = "on") -> FakeLLM:
    """A server that explains prefix misses, with one explained already."""
    llm = FakeLLM()
    llm.fleet = Fleet(llm.options, FleetOptions(explain_misses=explain))
    watch = llm.fleet.misses
    assert watch is not None
    prompt = HashedPrompt(list(range(100)), 32, None)
    watch.explainer.on_arrived("r", prompt)
    [miss] = watch.explainer.on_events(0, [RequestAdmitted(5, "r", 0, True)], 7)
    watch.recent.append(ExplainedMiss(miss, TextDifference("before", "secret was", "secret now", "an id")))
    llm.metrics.misses = watch.explainer
    return llm


async def test_misses_are_listed_and_their_texts_only_for_the_administrator() -> None:
    reply = await call("GET", "/cache/misses", llm=explaining())
    found = reply.json()
    assert (found["requests"], found["reasons"], found["computed"]) == (1, {"never_seen": 1}, {"new": 100})
    assert found["words"] == ["Of 100 prompt tokens, 0 % were cached and 100 were computed; 100 % of these were new."]
    assert found["recent"][0]["request_id"] == "r"
    assert "secret" not in reply.text
    keys: dict[str, Any] = {"api_keys": ("key",), "admin_key": "admin"}
    path = "/admin/cache/misses"
    assert (await call("GET", path, llm=explaining("text"), **keys)).status_code == 401
    headers = {"authorization": "Bearer admin"}
    reply = await call("GET", path, llm=explaining("text"), headers=headers, **keys)
    assert reply.json()["recent"][0]["text"]["now"] == "secret now"
    assert (await call("GET", "/cache/misses?limit=1000", llm=explaining())).status_code == 400
    metrics = (await call("GET", "/metrics", llm=explaining())).text
    assert 'diptych:prefix_miss_requests_total{model_name="fake",reason="never_seen"} 1.0' in metrics
    assert 'diptych:prefill_tokens_by_cause_total{cause="new",model_name="fake"} 100.0' in metrics


async def test_the_holder_of_one_of_several_keys_sees_the_misses_of_its_own_requests_alone() -> None:
    llm = explaining()
    watch = llm.fleet.misses
    assert watch is not None
    mine, yours = tenant_of("mine"), tenant_of("yours")
    [first] = watch.recent
    of_mine = replace(
        first.miss, tenant=mine, reason=MissReason.DIFFERS, first_token=75, num_seen_tokens=75, block_size=32,
        nearest="theirs", nearest_tenant=yours, evicted_for="theirs",
    )  # fmt: skip
    watch.recent.append(ExplainedMiss(of_mine, None))
    watch.recent.append(ExplainedMiss(replace(first.miss, tenant=yours, request_id="theirs"), None))
    keys: dict[str, Any] = {"api_keys": ("mine", "yours"), "admin_key": "admin"}
    reply = await call("GET", "/cache/misses", llm=llm, headers={"authorization": "Bearer mine"}, **keys)
    found = reply.json()
    assert [(miss["request_id"], miss["first_token"], miss["seen_tokens"]) for miss in found["recent"]] == [
        (of_mine.request_id, 64, 64)
    ]
    assert (found["computed"], found["reasons"], found["places"]) == ({}, {}, [])
    assert "theirs" not in reply.text and yours not in reply.text
    reply = await call("GET", "/admin/cache/misses", llm=llm, headers={"authorization": "Bearer admin"}, **keys)
    assert len(reply.json()["recent"]) == 3 and "theirs" in reply.text


async def test_a_server_that_explains_no_misses_says_how_to_start_it() -> None:
    reply = await call("GET", "/cache/misses")
    assert (reply.status_code, error_of(reply)["message"]) == (
        404, "prefix misses are not explained; start the server with --explain-misses on",
    )  # fmt: skip
    reply = await call("POST", "/v1/completions", {**COMPLETION, "return_prefix_misses": True})
    assert (reply.status_code, error_of(reply)["param"]) == (400, "return_prefix_misses")


async def test_the_usage_of_a_stream_says_why_its_prompt_missed() -> None:
    body = {**COMPLETION, "return_prefix_misses": True, "stream": True}
    text = (await call("POST", "/v1/completions", body, llm=explaining())).text
    usage = json.loads(text.split("data: ")[-2])["usage"]
    assert usage["prompt_tokens_details"]["prefix_misses"] == [None]  # it ended before a worker began with it
