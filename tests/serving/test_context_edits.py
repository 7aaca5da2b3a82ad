"""context_management of /v1/messages: what is cleared, when, and what the reply says of it."""

from typing import Any

import pytest
from dialect_calls import ask, events_of, last_prompt
from fake_llm import FakeLLM
from tool_model import tool_model

from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.context_edits import (
    CLEAR_THINKING,
    CLEAR_TOOL_USES,
    CLEARED,
    after_compaction,
    edited_context,
)

pytestmark = pytest.mark.asyncio
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
LONG = "A long result of a tool that nobody needs any more. " * 5


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tool_model(tmp_path_factory.mktemp("model") / "tools"))


def turn(number: int, name: str = "look") -> list[dict[str, Any]]:
    """A call with reasoning, and its result."""
    call = {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"place": f"place-{number}"}}
    thought = {"type": "thinking", "thinking": f"thought-{number}", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"result-{number} {LONG}"}
    return [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]


USER = {"role": "user", "content": "Go on."}
USES = [USER, *(message for number in range(5) for message in turn(number, "keep" if number == 1 else "look"))]
TALK = [message for number in range(3) for message in (USER, *turn(number), *turn(number + 10))]


async def edited(
    tokenizer: Tokenizer, messages: Any, *edits: Any, stream: bool = False
) -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """The edits that were applied, the prompt, and what count_tokens says of the same request."""
    llm = FakeLLM(answer="x", tokenizer=tokenizer)
    body = {"messages": messages, "tools": [TOOL], "context_management": {"edits": list(edits)}}
    reply = await ask(llm, "/v1/messages", {**body, "max_tokens": 9, "stream": stream})
    assert reply.status_code == 200, reply.text
    if stream:
        [said] = [event for event in events_of(reply) if event["type"] == "message_delta"]
    else:
        said = reply.json()
    counted = (await ask(llm, "/v1/messages/count_tokens", body)).json()
    assert counted["input_tokens"] == len(llm.submitted[-1].prompts[0])
    return said["context_management"]["applied_edits"], last_prompt(llm), counted


def results_in(prompt: str) -> list[int]:
    return [number for number in range(20) if f"result-{number} " in prompt]


@pytest.mark.parametrize("stream", [False, True])
async def test_old_results_are_cleared_and_the_reply_says_how_many(stream: bool, tokenizer: Tokenizer) -> None:
    edit = {"type": CLEAR_TOOL_USES, "trigger": {"type": "input_tokens", "value": 100}}
    [applied], prompt, counted = await edited(tokenizer, USES, edit, stream=stream)
    assert results_in(prompt) == [2, 3, 4]  # three are kept without a word
    assert prompt.count(CLEARED) == 2
    assert "place-0" in prompt
    assert (applied["type"], applied["cleared_tool_uses"]) == (CLEAR_TOOL_USES, 2)
    original = counted["context_management"]["original_input_tokens"]
    assert applied["cleared_input_tokens"] == original - counted["input_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),  # 100,000 tokens are not reached
        ({"trigger": {"type": "tool_uses", "value": 4}}, [2, 3, 4]),
        ({"trigger": {"type": "tool_uses", "value": 5}}, [0, 1, 2, 3, 4]),
        ({"trigger": {"type": "tool_uses", "value": 1}, "keep": {"type": "tool_uses", "value": 0}}, []),
        ({"trigger": {"type": "tool_uses", "value": 1}, "exclude_tools": ["keep"]}, [1, 2, 3, 4]),
        (
            {"trigger": {"type": "tool_uses", "value": 1}, "clear_at_least": {"type": "input_tokens", "value": 9000}},
            [0, 1, 2, 3, 4],
        ),
        (
            {"trigger": {"type": "tool_uses", "value": 1}, "clear_at_least": {"type": "input_tokens", "value": 20}},
            [2, 3, 4],
        ),
    ],
)
async def test_the_fields_of_an_edit_decide_what_is_kept(fields: Any, kept: list[int], tokenizer: Tokenizer) -> None:
    applied, prompt, _ = await edited(tokenizer, USES, {"type": CLEAR_TOOL_USES, **fields})
    assert results_in(prompt) == kept
    assert [edit["cleared_tool_uses"] for edit in applied] == ([5 - len(kept)] if len(kept) < 5 else [])


@pytest.mark.parametrize(("inputs", "places"), [(False, 5), (True, 3), (["keep"], 4), (["other"], 5)])
async def test_inputs_are_cleared_on_demand(inputs: Any, places: int, tokenizer: Tokenizer) -> None:
    edit = {"type": CLEAR_TOOL_USES, "trigger": {"type": "tool_uses", "value": 1}, "clear_tool_inputs": inputs}
    _, prompt, _ = await edited(tokenizer, USES, edit)
    assert sum(f"place-{number}" in prompt for number in range(5)) == places


@pytest.mark.parametrize(
    ("keep", "cleared"),
    [
        (None, 2),  # of three turns; the calls of a turn are one
        ({"type": "thinking_turns", "value": 2}, 1),
        ({"type": "thinking_turns", "value": 3}, 0),
        ("all", 0),
        ({"type": "all"}, 0),
    ],
)
async def test_old_reasoning_is_cleared_by_turns(keep: Any, cleared: int, tokenizer: Tokenizer) -> None:
    edit = {"type": CLEAR_THINKING} if keep is None else {"type": CLEAR_THINKING, "keep": keep}
    applied, _, counted = await edited(tokenizer, TALK, edit)
    assert [edit["cleared_thinking_turns"] for edit in applied] == ([cleared] if cleared else [])
    assert counted["context_management"]["original_input_tokens"] >= counted["input_tokens"]


async def test_each_conversation_is_counted_once_however_many_edits_there_are() -> None:
    counted: list[str] = []

    async def count(turns: Any) -> int:
        counted.append(str(turns))
        return len(counted[-1])

    edits = [{"type": CLEAR_TOOL_USES, "keep": {"type": "tool_uses", "value": 15 - n}} for n in range(16)]
    for edit, value in zip(edits, [10**9, 10, 0, 0] * 4, strict=True):  # some do not apply, for want of tokens
        edit["trigger"] = {"type": "input_tokens", "value": 0}
        edit["clear_at_least"] = {"type": "input_tokens", "value": value}
    found = await edited_context({"edits": edits}, TALK, count)
    assert 0 < len(found.applied) < 6 and found.original_tokens == len(str(TALK))
    assert len(counted) <= 1 + len(edits) and counted.count(str(TALK)) == 1


async def test_the_number_of_tokens_is_that_of_the_encoding(tokenizer: Tokenizer) -> None:
    for text in ("", "a", "Hello, <tool_call> world", "é€😀" * 1000):
        assert tokenizer.count_rendered(text) == len(tokenizer.encode_rendered(text))


async def test_edits_that_are_not_known_are_left_out_by_name(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer="x", tokenizer=tokenizer)
    edits = [{"type": "compact_20260112"}, {"type": CLEAR_THINKING, "keep": "all"}]
    body = {"messages": USES, "max_tokens": 9, "context_management": {"edits": edits}}
    reply = await ask(llm, "/v1/messages", body)
    assert reply.json()["context_management"] == {"applied_edits": []}
    assert reply.headers["x-ignored-fields"] == "context_management.compact_20260112"
    for nothing in ({"edits": []}, {"edits": None}, {}):
        reply = await ask(llm, "/v1/messages", {**body, "context_management": nothing})
        assert reply.json()["context_management"] == {"applied_edits": []}
    assert "context_management" not in (await ask(llm, "/v1/messages", {**body, "context_management": None})).json()


async def test_a_summary_stands_for_what_was_before() -> None:
    summary = {"type": "compaction", "content": "They talked."}
    answer = {"role": "assistant", "content": [summary, {"type": "text", "text": "Yes."}]}
    rest = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
    assert after_compaction([*USES, answer, USER]) == [{"role": "user", "content": "They talked."}, rest, USER]
    failed = {"role": "assistant", "content": [{"type": "compaction", "content": None}]}
    assert after_compaction([USER, failed]) == [USER, failed]
