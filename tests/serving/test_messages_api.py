"""/v1/messages as Anthropic's client sees it, with answers that are written for it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_llm import FakeLLM
from tool_model import tool_model

from diptych.control.errors import ContextLengthError, OverloadedError
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.app import build_app
from diptych.serving.api.context_edits import CLEAR_TOOL_USES

anthropic = pytest.importorskip("anthropic")
httpx = pytest.importorskip("httpx2")
pytestmark = pytest.mark.asyncio
TOOL: Any = {
    "name": "weather",
    "description": "now",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASK: Any = [{"role": "user", "content": "Weather in Bern?"}]
CALL = (
    '<think>\nBern.\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tool_model(tmp_path_factory.mktemp("model") / "tools"))


@asynccontextmanager
async def client_of(llm: FakeLLM, key: str = "none", **options: Any) -> AsyncIterator[Any]:
    transport = httpx.ASGITransport(build_app(llm, "fake", **options), raise_app_exceptions=False)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport) as http:
        yield anthropic.AsyncAnthropic(base_url="http://test", api_key=key, max_retries=0, http_client=http)


async def test_a_message_has_blocks_for_reasoning_text_and_calls(tokenizer: Tokenizer) -> None:
    async with client_of(FakeLLM(answer=CALL, tokenizer=tokenizer)) as client:
        reply = await client.messages.create(model="fake", max_tokens=200, messages=ASK, tools=[TOOL])
    thought, text, call = reply.content
    assert (thought.thinking, text.text, call.name, call.input) == ("Bern.", "I look.", "weather", {"city": "Bern"})
    assert reply.stop_reason == "tool_use"
    assert reply.usage.output_tokens == len(tokenizer.encode(CALL, add_special_tokens=False))
    assert (reply.usage.cache_read_input_tokens, reply.usage.cache_creation_input_tokens) == (1, 0)  # as FakeLLM says


async def test_a_stream_builds_the_same_message(tokenizer: Tokenizer) -> None:
    async with client_of(FakeLLM(answer=CALL, tokenizer=tokenizer)) as client:
        async with client.messages.stream(model="fake", max_tokens=200, messages=ASK, tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
        reply = await stream.get_final_message()
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
    assert (reply.content[0].thinking, reply.content[1].text) == ("Bern.", "I look.")
    assert reply.content[2].input == {"city": "Bern"}
    assert reply.stop_reason == "tool_use"
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_a_conversation_with_results_becomes_a_prompt(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer="Sunny.", tokenizer=tokenizer)
    cached = {"cache_control": {"type": "ephemeral"}}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", **cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1f3a;\n"},
        {"type": "text", "text": "Be brief."},
    ]
    async with client_of(llm) as client:
        reply = await client.messages.create(
            model="fake", max_tokens=9, messages=messages, system=system, tools=[TOOL], stop_sequences=["nny"]
        )
        count = await client.messages.count_tokens(model="fake", messages=messages, system=system, tools=[TOOL])
    assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == ("stop_sequence", "nny", "Su")
    [prompt] = llm.submitted[0].prompts
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    assert "cch=" not in text
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text
    assert (
        '{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>\n<|im_start|>tool\nsun<|im_end|>'
        in text
    )
    assert count.input_tokens == len(prompt)


async def test_more_tokens_than_fit_mean_as_many_as_fit() -> None:
    llm = FakeLLM(answer="x")
    async with client_of(llm) as client:
        await client.messages.create(model="fake", max_tokens=20_000, messages=ASK)
    assert llm.submitted[0].sampling.max_tokens < 8192


async def test_a_choice_of_tools_is_a_grammar(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer="x", tokenizer=tokenizer)
    async with client_of(llm) as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            await client.messages.create(model="fake", max_tokens=9, messages=ASK, tools=[TOOL], tool_choice=choice)
        wanted = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        await client.messages.create(model="fake", max_tokens=9, messages=ASK, extra_body={"output_config": wanted})
    assert ["<tool_call>" in grammar.text for grammar in llm.grammars] == [True, True, False]


DEEP: dict[str, Any] = {}  # a schema that is nested more deeply than any may be
for _ in range(200):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": [{"type": "hologram"}]}]}, "messages.0.content.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]},
            "messages.0.con",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0.name"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"output_config": {"format": {"type": "json_schema", "schema": DEEP}}}, "output_config.format.schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web"}], "tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {
                "tools": [TOOL, {"type": "bash_20250124", "name": "bash"}],
                "tool_choice": {"type": "tool", "name": "bash"},
            },
            "tool_choice",
        ),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"context_management": {"edits": [{}]}}, "context_management.edits.0.type"),
        ({"context_management": {"edits": [{"type": CLEAR_TOOL_USES, "keep": 3}]}}, "context_management.edits.0.keep"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"max_tokens": None}, "max_tokens"),
        ({"system": [1]}, "system"),
        ({"tools": [{"name": "no spaces", "input_schema": {}}]}, "tools.0.name"),
    ],
)
async def test_what_cannot_be_served_is_named(fields: dict[str, Any], param: str) -> None:
    async with client_of(FakeLLM()) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.post("/v1/messages", body={"max_tokens": 5, "messages": ASK, **fields}, cast_to=object)
    error = caught.value.body["error"]
    assert (caught.value.body["type"], error["type"]) == ("error", "invalid_request_error")
    assert error["param"].startswith(param)


async def test_keys_and_errors_are_those_of_the_dialect() -> None:
    async with client_of(FakeLLM(answer="x"), key="right", api_keys=["right"]) as client:
        assert (await client.messages.create(model="fake", max_tokens=5, messages=ASK)).content[0].text == "x"
    async with client_of(FakeLLM(), key="wrong", api_keys=["right"]) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="fake", max_tokens=5, messages=ASK)
    async with client_of(FakeLLM(error=OverloadedError("full"))) as client:
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(model="fake", max_tokens=5, messages=ASK)
    assert json.loads(caught.value.response.content)["error"]["type"] == "rate_limit_error"
    async with client_of(FakeLLM(error=OverloadedError("full"), fail_after=2)) as client:
        with pytest.raises(anthropic.APIStatusError):
            async with client.messages.stream(model="fake", max_tokens=5, messages=ASK) as stream:
                async for _ in stream:
                    pass


async def test_what_fails_outside_of_a_route_has_the_form_of_the_dialect_too() -> None:
    transport = httpx.ASGITransport(build_app(FakeLLM(), "fake"), raise_app_exceptions=False)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        replies = [
            await http.get("/v1/messages"),
            await http.post("/v1/messages/nothing"),
            await http.post("/v1/messages", json={"max_tokens": 5, "messages": ASK, "model": "nothing"}),
        ]
    assert [reply.status_code for reply in replies] == [405, 404, 404]
    assert {reply.json()["type"] for reply in replies} == {"error"}


async def test_the_id_of_a_request_and_a_prompt_that_is_too_long_are_named_as_anthropic_names_them() -> None:
    async with client_of(FakeLLM(answer="x")) as client:
        reply = await client.messages.create(model="fake", max_tokens=5, messages=ASK)
        assert reply._request_id == reply.id
        given = {"x-request-id": "mine"}
        named = await client.messages.create(model="fake", max_tokens=5, messages=ASK, extra_headers=given)
        assert named._request_id == "mine"
    async with client_of(FakeLLM(error=ContextLengthError("it has 9 tokens of 8", param="messages"))) as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: it has 9 tokens of 8") as caught:
            await client.messages.create(model="fake", max_tokens=5, messages=ASK)
        assert caught.value.request_id


async def test_the_last_message_of_the_assistant_goes_on(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer=" sunny.", tokenizer=tokenizer)
    begun: Any = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    async with client_of(llm) as client:
        reply = await client.messages.create(model="fake", max_tokens=20, messages=begun)
        counted = await client.messages.count_tokens(model="fake", messages=begun)
    prompt = llm.submitted[0].prompts[0]
    assert tokenizer.decode(prompt, skip_special_tokens=False).endswith("<|im_start|>assistant\nIt is")
    assert reply.content[0].text == " sunny."
    assert counted.input_tokens == len(prompt)
