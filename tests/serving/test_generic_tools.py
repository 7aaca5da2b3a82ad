"""Tools for a model whose chat template takes none, and the formats that can be chosen."""

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

from diptych.control.errors import ConfigError
from diptych.serving.answers.generic_tools import with_generic_tools
from diptych.serving.answers.response.answer_format import AnswerFormat, tool_formats
from diptych.serving.answers.response.answer_format import answer_format as format_of
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.app import build_app
from diptych.serving.link.engine_options import BUNDLED_MODEL

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": PARAMETERS}}
OTHER: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
ASK: Any = [{"role": "user", "content": "Weather in Bern?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('roles must alternate, without system') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def model_with(template: str, directory: Path) -> Path:
    """The bundled model with this chat template."""
    config = tool_model(directory) / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    return directory


@asynccontextmanager
async def client_of(llm: FakeLLM) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(build_app(llm, "fake"), raise_app_exceptions=False)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=http)


def prompt_of(llm: FakeLLM) -> str:
    return llm.tokenizer.decode(llm.submitted[-1].prompts[0], skip_special_tokens=False)


@pytest.mark.asyncio
@pytest.mark.parametrize("template", [PLAIN, ALTERNATING])
async def test_a_tool_loop_with_a_template_that_takes_no_tools(template: str, tmp_path: Path) -> None:
    llm = FakeLLM(answer=CALL, tokenizer=Tokenizer(model_with(template, tmp_path / "model")))
    async with client_of(llm) as client:
        reply = await client.chat.completions.create(model="fake", messages=ASK, tools=[TOOL])
        [call] = reply.choices[0].message.tool_calls or []
        assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("tool_calls", None)
        assert json.loads(call.function.arguments) == {"city": "Bern"}  # type: ignore[union-attr]
        assert '"name": "weather"' in prompt_of(llm) and "Weather in Bern?" in prompt_of(llm)
        turn: Any = reply.choices[0].message.model_dump(exclude_none=True)
        results: Any = [turn, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
        await client.chat.completions.create(model="fake", messages=[*ASK, *results], tools=[TOOL])
        prompt = prompt_of(llm)
        assert f"<assistant>{CALL}<user><tool_response>\nweather: sun\n</tool_response>" in prompt
        more: Any = [*ASK, *results, {"role": "user", "content": "And Basel?"}]
        await client.chat.completions.create(model="fake", messages=more)  # without tools, the history stays text
        assert "sun\n</tool_response>\n\nAnd Basel?" in prompt_of(llm)


@pytest.mark.asyncio
async def test_calls_are_enforced_by_a_grammar_and_never_invented(tmp_path: Path) -> None:
    llm = FakeLLM(answer="Sunny.", tokenizer=Tokenizer(model_with(PLAIN, tmp_path / "model")))
    named: Any = {"type": "function", "function": {"name": "weather"}}
    strict: Any = [{**TOOL, "function": {**TOOL["function"], "strict": True}}]
    async with client_of(llm) as client:
        for fields in ({"tool_choice": "required"}, {"tool_choice": named}, {"tools": strict}):
            given: Any = {"tools": [TOOL], **fields}
            await client.chat.completions.create(model="fake", messages=ASK, **given)
            assert "<tool_call>" in llm.submitted[-1].sampling.grammar
        reply = await client.chat.completions.create(model="fake", messages=ASK, tools=[TOOL])
        assert llm.submitted[-1].sampling.grammar == ""
        assert (reply.choices[0].message.content, reply.choices[0].message.tool_calls) == ("Sunny.", None)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "weather", "arguments": {"city": "Bern"}}',
        f"Write {CALL}.",
        CALL.replace("weather", "erase"),
        CALL.replace("</tool_call>", ""),
        '<tool_call>\n{"name": "weather"}\n</tool_call>',
        f"```\n{CALL}\n```\n",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}} please\n</tool_call>',
        '[TOOL_CALLS][{"name": "weather", "arguments": {}}]',
    ],
)
async def test_what_is_not_exactly_a_call_is_content(answer: str, tmp_path: Path) -> None:
    llm = FakeLLM(answer=answer, tokenizer=Tokenizer(model_with(PLAIN, tmp_path / "model")))
    async with client_of(llm) as client:
        reply = await client.chat.completions.create(model="fake", messages=ASK, tools=[TOOL])
    assert (reply.choices[0].message.content, reply.choices[0].message.tool_calls) == (answer, None)


@pytest.mark.asyncio
async def test_the_format_none_refuses_tools_by_name(tmp_path: Path) -> None:
    llm = FakeLLM(answer="x", tokenizer=Tokenizer(tool_model(tmp_path / "model"), tool_format="none"))
    async with client_of(llm) as client:
        with pytest.raises(openai.BadRequestError, match="--tool-format none") as caught:
            await client.chat.completions.create(model="fake", messages=ASK, tools=[TOOL])
        reply = await client.chat.completions.create(model="fake", messages=ASK, tools=[TOOL], tool_choice="none")
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported")
    assert reply.choices[0].message.content == "x"


@pytest.mark.asyncio
async def test_only_allowed_tools_are_called(tmp_path: Path) -> None:
    llm = FakeLLM(answer=CALL, tokenizer=Tokenizer(tool_model(tmp_path / "model")))
    named = {"type": "function", "function": {"name": "now"}}
    flat = {"type": "function", "name": "weather"}
    async with client_of(llm) as client:
        for allowed, num_calls in (
            ({"allowed_tools": {"mode": "auto", "tools": [named]}}, 0),
            ({"mode": "auto", "tools": [flat]}, 1),
            ({"mode": "required", "tools": [flat]}, 1),
        ):
            choice: Any = {"type": "allowed_tools", **allowed}
            reply = await client.chat.completions.create(
                model="fake", messages=ASK, tools=[TOOL, OTHER], tool_choice=choice
            )
            assert len(reply.choices[0].message.tool_calls or []) == num_calls
            assert '"now"' in prompt_of(llm)  # all of them are described
        grammar = llm.submitted[-1].sampling.grammar
        assert "weather" in grammar and "now" not in grammar
        for wrong in ({}, {"mode": "sometimes", "tools": [flat]}, {"mode": "auto", "tools": []},
                      {"mode": "auto", "tools": [{"type": "function", "name": "other"}]}):  # fmt: skip
            with pytest.raises(openai.BadRequestError) as caught:
                choice = {"type": "allowed_tools", "allowed_tools": wrong}
                await client.chat.completions.create(model="fake", messages=ASK, tools=[TOOL], tool_choice=choice)
            assert caught.value.param == "tool_choice"
        for needs in ("required", {"type": "allowed_tools", "mode": "required", "tools": [flat]}, named):
            given: Any = {"tools": [], "tool_choice": needs}
            with pytest.raises(openai.BadRequestError, match="the request has none"):
                await client.chat.completions.create(model="fake", messages=ASK, **given)


def test_a_format_is_chosen_by_the_template_or_by_name() -> None:
    def answer_format(templates: dict[str, str], tool_format: str = "auto") -> AnswerFormat:
        takes_tools = any("tools" in source for source in templates.values())
        return format_of(templates, tool_format=tool_format, takes_tools=takes_tools)

    hermes = {"default": "{{ tools }} <tool_call> </think>"}
    assert answer_format(hermes).name == "hermes"
    assert answer_format(hermes, tool_format="generic").name == "generic"
    assert answer_format(hermes, tool_format="qwen_xml").name == "qwen_xml"
    assert answer_format({"default": PLAIN}).name == "generic"
    assert answer_format({"default": PLAIN + "</think>"}).template.thinks == ("<think>", "</think>")  # type: ignore[union-attr]
    assert "takes no tools" in answer_format({"default": PLAIN}, tool_format="hermes").tools_error
    assert answer_format({}).tools_error == "this model has no chat template"
    for name in tool_formats():
        assert answer_format(hermes, tool_format=name).name == name
    with pytest.raises(ConfigError, match=r"tool_format is 'hermse'; one of auto, generic, none, .*hermes"):
        answer_format(hermes, tool_format="hermse")
    assert Tokenizer(Path(BUNDLED_MODEL)).answer_format.is_generic


def test_messages_are_not_changed_and_parts_stay_parts() -> None:
    part = {"type": "text", "text": "hi"}
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"incomplete'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [part]},
        {"role": "tool", "name": "b", "content": "two"},
    ]
    before = json.dumps(messages)
    made = with_generic_tools(messages, [OTHER], takes_system=True)
    assert json.dumps(messages) == before
    assert [message["role"] for message in made] == ["system", "user", "assistant", "user"]
    assert made[0]["content"].startswith("Be brief.\n\nYou can call tools.")
    assert '{"name": "now", "arguments": {"incomplete}' in made[2]["content"]
    assert part in made[3]["content"] and "b: two" in made[3]["content"][-1]["text"]
    first = with_generic_tools(messages[1:2], [OTHER], takes_system=False)
    assert first[0]["role"] == "user" and first[0]["content"][-1] == part
