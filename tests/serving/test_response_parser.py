"""Answers in every format: read whole and in pieces, they say the same; no text makes a reader fail."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from answer_texts import FORMATS, NAMES, written
from tests.laws import law

from diptych.control.errors import ConfigError
from diptych.serving.answers.response.bundled_templates import TEMPLATES
from diptych.serving.answers.response.recognise import recognise
from diptych.serving.answers.response.response_parser import ReadAnswer, ResponseParser
from diptych.serving.answers.response.response_template import ResponseTemplate, load_response_template

ALL = {name: load_response_template(name, spec) for name, spec in TEMPLATES.items()}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "deep": {"type": ["object", "null"]}, "s": {"type": "string"}},
}
TOOLS: dict[str, Any] = {**{name: {} for name in NAMES}, "f": SCHEMA}


def read(template: ResponseTemplate, *pieces: str, prompt_end: str = "", max_calls: int | None = None) -> ReadAnswer:
    """An answer that arrives in these pieces."""
    parser = ResponseParser(template, prompt_end, TOOLS, max_calls)
    answer = ReadAnswer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish())
    return answer


def calls_of(answer: ReadAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@law(weight=1.0)
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read_as_it_was_written(name: str, seed: int) -> None:
    text, content, reasoning, calls = written(name, random.Random(seed))
    answer = read(ALL[name], text)
    assert ((answer.content or "").strip(), answer.reasoning or "", calls_of(answer)) == (content, reasoning, calls)


@law(weight=1.0)
@pytest.mark.parametrize("name", FORMATS)
def test_where_a_text_is_cut_changes_nothing(name: str, seed: int) -> None:
    rnd = random.Random(seed)
    text, *_ = written(name, rnd)
    whole = read(ALL[name], text)
    for at in sorted(rnd.sample(range(len(text) + 1), min(len(text) + 1, 8))):  # other seeds cut elsewhere
        assert read(ALL[name], text[:at], text[at:]) == whole, (text, at)
    assert read(ALL[name], *text) == whole, text


@law(weight=0.5)
def test_damaged_texts_are_read_without_an_error(seed: int) -> None:
    rnd = random.Random(seed)
    name = rnd.choice(FORMATS)
    characters = list(
        "".join(written(rnd.choice((name, name, rnd.choice(FORMATS))), rnd)[0] for _ in range(rnd.randrange(1, 3)))
    )
    for _ in range(rnd.randrange(6)):
        at, end = sorted(rnd.randrange(len(characters) + 1) for _ in range(2))
        edit = rnd.randrange(3)
        if edit == 0:
            del characters[at : min(end, at + 20)]
        elif edit == 1:
            characters[at:at] = rnd.choice(('"', "{", "}", "\\", "<tool_call>", "\x00", "</think>", "[", "\ud800", ","))
        else:
            characters[at:at] = characters[at : min(end, at + 30)]
    text = "".join(characters)
    cuts = sorted(rnd.randrange(len(text) + 1) for _ in range(rnd.randrange(4)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(ALL[name], *pieces) == read(ALL[name], text), (name, text)


def test_reasoning_that_the_prompt_has_opened_is_reasoning() -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    answer = read(ALL["hermes"], "I think", " so.\n</think>\n\nYes.", prompt_end=prompt)
    assert (answer.reasoning, answer.content) == ("I think so.", "Yes.")
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    answer = read(ALL["hermes"], "Yes.", prompt_end=closed)
    assert (answer.reasoning, answer.content) == (None, "Yes.")


def test_arguments_stream_as_they_are_written() -> None:
    parser = ResponseParser(ALL["hermes"], tools=TOOLS)
    seen = [
        [part.text for part in parser.push(piece)]
        for piece in ('<tool_call>{"name": "f", "arg', 'uments": {"a": ', '"b c"', "}}")
    ]
    assert seen == [[], ["f", "{", '"a": '], ['"b c"'], ["}"]] or seen == [[], ["f", '{"a": '], ['"b c"'], ["}"]]


def test_plain_text_is_unchanged_and_a_call_that_is_none_is_text() -> None:
    for text in ("  a < b \n", "<tool", "<tool_call>not json</tool_call>", "<tool_call>{broken"):
        assert read(ALL["hermes"], text).content == text
    without_tools = ResponseParser(ALL["hermes"])
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert "".join(part.text for part in [*without_tools.push(text), *without_tools.finish()]) == text


def test_only_as_many_calls_as_wanted() -> None:
    text = "".join(f'<tool_call>{{"name": "f", "arguments": {{"n": {n}}}}}</tool_call>' for n in range(3))
    assert calls_of(read(ALL["hermes"], text, max_calls=1)) == [("f", {"n": 0})]


def test_values_of_tags_have_the_types_of_the_schema() -> None:
    tags = "<parameter=n>\n3\n</parameter><parameter=deep>null</parameter><parameter=s>5</parameter>"
    text = f"<function=f>{tags}</function>"
    assert calls_of(read(ALL["qwen_xml"], text)) == [("f", {"n": 3, "deep": None, "s": "5"})]


def test_a_template_of_a_model_is_interpreted() -> None:
    spec = {
        "defaults": {"role": "assistant"},
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "thinking": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": ["<turn|>", "<eos>"], "content": "text"},
        },
    }
    text = '<|channel>thought\nwell<channel|><|tool_call>call:f{city:<|"|>Bern: {x}<|"|>,days:3}<tool_call|>'
    answer = read(load_response_template("gemma", spec), text)
    assert (answer.reasoning, calls_of(answer)) == ("well", [("f", {"city": "Bern: {x}", "days": 3})])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fields": {}}, "it has no fields"),
        ({"version": 2}, "version is 2; supported: 1"),
        ({"more": 1}, "unknown keys"),
        ({"start_anchor": []}, "start_anchor is no text"),
        ({"start_anchor_pattern": "a(?<!b)", "start_anchor": None}, "both"),
        ({"fields": {"content": {"open_pattern": r"\bx"}}}, r"has a \b at 0"),
        ({"fields": {"content": {"open_pattern": "x*"}}}, "matches an empty text"),
        ({"fields": {"content": {"content": "yaml"}}}, "content is 'yaml'"),
        (
            {"fields": {"tool_calls": {"open": "x", "content": "json", "transform": {"function": "f"}}}},
            "gives no|is 'f'",
        ),
        ({"fields": {"content": {}, "thinking": {}}}, "more than one field"),
    ],
)
def test_a_wrong_template_is_refused_with_its_place(change: dict[str, Any], message: str) -> None:
    spec = {"start_anchor": "a", "fields": {"content": {}}, **change}
    with pytest.raises(ConfigError, match=message.replace("\\", r"\\")):
        load_response_template("t", spec)


MARKS = {  # texts that tell the families' chat templates apart, without the templates
    "hermes": ["{{ '<tool_call>' }}", '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}'],
    "qwen_xml": ["<tool_call><function=...", "<tool_call>\n<function=f>\n<parameter=p>\nv</parameter> </think>"],
    "glm": ["<tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value> <think></think>"],
    "glm47": ["<tool_call>{name}<arg_key>{k}</arg_key><arg_value>{v}</arg_value></tool_call> </think>"],
    "minimax_m2": ['<minimax:tool_call> <invoke name="tool"> <think></think>'],
    "minimax_m1": ['<tool_calls>\\n{"name": <tool-name>, "arguments": <args>}'],
    "deepseek": ["<｜tool▁call▁begin｜>function ```json </think>"],
    "deepseek_v31": ["<｜tool▁call▁begin｜> </think>"],
    "deepseek_v32": ["set dsml_token = '｜DSML｜' 'function_calls>' 'invoke name=' tool_calls </think>"],
    "deepseek_v4": ["set dsml_token = '｜DSML｜' 'tool_calls>' 'invoke name=' </think>"],
    "seed_oss": ["<seed:tool_call> <function= <parameter="],
    "kimi_k2": ["<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|> </think>"],
    "gemma4": ["'<|tool_call>call:' + name <|channel>thought"],
    "functiongemma": ["<start_function_call>call:{{ name }}"],
    "lfm2": [
        "<|tool_list_start|>",
        "<|tool_call_start|>[",
        "List of tools: [ <|im_start|> keep_past_thinking </think>",
    ],
    "granite": ["respond with <|tool_call|> followed by a JSON list of tools"],
    "granite_20b": ['<function_call> {name: no_function} "parameters": tools'],
    "cohere": ['<|START_ACTION|>[ tool_name "parameters": tools'],
    "command_r": ['Action:\\n```json tool_name "parameters": tools'],
    "functionary_v31": ["<function={name}>{arguments}</function> <|python_tag|>"],
    "functionary_v32": ["{{ '>>>all\\n' + content }}"],
    "xlam": ['[{"name": "tool_call_name", "arguments": {"arg1": 1}}]'],
    "nemotron_v2": ["<TOOLCALL>[ </think>"],
    "tool_calls": ['<tool_calls>[{"name": <think></think>'],
    "functools": ['functools[{"name": [function name]'],
    "internlm2": ["<|action_start|><|plugin|>"],
    "mistral": ["[TOOL_CALLS]"],
    "mistral_args": ["[TOOL_CALLS]name[ARGS] [THINK]"],
    "harmony": ["<|start|>assistant<|channel|>final<|message|>"],
    "llama3_json": ["tools <|python_tag|>", 'tools "parameters": dictionary of argument name and its value'],
    "pythonic": ["[func_name1(params_name1=1)]", "[func_name1(param1=value1)]", "<|python_start|>"],
    "thinking": ["<think></think>"],
}
OTHERS = [  # of families whose format is none of these
    "plain", "tools \"parameters\":", "]<]minimax[>[<tool_call><invoke name=", "<|tools_prefix|> tools",
    "<atem:function_calls> <atem:invoke name=", "<|tool_call:begin|><|tool_call:name|> tools",
]  # fmt: skip


@pytest.mark.parametrize("name", MARKS)
def test_formats_are_recognised_by_marks_that_no_other_family_has(name: str) -> None:
    assert [recognise([text]) for text in MARKS[name]] == [name] * len(MARKS[name])


def test_every_format_has_marks_and_a_template_without_them_has_none() -> None:
    assert [recognise([text]) for text in OTHERS] == [None] * len(OTHERS)
    assert set(MARKS) | {"generic"} == set(TEMPLATES) == set(FORMATS) | {"thinking", "generic"}
