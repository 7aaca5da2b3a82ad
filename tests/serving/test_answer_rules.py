"""What is a call in an answer and what is text, in the cases where models and their formats are at odds."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from diptych.serving.answers.response.bundled_templates import TEMPLATES
from diptych.serving.answers.response.response_parser import ReadAnswer, ResponseParser
from diptych.serving.answers.response.response_template import load_response_template

ALL = {name: load_response_template(name, spec) for name, spec in TEMPLATES.items()}
STRING = {"type": "string"}
STEP = 1
TOOLS: dict[str, Any] = {
    "write": {"type": "object", "properties": {"path": STRING, "text": STRING, "mode": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}


@pytest.fixture(
    autouse=True,
    params=[pytest.param(5, id="some places"), pytest.param(1, id="every place", marks=pytest.mark.slow)],
)
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where texts are cut into two pieces; the laws of test_answer_laws.py cut others anywhere."""
    monkeypatch.setitem(globals(), "STEP", request.param)


def read(
    name: str, text: str, *, special: tuple[str, ...] = (), is_cut: bool = False, prompt_end: str = ""
) -> ReadAnswer:
    """A text, read whole; in two pieces, cut at every STEP-th place, and character by character, it says the same."""

    def once(*pieces: str) -> ReadAnswer:
        parser = ResponseParser(ALL[name], prompt_end, TOOLS, special_tokens=special)
        answer = ReadAnswer()
        for piece in pieces:
            answer.add(parser.push(piece))
        answer.add(parser.finish(is_cut=is_cut))
        return answer

    whole = once(text)
    assert once(*text) == whole, "character by character"
    for at in range(len(text) % STEP, len(text) + 1, STEP):
        assert once(text[:at], text[at:]) == whole, (text[:at], text[at:])
    return whole


def calls_of(answer: ReadAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


JSON_CALLS = {
    "hermes": '<tool_call>\n{"name": "write", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "write", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "write", "arguments": %s}]',
    "mistral_args": "[TOOL_CALLS]write[ARGS]%s",
    "harmony": "<|channel|>commentary to=functions.write <|constrain|>json<|message|>%s<|call|>",
    "deepseek": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n%s\n```<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁call▁begin｜>write<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
}
MARKS = [
    "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|call|>", "<|end|>", "\n```<｜tool▁call▁end｜>",
    "<｜tool▁call▁end｜>", "</function>", "<think>", "```", "}]}", "'\"\\",
]  # fmt: skip


@pytest.mark.parametrize("name", JSON_CALLS)
@pytest.mark.parametrize("mark", MARKS)
def test_marks_within_a_json_string_are_text(name: str, mark: str) -> None:
    arguments = {"text": f"a {mark} b{mark}", "path": mark}
    answer = read(name, JSON_CALLS[name] % json.dumps(arguments, ensure_ascii=False))
    assert (calls_of(answer), answer.content) == ([("write", arguments)], None)


@pytest.mark.parametrize("name", JSON_CALLS)
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"text": "a\nb\tc\x01"}', {"text": "a\nb\tc\x01"}),
        (r'{"path": "C:\Users\me\x"}', {"path": r"C:\Users\me\x"}),
        (r'{"path": "\u00e4\u12"}', {"path": r"ä\u12"}),
        ('{"mode": 1, "path": "x",}', {"mode": 1, "path": "x"}),
        ('{"mode": True, "path": None}', {"mode": True, "path": None}),
        ("{'path': 'it\\'s \"x\"'}", {"path": 'it\'s "x"'}),
    ],
)
def test_arguments_that_are_nearly_json_are_handed_out_as_json(name: str, written: str, meant: Any) -> None:
    assert calls_of(read(name, JSON_CALLS[name] % written)) == [("write", meant)]


@pytest.mark.parametrize("name", JSON_CALLS)
def test_a_call_of_a_tool_that_the_request_does_not_name_is_text(name: str) -> None:
    text = JSON_CALLS[name].replace("write", "erase") % '{"path": "x"}'
    answer = read(name, text)
    assert (answer.calls, answer.content) == ([], text)
    both = read(name, f"{text}\n{JSON_CALLS[name] % '{}'}") if name not in ("llama3_json",) else None
    assert both is None or (calls_of(both) == [("write", {})] and both.content and both.content.startswith(text[:20]))


@pytest.mark.parametrize("name", JSON_CALLS)
def test_a_call_that_is_cut_goes_out_as_far_as_it_was_written(name: str) -> None:
    whole = JSON_CALLS[name] % '{"path": "a/b", "text": "long'
    cut = whole[: whole.index("long") + 4]
    [call] = read(name, cut, is_cut=True).calls
    assert (call.name, call.arguments) == ("write", '{"path": "a/b", "text": "long')


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bern", "population": 134000}',
        '{"name": "write", "population": 134000}',
        '{"name": "write"}',
        '{"name": "write", "parameters": 5}',
        '{"name": "write", "parameters": [1]}',
        '{"type": "object", "properties": {}}',
        '{"name": ["write"], "parameters": {}}',
        '{"parameters": {"a": 1}, "name": "Bern"}',
        '[{"name": "write", "parameters": {}}]',
        'Use {"name": "write", "parameters": {}}',
    ],
)
def test_json_that_is_no_call_is_content(text: str) -> None:
    answer = read("llama3_json", text)
    assert (answer.content, answer.calls) == (text, [])


def test_an_object_may_have_more_members_and_any_order() -> None:
    for text in (
        '{"type": "function", "name": "write", "parameters": {"mode": 1}}',
        '{"type": "function", "function": {"name": "write", "parameters": {"mode": 1}}}',
        '{"arguments": {"mode": 1}, "name": "write"}',
        '{"name": "write", "arguments": "{\\"mode\\": 1}"}',
        '{"function": "write", "parameters": {"mode": 1}}',
    ):
        assert calls_of(read("llama3_json", text)) == [("write", {"mode": 1})], text


XML = "<tool_call>\n<function=write>\n%s</function>\n</tool_call>"
VALUES = [
    "a </parameter> b", "see </function> and </tool_call>", "<parameter=text>", "<b>x</b> < 5", "</parameter>",
    "a\n\n  b  ", "</parameter></function> on a line", "\n", "<function=now>", "if a < b && c > d:\n\tpass\n",
    "</param", "<tool_call>", "a\n<parameter=unknown>\nb",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("after", ["", "<parameter=mode>\n3\n</parameter>\n"])
def test_values_in_tags_may_hold_the_tags(value: str, after: str) -> None:
    answer = read("qwen_xml", XML % f"<parameter=text>\n{value}\n</parameter>\n{after}" + "\n\nDone.")
    expected = {"text": value, **({"mode": 3} if after else {})}
    assert (calls_of(answer), answer.content) == ([("write", expected)], "Done.")


@pytest.mark.parametrize(
    "tags",
    [
        "<parameter=path>\na\n<parameter=text>\nb\n</parameter>\n",
        "<parameter=path>\na\n</parameter>\n<parameter=text>\nb\n",
        "<parameter=path>a</parameter><parameter=text>b</parameter>",
        "<parameter=path>\na\n\n<parameter=text>\nb\n\n",
    ],
)
def test_tags_that_were_forgotten_are_made_up_for(tags: str) -> None:
    text = XML % tags
    for written in (text, text.replace("<tool_call>\n", "").replace("\n</tool_call>", "")):
        [(_, arguments)] = calls_of(read("qwen_xml", written))
        assert {key: value.strip() for key, value in arguments.items()} == {"path": "a", "text": "b"}


def test_a_call_whose_tags_cannot_be_read_is_text() -> None:
    for inside in ("<path>a</path>\n", "path: a\n", "<parameter path>a</parameter>\n"):
        answer = read("qwen_xml", XML % inside)
        assert (answer.calls, answer.content) == ([], XML % inside)
    assert calls_of(read("qwen_xml", "<tool_call>\n<function=now>\n</function>\n</tool_call>")) == [("now", {})]


def test_tags_that_are_cut_stay_open() -> None:
    text = "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=text>\nlo"
    assert [call.arguments for call in read("qwen_xml", text, is_cut=True).calls] == ['{"path": "a", "text": "lo']
    assert calls_of(read("qwen_xml", text)) == [("write", {"path": "a", "text": "lo"})]


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        f"Like this:\n```xml\n{CALL}\n```\nDo so.",
        f"~~~\n{CALL}\n~~~",
        f"```\nfirst\n```\ntext\n````md\n```\n{CALL}\n```\n````",
        f"Write `{CALL.replace(chr(10), '')}` for it.",
        "The mark <tool_call> begins a call, </tool_call> ends it.",
        "<tool_call>\nnow()\n</tool_call>",
        '<tool_call>{"name": "now" "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "Bern"}</tool_call>',
    ],
)
def test_marks_in_code_and_prose_are_text(text: str) -> None:
    answer = read("hermes", text)
    assert (answer.calls, answer.content) == ([], text)


def test_a_call_behind_code_or_in_code_that_never_ends_is_a_call() -> None:
    behind = read("hermes", f"```\ncode\n```\n{CALL}")
    assert (calls_of(behind), behind.content) == ([("now", {})], "```\ncode\n```")
    within = read("hermes", f"```\ncode\n{CALL}")
    assert (calls_of(within), within.content) == ([("now", {})], "```\ncode")
    odd = read("hermes", f"It`s {CALL}\n{CALL} it")
    assert (calls_of(odd), odd.content) == ([("now", {})] * 2, "It`sit")
    special = read("hermes", f"```\n{CALL}\n```", special=("<tool_call>",))
    assert calls_of(special) == [("now", {})]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"<think>\nI look.\n{CALL}", "I look.", None),
        (f"<think>\nI look.\n{CALL}\n</think>\n", "I look.", None),
        (f"<think>\n{CALL}\n{CALL}\n</think>\n\n", None, None),
        (f"<think>\nI look.\n{CALL}\n</think>\n\nSo.", f"I look.\n{CALL}", "So."),
        (f"<think>\nI look.\n{CALL}\nthen more\n</think>\nSo.", f"I look.\n{CALL}\nthen more", "So."),
    ],
)
def test_a_call_in_reasoning_counts_when_no_other_follows(
    text: str, reasoning: str | None, content: str | None
) -> None:
    answer = read("hermes", text)
    assert [call.name for call in answer.calls] == ["now"] * text.count("<tool_call>")
    assert (answer.reasoning, (answer.content or "").strip() or None) == (reasoning, content)


def test_a_call_in_reasoning_is_text_when_another_follows_or_it_is_none() -> None:
    write = CALL.replace("now", "write")
    answer = read("hermes", f"<think>\nPerhaps\n{write}\n</think>\n\n{CALL}")
    assert ([call.name for call in answer.calls], answer.reasoning) == (["now"], f"Perhaps\n{write}")
    for thought in (f"a mark in a line {CALL}", CALL[:-30], CALL.replace("now", "never"), "<tool_call> </tool_call>"):
        answer = read("hermes", f"<think>\n{thought}\n</think>\n\nYes.")
        assert (answer.calls, answer.reasoning, answer.content) == ([], thought, "Yes.")
    special = read("hermes", f"<think>\nin a line {CALL}", special=("<tool_call>",))
    assert [call.name for call in special.calls] == ["now"]


def test_reasoning_begins_an_answer_and_its_mark_is_text_elsewhere() -> None:
    for text in ("The <think> mark opens reasoning.", "Write <think>a</think> and go on.", f"a {CALL}\n<think>x"):
        assert read("hermes", text).reasoning is None
    answer = read("hermes", "<think>a</think>\nWrite <think>b</think>.")
    assert (answer.reasoning, answer.content) == ("a", "Write <think>b</think>.")


def test_text_behind_the_arguments_of_a_call_is_content() -> None:
    answer = read("hermes", '<tool_call>{"name": "now", "arguments": {}} and more</tool_call> end')
    assert (calls_of(answer), answer.content) == ([("now", {})], "and more</tool_call> end")
    answer = read("hermes", '<tool_call>{"name": "now", "arguments": {}</tool_call> end')
    assert (calls_of(answer), answer.content) == ([("now", {})], "end")


def test_a_python_list_ends_at_its_bracket() -> None:
    text = "[write(text=\"a ]) b\", path='it\\'s [')]"
    assert calls_of(read("pythonic", text + " more")) == [("write", {"text": "a ]) b", "path": "it's ["})]
    assert calls_of(read("pythonic", '[write(text="two\nlines")]')) == [("write", {"text": "two\nlines"})]
    for text in ("[erase()]", "[write(1)]", "[write(text=x)]", "[write(text='", "[1, 2]"):
        assert read("pythonic", text).content == text


def test_a_prompt_that_ends_in_an_open_thought_is_known_without_the_marks_of_a_turn() -> None:
    answer = read("hermes", "so\n</think>\nYes.", prompt_end="Assistant:<think>\n")
    assert (answer.reasoning, answer.content) == ("so", "Yes.")
