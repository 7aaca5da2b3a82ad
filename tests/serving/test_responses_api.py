"""/v1/responses as OpenAI's client sees it, with answers that are written for it; conversations go on by their ids."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_llm import FakeLLM
from tool_model import tool_model

from diptych.control.errors import ConfigError, NotFoundError
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.app import build_app
from diptych.serving.api.response_store import ResponseStore

pytestmark = pytest.mark.asyncio
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = (
    '<think>\nBern.\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tool_model(tmp_path_factory.mktemp("model") / "tools"))


@asynccontextmanager
async def client_of(llm: FakeLLM) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(build_app(llm, "fake"), raise_app_exceptions=False)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=http)


def said(reply: Any) -> list[Any]:
    """What the items of a response say."""
    return [
        (item.name, item.arguments) if item.type == "function_call" else (item.type, item.content[0].text)
        for item in reply.output
    ]


WHOLE = [("reasoning", "Bern."), ("message", "I look."), ("weather", '{"city": "Bern"}')]


async def test_a_response_has_items_for_reasoning_text_and_calls(tokenizer: Tokenizer) -> None:
    async with client_of(FakeLLM(answer=CALL, tokenizer=tokenizer)) as client:
        reply = await client.responses.create(model="fake", input="Weather?", tools=[TOOL], instructions="Be brief.")
        again = await client.responses.retrieve(reply.id)
    assert said(reply) == said(again) == WHOLE
    assert (reply.status, reply.output_text) == ("completed", "I look.")
    assert reply.usage is not None
    assert reply.usage.output_tokens == len(tokenizer.encode(CALL, add_special_tokens=False))


async def test_a_stream_builds_the_same_response(tokenizer: Tokenizer) -> None:
    async with client_of(FakeLLM(answer=CALL, tokenizer=tokenizer)) as client:
        async with client.responses.stream(model="fake", input="Weather?", tools=[TOOL]) as stream:
            events = [event async for event in stream]
        reply = await stream.get_final_response()
    assert said(reply) == WHOLE
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"city": "Bern"}'
    for kind in ("output_item.added", "output_item.done", "reasoning_text.done", "output_text.done"):
        assert f"response.{kind}" in kinds


async def test_a_conversation_continues_by_its_id_with_the_same_prefix(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer=CALL, tokenizer=tokenizer)
    async with client_of(llm) as client:
        first = await client.responses.create(model="fake", input="Weather?", tools=[TOOL])
        call = first.output[-1]
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]  # type: ignore[union-attr]
        second = await client.responses.create(model="fake", input=output, tools=[TOOL], previous_response_id=first.id)
        items: Any = [
            {"role": "user", "content": "Weather?"},
            *[item.model_dump(exclude_none=True) for item in first.output],
            *output,
        ]
        await client.responses.create(model="fake", input=items, tools=[TOOL], store=False)
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model="fake", input="And?", previous_response_id=second.id)
    assert caught.value.code == "previous_response_not_found"
    prompts = [submitted.prompts[0] for submitted in llm.submitted]
    assert prompts[1] == prompts[2]  # by its id, or with all its items
    assert "<|im_start|>tool\nsun<|im_end|>" in tokenizer.decode(prompts[1], skip_special_tokens=False)
    answered = tokenizer.encode("<|im_end|>\n", add_special_tokens=False)
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert answered[0] in prompts[1][len(prompts[0]) :]


async def test_a_form_is_a_grammar_and_a_cut_answer_is_incomplete(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer="one two three four five", tokenizer=tokenizer)
    async with client_of(llm) as client:
        wanted: Any = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}}
        reply = await client.responses.create(model="fake", input="x", text=wanted, max_output_tokens=2)
    assert len(llm.grammars) == 1
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"


DEEP: dict[str, Any] = {}  # a schema that is nested more deeply than any may be
for _ in range(200):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": DEEP}}}, "text.format.schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [TOOL, {**TOOL, "name": "no spaces"}]}, "tools.1.name"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.id"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "compaction_trigger"}]}, "input.1.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input.0.name"),
        ({"previous_response_id": "nothing"}, "previous_response_id"),
    ],
)
async def test_what_cannot_be_served_is_named(fields: dict[str, Any], param: str) -> None:
    async with client_of(FakeLLM()) as client:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
            await client.post("/responses", body={"input": "x", **fields}, cast_to=object)
    assert caught.value.param == param


async def test_responses_expire_belong_to_their_tenant_and_survive_in_a_file(tmp_path: Path) -> None:
    now = [0.0]
    store = ResponseStore(tmp_path / "responses.db", expiry_s=10, clock=lambda: now[0])
    store.put({"id": "a", "n": 1}, "me", None, [{"x": 1}])
    now[0] = 5
    store.put({"id": "b"}, "me", "a", [{"x": 2}, {"x": 3}])
    assert await store.conversation("b", "me") == [{"x": 1}, {"x": 2}, {"x": 3}]
    with pytest.raises(NotFoundError):
        await store.conversation("b", "other")
    store.close()
    store = ResponseStore(tmp_path / "responses.db", clock=lambda: now[0])
    assert await store.reply("a", "me") == b'{"id":"a","n":1}'
    now[0] = 11
    with pytest.raises(NotFoundError, match="'a', or it has expired"):
        await store.conversation("b", "me")
    store.close()
    with pytest.raises(ConfigError, match="cannot be opened"):
        ResponseStore(tmp_path / "nowhere" / "x.db")
