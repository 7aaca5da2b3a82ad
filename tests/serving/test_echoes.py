"""A law of every dialect: what the server has said is taken back as history, however the answer ended."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from dialect_calls import ask, call_of, events_of, last_prompt
from fake_llm import FakeLLM
from pydantic_core import from_json
from tool_model import tool_model

from diptych.serving.answers.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMES = ("weather", "box__weather", "patch", "tool_search")
CHAT_TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
MESSAGES_TOOLS = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
FUNCTION = {"type": "function", "name": "weather", "parameters": SCHEMA}
RESPONSES_TOOLS = [
    FUNCTION,
    {"type": "namespace", "name": "box", "tools": [FUNCTION]},
    {"type": "custom", "name": "patch"},
    {"type": "tool_search", "execution": "client"},
]
THOUGHT = "<think>\nBern is far.\n</think>\n\n"
ANSWERS = (
    "Plain words.",
    THOUGHT + "I look.\n" + call_of("weather", {"city": 'Bern "x"\n'}) + "\n" + call_of("weather", {"city": "Rome"}),
    call_of("box__weather", {"city": "Bern"}),
    THOUGHT + call_of("patch", {"input": "BEGIN\n\\END"}),
    call_of("tool_search", {"query": "weather"}),
    call_of("weather", ["no", "object"]),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tool_model(tmp_path_factory.mktemp("model") / "tools"))


def cuts(tokenizer: Tokenizer, answer: str, step: int) -> list[int]:
    """Limits of tokens: the whole answer, its beginning, and places that are spread over it."""
    count = len(tokenizer.encode(answer, add_special_tokens=False))
    return sorted({count, 1, 2, *range(3, count, step)})


def chat_echo(reply: Any) -> list[Any]:
    return [reply["choices"][0]["message"]]


def chat_stream_echo(events: list[Any]) -> list[Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, Any] = {}
    for event in events:
        for choice in event["choices"]:
            delta = dict(choice["delta"])
            for call in delta.pop("tool_calls", None) or []:
                known = calls.setdefault(call["index"], {**call, "function": {"name": "", "arguments": ""}})
                for name, text in call["function"].items():
                    known["function"][name] += text
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
    return [{**message, **({"tool_calls": list(calls.values())} if calls else {})}]


def messages_echo(reply: Any) -> list[Any]:
    return [{"role": reply["role"], "content": reply["content"]}]


def messages_stream_echo(events: list[Any]) -> list[Any]:
    """As Anthropic's client builds it: of arguments that were cut, what can be read."""
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            for name, text in event["delta"].items():
                if name == "partial_json":
                    blocks[-1]["json"] += text
                elif name != "type":
                    blocks[-1][name] = blocks[-1].get(name, "") + text
    for block in blocks:
        if text := block.pop("json"):
            block["input"] = from_json(text, allow_partial=True)
    return [{"role": "assistant", "content": blocks}]


def responses_echo(reply: Any) -> list[Any]:
    return reply["output"]  # type: ignore[no-any-return]


def responses_stream_echo(events: list[Any]) -> list[Any]:
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


DIALECTS: list[tuple[str, str, Any, Callable[[Any], list[Any]], Callable[[list[Any]], list[Any]]]] = [
    ("/v1/chat/completions", "messages", CHAT_TOOLS, chat_echo, chat_stream_echo),
    ("/v1/messages", "messages", MESSAGES_TOOLS, messages_echo, messages_stream_echo),
    ("/v1/responses", "input", RESPONSES_TOOLS, responses_echo, responses_stream_echo),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect[0])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("step", [16, pytest.param(3, marks=pytest.mark.slow)], ids=["some cuts", "more cuts"])
async def test_what_was_said_is_taken_back(
    step: int, answer: str, dialect: Any, stream: bool, tokenizer: Tokenizer
) -> None:
    path, field, tools, echo, stream_echo = dialect
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    user = {"role": "user", "content": "Weather?"}
    llm = FakeLLM(answer=answer, tokenizer=tokenizer)
    for cut in cuts(tokenizer, answer, step):
        body = {field: [user], "tools": tools, limit: cut, "stream": stream}
        reply = await ask(llm, path, body)
        assert reply.status_code == 200, reply.text
        said = stream_echo(events_of(reply)) if stream else echo(reply.json())
        again = await ask(llm, path, {**body, field: [user, *said, user], "stream": False})
        assert again.status_code == 200, (cut, json.dumps(said), again.text)
        assert last_prompt(llm).count("Weather?") == 2
