"""Values that nobody expects, in any field of a body and of a message: each is served, or refused by name."""

import asyncio
import json
import random
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_llm import FakeLLM
from fastapi import FastAPI
from pydantic import BaseModel
from tests.laws import law

from diptych.serving.api import protocol
from diptych.serving.api.app import build_app

COMPLETION = {"prompt": [5, 6], "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ODD: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**31, 2**63, 10**400, -0.0, 5e-324, 1e308),
    *("", "x", "\x00", "\ufffe", "9" * 5000, "<|endoftext|>"),
    *([], [None], [[]], ["x", 1], [1, "x"], [True], [{}], [[1], "x"], [-1], [2**40], [[2**40]], [""] * 17),
    *({}, {"": 1}, {"1": "x"}, {"1": 1e6}, {"type": "text"}, {"include_usage": "yes"}, {"self": 1, "messages": 2}),
]
BODIES: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/completions", protocol.CompletionBody, COMPLETION),
    ("/v1/completions", protocol.CompletionBody, {**COMPLETION, "prompt": "x", "stream": True, "echo": True}),
    ("/v1/chat/completions", protocol.ChatBody, CHAT),
    ("/v1/chat/completions", protocol.ChatBody, {**CHAT, "stream": True, "logprobs": True}),
    ("/tokenize", protocol.TokenizeBody, {"prompt": "x"}),
    ("/tokenize", protocol.TokenizeBody, {"messages": [{"role": "user", "content": "x"}]}),
    ("/detokenize", protocol.DetokenizeBody, {"tokens": [1]}),
]
OF_A_SEED = 100  # requests


@cache
def app() -> FastAPI:
    return build_app(FakeLLM(), "fake")  # type: ignore[arg-type]


async def check(calls: Iterable[tuple[str, str, dict[str, Any]]]) -> None:
    """Each call (field, path, body) is answered or refused. A refusal names a field; of a message, within it."""
    transport = httpx.ASGITransport(app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for name, path, body in calls:
            reply = await client.post(path, content=json.dumps(body))
            assert reply.status_code in ((200, 400, 404) if name == "model" else (200, 400)), (name, body)
            if reply.status_code != 200:
                error = reply.json()["error"]
                assert set(error) == {"message", "type", "param", "code"} and error["message"], (name, body)
                assert error["param"] and str(error["param"]).startswith("messages" if name == "messages." else ""), (
                    body
                )


def in_fields() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, model, good in BODIES:
        for name in (*model.model_fields, "suffix", "tools", "response_format", "unheard_of"):
            yield from ((name, path, {**good, name: value}) for value in ODD)


def in_messages() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for value in ODD:
        for message in (
            value,
            {"role": value, "content": "x"},
            {"role": "user", "content": value},
            {"role": "user", "content": [value]},
            {"role": "user", "content": [{"type": value, "text": "x"}]},
            {"role": "user", "content": [{"type": "text", "text": value}]},
            {"role": "user", "content": "x", "name": value, "tool_calls": value},
        ):
            yield "messages.", "/v1/chat/completions", {**CHAT, "messages": [message]}


CALLS = [*in_fields(), *in_messages()]
SPARSE = 5  # each field meets every fifth value, and its neighbour the next ones; all pairs are among the slow tests


def test_odd_values_are_served_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    assert len(CALLS) > 5000 and len(ODD) % SPARSE
    asyncio.run(check(CALLS[::SPARSE]))
    assert not caplog.records


@law(weight=0.5)
def test_any_odd_value_is_served_or_refused(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(check(random.Random(seed).sample(CALLS, OF_A_SEED)))
    assert not caplog.records


@pytest.mark.slow
def test_every_odd_value_is_served_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(check(CALLS))
    assert not caplog.records
