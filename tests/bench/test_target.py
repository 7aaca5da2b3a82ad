"""What is found out about a server, and the bodies of requests in its dialect."""

import asyncio
from typing import Any

import msgspec
import pytest

from diptych.bench.objectives import LatencyObjectives
from diptych.bench.target import Target, TargetConfig
from diptych.bench.token_stream import TokenStream
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS
from diptych.workload.spec import RequestSpec

from .loopback import LoopbackClient

SPEC = RequestSpec(arrival_ns=0, prompt_tokens=3, output_tokens=7)


class Replies:
    """Stands for HttpClient: (status, JSON) by path; other paths cannot be reached."""

    def __init__(self, **replies: tuple[int, Any]) -> None:
        self._replies = {"/v1/models": replies.get("models"), "/version": replies.get("version")}

    def head(self, method: str, path: str) -> bytes:
        return b""

    async def fetch(self, method: str, path: str) -> TokenStream:
        stream = TokenStream(0)
        reply = self._replies[path]
        if reply is None:
            stream.finish(1, "cannot connect")
            return stream
        stream.status = reply[0]
        stream.body = bytearray(msgspec.json.encode(reply[1]))
        stream.finish(1)
        return stream


def found(config: TargetConfig | None = None, **replies: tuple[int, Any]) -> Target:
    """The server with these replies."""
    client: Any = Replies(**replies)
    return asyncio.run(Target.find(config or TargetConfig(url="http://server"), client))


def body(target: Target, prompt: Any, spec: RequestSpec = SPEC, slo: LatencyObjectives | None = None) -> Any:
    """The body of a request, decoded."""
    return msgspec.json.decode(target.body(prompt, spec, slo))


def models(*cards: dict[str, Any]) -> tuple[int, Any]:
    """A reply to GET /v1/models."""
    return 200, {"data": list(cards)}


def test_the_first_model_is_taken_and_the_software_is_named() -> None:
    facts = found(models=models({"id": "a", "max_model_len": 99}, {"id": "b"}), version=(200, {"version": "1.2"})).facts
    assert (facts.model, facts.max_model_len, facts.software) == ("a", 99, "1.2")


def test_a_server_that_names_its_instruction_set_and_processor_is_recorded_with_them() -> None:
    reply = (200, {"version": "1.2", "instruction_set": "avx2"})
    assert found(models=models({"id": "a"}), version=reply).facts.software == "1.2, avx2"
    reply[1]["processor"] = "a processor (2 of 2 cores)"
    assert found(models=models({"id": "a"}), version=reply).facts.software == "1.2, avx2, a processor (2 of 2 cores)"


def test_the_context_of_a_llama_cpp_server_is_what_a_request_may_have() -> None:
    card = {"id": "m", "meta": {"n_ctx": 8448, "n_ctx_train": 16384}}
    assert found(models=models(card), version=(404, {})).facts.max_model_len == 8448


@pytest.mark.parametrize("reply", [(200, {"data": None}), (200, []), (404, {})], ids=str)
def test_a_server_that_does_not_say_what_it_serves_needs_a_name(reply: tuple[int, Any]) -> None:
    with pytest.raises(ConfigError, match="--model names it"):
        found(models=reply, version=(404, {}))
    named = TargetConfig(url="http://server", model="m")
    assert found(named, models=reply, version=(404, {})).facts.model == "m"


@pytest.mark.parametrize(
    ("replies", "words"),
    [
        ({}, "cannot connect"),
        (
            {"models": (401, {"error": {"message": "who are you?"}})},
            "the server refuses the key: HTTP 401: who are you",
        ),
        ({"models": models({"id": "a"})}, "model is 'm'; the server has a"),
    ],
    ids=["away", "refused", "other model"],
)
def test_a_server_that_cannot_be_measured_is_an_error_in_words(replies: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        found(TargetConfig(url="http://server", model="m"), **replies)


def test_a_completion_has_its_ids_its_length_and_what_the_user_adds() -> None:
    target = found(TargetConfig(url="http://server", extra={"seed": 5}), models=models({"id": "a"}))
    assert body(target, [1, 2, 3]) == {
        "model": "a", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0,
        "prompt": [1, 2, 3], "max_tokens": 7, "ignore_eos": True, "min_tokens": 7, "seed": 5,
    }  # fmt: skip


def test_only_what_was_asked_for_is_sent() -> None:
    config = TargetConfig(url="http://server", exact_length=False, running_usage=True, send_slo=True)
    target = found(config, models=models({"id": "a"}))
    sent = body(target, [1], slo=LatencyObjectives(ttft_ns=5 * NS_PER_MS, itl_ns=1))
    assert "ignore_eos" not in sent and "min_tokens" not in sent and "tpot_slo_ms" not in sent
    assert sent["ttft_slo_ms"] == 5.0 and sent["stream_options"]["continuous_usage_stats"] is True


def test_a_chat_has_roles_in_turn_and_its_limit_by_both_names() -> None:
    client: Any = LoopbackClient()
    config = TargetConfig(url="http://server", api="chat", prompts="text")
    sent = body(asyncio.run(Target.find(config, client)), ("a", "b", "c"))
    assert [(message["role"], message["content"]) for message in sent["messages"]] == [
        ("user", "a"), ("assistant", "b"), ("user", "c")
    ]  # fmt: skip
    assert sent["max_tokens"] == sent["max_completion_tokens"] == 7


def test_the_tokens_of_words_and_of_a_chat_template_are_measured() -> None:
    """The make-believe server counts a token per word and three for each message."""

    async def run() -> Target:
        client: Any = LoopbackClient()
        target = await Target.find(TargetConfig(url="http://server", api="chat", prompts="text"), client)
        return await target.with_conversations()

    facts = asyncio.run(run()).facts
    assert (facts.tokens_per_word, facts.overhead_tokens) == (pytest.approx(1.0), pytest.approx(3.0))
    assert facts.turn_tokens == pytest.approx(6.0)


@pytest.mark.parametrize("returns", [True, False])
def test_whether_a_server_returns_token_ids_is_found_out(returns: bool) -> None:
    async def run() -> Target:
        client: Any = LoopbackClient()
        extra = {} if returns else {"fake": {"ids": False}}
        target = await Target.find(TargetConfig(url="http://server", extra=extra), client)
        return await target.with_conversations()

    target = asyncio.run(run())
    assert target.facts.returns_token_ids is returns
    assert body(target, [1]).get("return_token_ids", False) is returns


def test_an_answer_that_does_not_come_is_an_error_in_words() -> None:
    async def run() -> None:
        client: Any = LoopbackClient()
        config = TargetConfig(url="http://server", timeout_s=0.05, extra={"fake": {"ttft_ms": 60_000}})
        target = await Target.find(config, client)
        await target.ask([1, 2, 3], 1)

    with pytest.raises(ConfigError, match=r"the server gave no answer in 0\.05 s"):
        asyncio.run(run())
