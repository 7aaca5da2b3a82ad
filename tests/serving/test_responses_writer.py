"""The events of a response, however the answer came, and what writing them copies."""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from copies import Copies
from tests.laws import law

from diptych.control.errors import WorkerError
from diptych.serving import sliced_json
from diptych.serving.answers.answer_stream import Delta
from diptych.serving.answers.response.bundled_templates import TEMPLATES
from diptych.serving.answers.response.response_parser import ResponseParser
from diptych.serving.answers.response.response_template import load_response_template
from diptych.serving.api.answer_reader import AnswerReader
from diptych.serving.api.messages_writer import MessagesWriter
from diptych.serving.api.responses_request import ResponsesBody
from diptych.serving.api.responses_tools import ClientTools
from diptych.serving.api.responses_writer import ResponsesWriter, echoed

HERMES = load_response_template("hermes", TEMPLATES["hermes"])
FUNCTION: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CUSTOM: Any = {"type": "custom", "name": "say"}
SEARCH: Any = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
USAGE = {
    "prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0},
}  # fmt: skip
LONG = "some words " * 400


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWERS = {
    "content": LONG,
    "nothing": "",
    "reasoning": f"<think>\n{LONG}\n</think>\n\nYes.",
    "a call": f"Well: {call('f', text=LONG)}",
    "a custom call": call("say", input=LONG + '"\n'),
    "a search": call("tool_search", query=LONG),
    "all": f"<think>{LONG}</think>{LONG}{call('f', text=LONG)}{call('say', input=LONG)}{call('f', a='b')}",
}


def tools() -> ClientTools:
    found = ClientTools()
    found.add([FUNCTION, CUSTOM, SEARCH], "tools")
    return found


def context() -> Any:
    generation = SimpleNamespace(streams=[SimpleNamespace(stop_reason=None)])
    return SimpleNamespace(id="resp_1", model="m", created=1, generation=generation, usage=lambda: dict(USAGE))


def reader() -> AnswerReader:
    return AnswerReader([ResponseParser(HERMES, tools={"f": {}, "say": {}, "tool_search": {}})])


def writer(**more: Any) -> ResponsesWriter:
    return ResponsesWriter(context(), ResponsesBody.model_validate({"input": "x", **more}), reader(), tools())


def deltas_of(answer: str, sizes: Any, finish_reason: str | None = "stop") -> list[Delta]:
    deltas, at = [], 0
    while at < len(answer):
        size = sizes()
        deltas.append(Delta(0, answer[at : at + size], [1], []))
        at += size
    return [*deltas, Delta(0, "", [], [], finish_reason)] if finish_reason else deltas


def events_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.split(b"data: ")[1]) for event in data.split(b"\n\n") if event.startswith(b"event: ")]


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(inner) for name, inner in value.items() if name not in ("id", "item_id", "call_id")}
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value


def test_what_each_whole_response_repeats_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = {
        "instructions": 'Long "instructions" of é€😀\n' * 20_000,
        "metadata": {"a": "b"},
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_object"}},
    }
    written: list[Any] = []
    encode = sliced_json.encode
    monkeypatch.setattr(sliced_json, "encode", lambda value: (written.append(value), encode(value))[1])
    body = ResponsesBody.model_validate({"input": "x", **asked})
    begun = ResponsesWriter(context(), body, reader(), tools(), echoed(body))
    data = b"".join((begun.opening(), begun.events([Delta(0, "x", [1], []), Delta(0, "", [], [], "stop")])))
    data += b"".join(begun.pause() for _ in range(5)) + begun.last_events()
    repeated = [event["response"] for event in events_of(data) if "response" in event]
    assert len(repeated) == 4 and all({name: reply[name] for name in asked} == asked for reply in repeated)
    assert written.count(asked["instructions"]) == 1
    numbers = [event["sequence_number"] for event in events_of(data)]
    assert numbers == list(range(len(numbers)))


@law(weight=0.5)
@pytest.mark.parametrize("name", ANSWERS)
def test_the_items_are_the_same_however_the_answer_came_and_their_deltas_are_all_of_them(name: str, seed: int) -> None:
    rng = random.Random(seed)
    asked: Any = rng.choice([{}, {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}])
    finish = rng.choice(("stop", "length"))
    answer = ANSWERS[name][: rng.choice((None, rng.randrange(len(ANSWERS[name]) + 1)))]
    once, cut = writer(**asked), writer(**asked)
    whole = json.loads(once.body([Delta(0, answer, [1], [], finish)]))
    events = events_of(
        b"".join(cut.events([delta]) for delta in deltas_of(answer, lambda: rng.choice((1, 7, 300)), finish))
        + cut.last_events()
    )
    response = events[-1]["response"]
    assert without_ids(response["output"]) == without_ids(whole["output"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for number, item in enumerate(response["output"]):
        assert said_of(events, number) == texts_of(item)
        [done] = [event for event in events if event["type"].endswith("item.done") and event["output_index"] == number]
        assert done["item"] == item


def said_of(events: list[dict[str, Any]], number: int) -> dict[str, str]:
    """The deltas of an item, by their kind."""
    said: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta") and event["output_index"] == number:
            kind = event["type"].removeprefix("response.").removesuffix(".delta")
            said[kind] = said.get(kind, "") + event["delta"]
    return said


def texts_of(item: dict[str, Any]) -> dict[str, str]:
    """The texts of an item, by the kind of their deltas."""
    texts = {
        "message": lambda: {"output_text": item["content"][0]["text"]},
        "reasoning": lambda: {
            "reasoning_text": item["content"][0]["text"],
            "reasoning_summary_text": "".join(part["text"] for part in item["summary"]),
        },
        "function_call": lambda: {"function_call_arguments": item["arguments"]},
        "custom_tool_call": lambda: {"custom_tool_call_input": item["input"]},
        "tool_search_call": dict,
    }[item["type"]]()
    return {kind: text for kind, text in texts.items() if text}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_an_answer_that_fails_has_said_is_in_its_last_event(name: str) -> None:
    answer = ANSWERS[name]
    begun = answer[: 2 * len(answer) // 3]
    stopped = writer()
    said = b"".join(stopped.events([delta]) for delta in deltas_of(begun, lambda: 9, None))
    events = events_of(said + stopped.failure(WorkerError("the worker died")))
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    for number, item in enumerate(response["output"]):
        assert said_of(events, number) == texts_of(item)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("kind", ["responses", "messages"])
def test_no_text_of_an_open_item_is_copied_with_each_token(kind: str, name: str) -> None:
    answer = ANSWERS[name]
    written: Any = writer(reasoning={"summary": "auto"}) if kind == "responses" else MessagesWriter(context(), reader())
    copies = Copies(written)
    for delta in deltas_of(answer, lambda: 9):
        written.events([delta])
        copies.look()
    assert copies.num_characters <= 16 * len(answer) + 4000
