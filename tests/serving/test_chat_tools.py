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
        as_mistral: Any = "any"
        same = await client.chat.completions.create(model="fake", messages=ASK, tools=TOOLS, tool_choice=as_mistral)
        assert same.choices[0].message.tool_calls
        assert llm.submitted[0].sampling.grammar == llm.submitted[1].sampling.grammar != ""
        with pytest.raises(openai.BadRequestError, match=r"properties\.city\.pattern: it cannot be") as refused:
            wrong = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^a|b$"}}}
            tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": wrong, "strict": True}}]
            await client.chat.completions.create(model="fake", messages=ASK, tools=tools, tool_choice="required")
    assert refused.value.param == "tools.0.function.parameters.properties.city.pattern"
    [call] = reply.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Bern"}  # type: ignore[union-attr]
    assert "<parameter=city>" in llm.submitted[0].sampling.grammar


async def test_what_is_not_enforced_of_a_schema_is_named_in_a_header(tmp_path: Path) -> None:
    template = (tool_model(tmp_path / "hermes") / "tokenizer_config.json").read_text()
    config = tmp_path / "hermes" / "tokenizer_config.json"
    config.write_text(template.replace('{\\"name\\": ..., \\"arguments\\": ...}', "<function=...>"))
    llm = FakeLLM(answer="Sunny.", tokenizer=Tokenizer(tmp_path / "hermes"))

    async def named(names: list[str]) -> list[str]:
        properties = {name: {"type": "string", "pattern": "^a|b$"} for name in names}
        function = {"name": "weather", "parameters": {"type": "object", "properties": properties}}
        tools: Any = [{"type": "function", "function": function}]
        reply = await client.chat.completions.with_raw_response.create(
            model="fake", messages=ASK, tools=tools, tool_choice="required"
        )
        return reply.headers["x-diptych-not-enforced"].split(", ")

    async with client_of(llm) as client:
        where = "tools.0.function.parameters.properties"
        assert await named(["city"]) == [f"{where}.city.pattern"]
        assert await named(["où, 1"]) == [f"{where}.o%C3%B9%2C%201.pattern"]
        many = await named([f"p{number}" for number in range(30)])
        assert many[-1] == "and 10 more" and len(many) == 21
        plain = await client.chat.completions.with_raw_response.create(model="fake", messages=ASK, tools=TOOLS)
        assert "x-diptych-not-enforced" not in plain.headers


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


async def test_raw_control_characters_in_the_arguments_of_an_answer_are_escapes(tokenizer: Tokenizer) -> None:
    raw = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern\n\tor \\"Basel\\""}}\n</tool_call>'
    async with client_of(FakeLLM(answer=raw, tokenizer=tokenizer)) as client:
        reply = await client.chat.completions.create(model="fake", messages=ASK, tools=TOOLS)
    [call] = reply.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": 'Bern\n\tor "Basel"'}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "arguments", ['{"city": "Ber', "{'city': 'Bern'}", '{"a": 1,}', "[]", '{"a": "C:\\Users"}', "x"]
)
async def test_a_cut_call_in_the_history_is_answered(arguments: str, tokenizer: Tokenizer) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages: Any = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "no JSON"},
    ]
    async with client_of(FakeLLM(answer="Sorry.", tokenizer=tokenizer)) as client:
        reply = await client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
    assert reply.choices[0].message.content == "Sorry."


BEGUN: Any = [*ASK, {"role": "assistant", "content": "It is"}]


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"continue_final_message": True}, "<|im_start|>assistant\nIt is"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<|im_start|>assistant\nIt is"),
        ({"messages": [*ASK, {**BEGUN[-1], "prefix": True}]}, "<|im_start|>assistant\nIt is"),
        ({}, "<|im_start|>assistant\nIt is<|im_end|>\n<|im_start|>assistant\n"),
        ({"continue_final_message": False}, "<|im_start|>assistant\nIt is<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
async def test_the_answer_goes_on_with_the_last_message(fields: dict[str, Any], end: str, tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer=" sunny.", tokenizer=tokenizer)
    body = {"model": "fake", "messages": BEGUN, **fields}
    async with client_of(llm) as client:
        reply: Any = await client.post("/chat/completions", body=body, cast_to=dict)
        counted: Any = await client.post("http://test/tokenize", body=body, cast_to=dict)
    prompt = llm.submitted[0].prompts[0]
    assert tokenizer.decode(prompt, skip_special_tokens=False).endswith(end)
    assert reply["choices"][0]["message"]["content"] == " sunny."
    assert counted["tokens"] == prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [{**BEGUN[-1], "prefix": True}], "add_generation_prompt": True}, "messages.0.prefix"),
        (
            {
                "continue_final_message": True,
                "messages": [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}],
            },
            "continue_final_message",
        ),
        ({"continue_final_message": True, "messages": [{"role": "assistant"}]}, "messages.0"),
    ],
)
async def test_what_cannot_go_on_is_refused(fields: dict[str, Any], param: str, tokenizer: Tokenizer) -> None:
    async with client_of(FakeLLM(tokenizer=tokenizer)) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/chat/completions", body={"messages": BEGUN, **fields}, cast_to=dict)
    assert caught.value.param == param


async def test_tokenize_counts_what_chat_sends(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer="Hi.", tokenizer=tokenizer)
    body = {"messages": ASK, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}}
    async with client_of(llm) as client:
        await client.post("/chat/completions", body=body, cast_to=dict)
        counted: Any = await client.post("http://test/tokenize", body=body, cast_to=dict)
    assert counted["tokens"] == llm.submitted[0].prompts[0]


async def test_the_version_shows_what_the_template_takes(tokenizer: Tokenizer) -> None:
    async with client_of(FakeLLM(tokenizer=tokenizer)) as client:
        known: Any = await client.get("http://test/version", cast_to=dict)
    assert known["chat_template"]["tools"] is True
    assert known["chat_template"]["answers"] == "hermes"


async def test_a_broken_template_is_not_blamed_on_the_messages(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tool_model(tmp_path) / "chat_template.jinja").write_text("{% for %}")
    async with client_of(FakeLLM(answer="x", tokenizer=Tokenizer(tmp_path))) as client:
        with pytest.raises(openai.InternalServerError, match="chat template of this model") as caught:
            await client.chat.completions.create(model="fake", messages=ASK)
        assert (caught.value.status_code, caught.value.param) == (501, None)
        completed = await client.completions.create(model="fake", prompt="a")
    assert completed.choices[0].text == "x"
