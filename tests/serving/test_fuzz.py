"""The server fuzzed through its own OpenAPI schema: whatever comes, no 5xx, and every reply is as documented."""

import json
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from servers import RunningServer

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
QUIET = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example)
OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/ready"),
]


def tame(body: Any) -> Any:
    """Let a body reach the engine more often and keep it short: our model, few tokens."""
    if isinstance(body, dict):
        body.pop("model", None)
        body.pop("deadline_ms", None)  # one that is too near is a 503, as it should be
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(name), int) and not isinstance(body[name], bool):
                body[name] = min(body[name], 8)
        if "messages" in body and not isinstance(body.get("max_tokens"), int):
            body["max_tokens"] = 4
    return body


def fuzz(server: RunningServer, method: str, path: str, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=SchemathesisConfig())
    operation = schema[path][method]

    @given(case=operation.as_strategy())
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(QUIET),
        phases=[Phase.generate],
    )
    def run(case: schemathesis.Case) -> None:
        case.body = tame(case.body)
        case.call_and_validate(checks=CHECKS, timeout=60, session=session)

    with requests.Session() as session:
        run()


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_documented_operations_keep_their_word(server: RunningServer, method: str, path: str) -> None:
    fuzz(server, method, path, 100 if method == "POST" else 20)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_documented_operations_keep_their_word_for_long(server: RunningServer, method: str, path: str) -> None:
    fuzz(server, method, path, 1500)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
FIELDS = (
    *("prompt", "stream", "stream_options", "max_tokens", "min_tokens", "n", "temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "prompt_logprobs", "priority", "ttft_slo_ms", "tpot_slo_ms", "cache_salt", "return_latency"),
    *("service_class", "echo", "logprobs", "suffix", "tools", "add_special_tokens"),
)


def try_any_values(server: RunningServer, examples: int) -> None:
    good = {"prompt": "x", "max_tokens": 2}

    @given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate])
    def run(fields: dict[str, Any]) -> None:
        try:
            body = json.dumps(tame({**good, **fields}))
        except ValueError:
            return
        reply = client.post("/v1/completions", content=body)
        assert reply.status_code in (200, 400), (body, reply.text)
        if reply.status_code == 400:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

    with httpx.Client(base_url=server.url, timeout=60) as client:
        run()


def test_any_value_in_any_field_is_served_or_refused(server: RunningServer) -> None:
    try_any_values(server, 150)


@pytest.mark.slow
def test_any_value_in_any_field_is_served_or_refused_for_long(server: RunningServer) -> None:
    try_any_values(server, 1500)
