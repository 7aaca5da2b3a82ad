"""Tools and reasoning in /v1/chat/completions, as OpenAI's client sees them, with answers that are written for it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_llm import FakeLLM
from tool_model import tool_model

from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.app import build_app

pytestmark = pytest.mark.asyncio
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "now", "parameters": PARAMETERS}}]
ASK: Any = [{"role": "user", "content": "Weather in Bern and Basel?"}]
CALLS = "<think>\nTwo cities.\n</think>\n\nI look." + "".join(
    f'\n<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    for city in ("Bern", "Basel")
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tool_model(tmp_path_factory.mktemp("model") / "tools"))


@asynccontextmanager
async def client_of(llm: FakeLLM) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(build_app(llm, "fake"), raise_app_exceptions=False)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=http)


async def test_calls_reasoning_and_content_are_told_apart(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer=CALLS, tokenizer=tokenizer)
    async with client_of(llm) as client:
        reply = await client.chat.completions.create(model="fake", messages=ASK, tools=TOOLS)
    [choice] = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.reasoning_content) == ("I look.", "Two cities.")  # type: ignore[attr-defined]
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Bern"}, {"city": "Basel"}]  # type: ignore[union-attr]
    assert len({call.id for call in calls}) == 2
    assert '"name": "weather"' in tokenizer.decode(llm.submitted[0].prompts[0])


async def test_a_stream_says_the_same_in_pieces(tokenizer: Tokenizer) -> None:
    async with client_of(FakeLLM(answer=CALLS, tokenizer=tokenizer)) as client:
        stream = await client.chat.completions.create(
            model="fake", messages=ASK, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        texts, calls, reasons, num_argument_events = {"content": "", "reasoning_content": ""}, {}, [], 0
        async for chunk in stream:
            for choice in chunk.choices:
                reasons.append(choice.finish_reason)
                for name in texts:
                    texts[name] += getattr(choice.delta, name, None) or ""
                for call in choice.delta.tool_calls or []:
                    if call.id:
                        calls[call.index] = [call.function.name, ""]
                    calls[call.index][1] += call.function.arguments
                    num_argument_events += 1
    assert texts == {"content": "I look.", "reasoning_content": "Two cities."}
    assert calls == {0: ["weather", '{"city": "Bern"}'], 1: ["weather", '{"city": "Basel"}']}
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}
    assert num_argument_events > 6


async def test_results_of_calls_go_through_the_template(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer="Sunny.", tokenizer=tokenizer)
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "name": None},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
    ]
    async with client_of(llm) as client:
        reply = await client.chat.completions.create(model="fake", messages=messages, tools=TOOLS, tool_choice="none")
    assert reply.choices[0].message.content == "Sunny."
    assert reply.choices[0].finish_reason == "stop"
    prompt = tokenizer.decode(llm.submitted[0].prompts[0], skip_special_tokens=False)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>tool\nsun<|im_end|>" in prompt


async def test_a_single_call_when_parallel_calls_are_not_wanted(tokenizer: Tokenizer) -> None:
    async with client_of(FakeLLM(answer=CALLS, tokenizer=tokenizer)) as client:
        reply = await client.chat.completions.create(model="fake", messages=ASK, tools=TOOLS, parallel_tool_calls=False)
    assert len(reply.choices[0].message.tool_calls or []) == 1


async def test_reasoning_that_the_prompt_begins_is_told_apart(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer="Hm.\n</think>\n\nYes.", tokenizer=tokenizer)
    async with client_of(llm) as client:
        reply = await client.chat.completions.create(
            model="fake", messages=ASK, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
        )
    message: Any = reply.choices[0].message
    assert (message.content, message.reasoning_content, message.tool_calls) == ("Yes.", "Hm.", None)


async def test_null_means_absent(tokenizer: Tokenizer) -> None:
    async with client_of(FakeLLM(answer="Hi.", tokenizer=tokenizer)) as client:
        empty: Any = {"tools": None, "tool_choice": None, "parallel_tool_calls": None, "response_format": None}
        reply = await client.chat.completions.create(model="fake", messages=ASK, extra_body=empty)
    assert reply.choices[0].message.content == "Hi."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools.1.function.name"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": [{"function": {"name": "no spaces"}}]}, "tools.0.function.name"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, tokenizer: Tokenizer) -> None:
    async with client_of(FakeLLM(tokenizer=tokenizer)) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/chat/completions", body={"messages": ASK, **fields}, cast_to=dict)
    assert caught.value.param == param


async def test_a_model_that_writes_calls_in_tags_can_be_made_to_call(tmp_path: Path) -> None:
    template = (tool_model(tmp_path / "hermes") / "tokenizer_config.json").read_text()
    config = tmp_path / "hermes" / "tokenizer_config.json"
    config.write_text(template.replace('{\\"name\\": ..., \\"arguments\\": ...}', "<function=...>"))
    answer = "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"
    llm = FakeLLM(answer=answer, tokenizer=Tokenizer(tmp_path / "hermes"))
    async with client_of(llm) as client:
        reply = await client.chat.completions.create(model="fake", messages=ASK, tools=TOOLS, tool_choice="required")
        with pytest.raises(openai.BadRequestError, match=r"properties\.city: oneOf cannot be enforced") as refused:
            wrong = {"type": "object", "properties": {"city": {"oneOf": [{"type": "string"}]}}}
            tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": wrong}}]
            await client.chat.completions.create(model="fake", messages=ASK, tools=tools, tool_choice="required")
    assert refused.value.param == "tools.0.function.parameters.properties.city"
    [call] = reply.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Bern"}  # type: ignore[union-attr]
    assert "<parameter=city>" in llm.submitted[0].sampling.grammar


async def test_a_prediction_reaches_the_engine_and_may_be_text_or_parts(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer="x = 2", tokenizer=tokenizer)
    async with client_of(llm) as client:
        for content in ("x = 1\ny = 3", [{"type": "text", "text": "x = 1\ny = 3"}]):
            prediction: Any = {"type": "content", "content": content}
            reply = await client.chat.completions.create(model="fake", messages=ASK, prediction=prediction)
            assert reply.choices[0].message.content == "x = 2"
            expected = tokenizer.encode("x = 1\ny = 3", add_special_tokens=False)
            assert list(llm.submitted[-1].sampling.predicted) == expected
        for wrong in ({"type": "image", "content": "x"}, {"type": "content", "content": [{"type": "image_url"}]}):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="fake", messages=ASK, prediction=wrong)  # type: ignore[arg-type]


async def test_documents_go_to_a_template_that_reads_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    documents = {"documents": [{"title": "a", "text": "Bern is a city."}]}
    async with client_of(FakeLLM(answer="Yes.", tokenizer=tokenizer)) as client:
        with pytest.raises(openai.BadRequestError, match="reads none") as refused:
            await client.chat.completions.create(model="fake", messages=ASK, extra_body=documents)
        assert refused.value.param == "documents"
    config = tool_model(tmp_path / "model") / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings["chat_template"] = "{% for d in documents %}{{ d.text }}{% endfor %}" + settings["chat_template"]
    config.write_text(json.dumps(settings))
    llm = FakeLLM(answer="Yes.", tokenizer=Tokenizer(tmp_path / "model"))
    async with client_of(llm) as client:
        await client.chat.completions.create(model="fake", messages=ASK, extra_body=documents)
    assert "Bern is a city." in llm.tokenizer.decode(llm.submitted[0].prompts[0])
