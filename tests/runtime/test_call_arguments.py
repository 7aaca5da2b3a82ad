"""Calls that are written in tags or in Python: whatever tokens a grammar allows are read as values of the schema."""

import json
import random
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance")

from diptych.control.errors import InvalidRequestError
from diptych.runtime.sampling.grammar import Grammars
from diptych.serving.answers.grammar.call_arguments import python_literal
from diptych.serving.answers.response.bundled_templates import TEMPLATES
from diptych.serving.answers.response.response_parser import ReadAnswer, ResponseParser
from diptych.serving.answers.response.response_template import CallForm, ResponseTemplate, load_response_template
from tests.runtime.test_grammar import EOS, TOKENIZER, WRITER, walk

KINDS = ("qwen_xml", "glm", "pythonic", "gemma4")  # one format for each way to write arguments
OTHERS = ("functiongemma", "glm47", "minimax_m2", "seed_oss", "lfm2")
FORMATS = (*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS))
NODE = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["name"],
    "additionalProperties": False,
}
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "short": {"type": "string", "minLength": 1, "maxLength": 4, "description": "of few characters"},
    "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "default": None},
    "color": {"enum": ["red", 'it\'s "blue"', "a\nb", "null"]},
    "level": {"enum": [1, 2, 3]},
    "fixed": {"const": "x"},
    "count": {"type": "integer", "minimum": 3, "maximum": 40},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "none": {"type": "null"},
    "either": {"type": ["integer", "boolean"]},
    "old": {"type": "integer", "nullable": True},
    "tags": {"type": "array", "items": {"enum": ["p", "q"]}, "minItems": 1, "maxItems": 3},
    "pair": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
    "deep": {
        "type": "object",
        "properties": {"x": {"type": "boolean"}, "y": {"type": "array", "items": {"type": "null"}, "maxItems": 1}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "node": {"$ref": "#/$defs/node"},
    "kind": {"$ref": "#/$defs/kind"},
    "single": {"allOf": [{"$ref": "#/$defs/kind"}]},
}


def schema_of(names: list[str], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: PROPERTIES[name] for name in names},
        "required": required,
        "$defs": {"node": NODE, "kind": {"type": "string", "enum": ["k1", "k2"]}},
    }


def template_of(name: str) -> tuple[ResponseTemplate, CallForm]:
    template = load_response_template(name, TEMPLATES[name])
    assert template.calls is not None
    return template, template.calls


def read(template: ResponseTemplate, text: str, tools: Any) -> ReadAnswer:
    parser, answer = ResponseParser(template, tools=tools), ReadAnswer()
    answer.add([*parser.push(text), *parser.finish()])
    return answer


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER.fast.to_str(), 4096, EOS)


def check(grammars: Grammars, name: str, tools: dict[str, Any], seed: int) -> bool:
    """Draw an answer. Returns whether it ended (its calls are then checked)."""
    template, form = template_of(name)
    constraint = grammars.constraint(WRITER.calls(form, tools, 2).text)
    tokens = walk(constraint, random.Random(seed), 600)
    if not set(EOS) & set(_allowed(constraint)):
        return False
    text = TOKENIZER.decode(tokens)
    answer = read(template, text, tools)
    assert answer.content is None and answer.calls, text
    for call in answer.calls:
        jsonschema.validate(json.loads(call.arguments), tools[call.name])
    return True


def _allowed(constraint: Any) -> list[int]:
    mask = constraint.allowed()
    return [token for token in EOS if mask[token // 8] >> token % 8 & 1]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("key", [key for key in PROPERTIES if key != "old"])  # jsonschema knows no nullable
def test_every_kind_of_value_is_read_as_its_schema_says(grammars: Grammars, name: str, key: str) -> None:
    num_done = 0
    for seed in range(4):
        num_done += check(grammars, name, {"f": schema_of([key], [key])}, seed)
        if num_done:
            break
    assert num_done or key in ("text", "ratio")  # texts without an end may go on


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
@pytest.mark.parametrize("key", [key for key in PROPERTIES if key != "old"])
def test_many_values_of_every_kind_are_read_as_their_schema_says(grammars: Grammars, name: str, key: str) -> None:
    for seed in range(20):
        check(grammars, name, {"f": schema_of([key], [key])}, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_many_sets_of_properties_come_in_their_order(grammars: Grammars, name: str) -> None:
    rnd = random.Random(8)
    bounded = [key for key in PROPERTIES if key not in ("text", "ratio", "old", "either")]
    for seed in range(40):
        names = rnd.sample(bounded, rnd.randrange(1, 6))
        required = [key for key in names if rnd.random() < 0.5]
        check(grammars, name, {"f": schema_of(names, required), "g.h": schema_of([], [])}, seed)


@pytest.mark.parametrize("name", FORMATS)
def test_properties_come_in_their_order_and_optional_ones_may_be_left_out(grammars: Grammars, name: str) -> None:
    rnd, num_done = random.Random(7), 0
    bounded = [key for key in PROPERTIES if key not in ("text", "ratio", "old", "either")]
    for seed in range(6):
        names = rnd.sample(bounded, rnd.randrange(1, 6))
        required = [key for key in names if rnd.random() < 0.5]
        num_done += check(grammars, name, {"f": schema_of(names, required), "g.h": schema_of([], [])}, seed)
    assert num_done >= 3


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("qwen_xml", {"text": "a < b:\n  </param>\n", "count": "7"}, {"text": "a < b:\n  </param>\n", "count": 7}),
        ("qwen_xml", {"text": "", "maybe": "null"}, {"text": "", "maybe": None}),
        ("qwen_xml", {"text": "null", "node": '{"name": "a"}'}, {"text": "null", "node": {"name": "a"}}),
        ("qwen_xml", {"text": "x", "level": "4"}, None),
        ("qwen_xml", {"text": "x", "short": "12345"}, None),
        ("qwen_xml", {"text": "x", "unknown": "1"}, None),
        ("qwen_xml", {"count": "7"}, None),
        ("pythonic", {"text": "'it\\'s'", "maybe": "None"}, {"text": "it's", "maybe": None}),
        ("pythonic", {"text": '"a\\nb"', "old": "None"}, {"text": "a\nb", "old": None}),
        ("pythonic", {"text": "''", "deep": '{"x": True}'}, {"text": "", "deep": {"x": True}}),
        (
            "pythonic",
            {"text": '"x"', "node": '{"name": "a", "next": {"name": "b"}}'},
            {"text": "x", "node": {"name": "a", "next": {"name": "b"}}},
        ),
        ("pythonic", {"text": '"x"', "level": "4"}, None),
        ("pythonic", {"text": '"x"', "flag": "true"}, None),
        ("pythonic", {"flag": "True"}, None),
        ("gemma4", {"text": '<|"|>it\'s {x}\n<|"|>', "maybe": "null"}, {"text": "it's {x}\n", "maybe": None}),
        ("gemma4", {"text": '<|"|><|"|>', "tags": '[<|"|>p<|"|>,<|"|>q<|"|>]'}, {"text": "", "tags": ["p", "q"]}),
        (
            "gemma4",
            {"text": '<|"|>x<|"|>', "deep": "{x:true,y:[null]}"},
            {"text": "x", "deep": {"x": True, "y": [None]}},
        ),
        ("gemma4", {"text": '<|"|>x<|"|>', "short": '<|"|>12345<|"|>'}, None),
        ("gemma4", {"text": "x"}, None),
        ("gemma4", {"count": "7"}, None),
        ("glm", {"text": "a < b\n</arg>", "count": "7"}, {"text": "a < b\n</arg>", "count": 7}),
        ("glm", {"text": "x", "level": "4"}, None),
    ],
)
def test_what_a_model_writes_passes_if_it_is_right(
    grammars: Grammars, name: str, arguments: dict[str, str], expected: dict[str, Any] | None
) -> None:
    template, form = template_of(name)
    tools = {"f": schema_of(list(PROPERTIES), ["text"])}
    if name == "pythonic":
        text = f"[f({', '.join(f'{key}={value}' for key, value in arguments.items())})]"
    elif name == "gemma4":
        text = f"<|tool_call>call:f{{{','.join(f'{key}:{value}' for key, value in arguments.items())}}}<tool_call|>"
    elif name == "glm":
        pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
        text = f"<tool_call>f\n{''.join(pairs)}</tool_call>"
    else:
        tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        text = f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>"
    constraint = grammars.constraint(WRITER.calls(form, tools, None).text)
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    assert (constraint.count_allowed(tokens) == len(tokens)) == (expected is not None)
    if expected is not None:
        [call] = read(template, text, tools).calls
        assert json.loads(call.arguments) == expected


@pytest.mark.parametrize("name", ["qwen_xml", "pythonic"])
def test_tools_without_a_schema_take_any_arguments_and_strict_ones_follow_theirs_in_free_text(
    grammars: Grammars, name: str
) -> None:
    _, form = template_of(name)
    schemas = {"free": {"type": "object"}, "strict": schema_of(["count"], ["count"])}
    constraint = grammars.constraint(WRITER.text_with_calls(form, schemas).text)
    if name == "pythonic":
        right = ["Hello [you](x).", '[free(a="x", b=[1, {"c": None}]), strict(count=5)]']
        wrong = ["[strict(count=50)]", "  [strict(count=50)]", "[free(class=1)]"]
    else:
        call = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
        some = "<parameter=a>\nx\n</parameter>\n<parameter=b>\n\n</parameter>\n"
        right = [
            "Hello.",
            "I call. " + call.format("free", some),
            call.format("strict", "<parameter=count>\n5\n</parameter>\n"),
        ]
        wrong = [call.format("strict", "<parameter=count>\n50\n</parameter>\n"), "<function=strict>\n"]
    for texts, is_right in ((right, True), (wrong, False)):
        for text in texts:
            tokens = TOKENIZER.encode(text, add_special_tokens=False)
            assert (constraint.count_allowed(tokens) == len(tokens)) == is_right, text


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"not": {}}}}, "properties.a"),
        ({"properties": {"a": False}}, "properties.a"),
        ({"properties": {"a": {"type": "text"}}}, "properties.a.type"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, "properties.a"),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}, "$defs.a.$ref"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "properties.a.$ref"),
        ({"properties": {"a": {"$ref": "http://x/y"}}}, "properties.a.$ref"),
        ({"properties": {"a": {"type": "string", "minLength": 5, "maxLength": 2}}}, "properties.a"),
        ({"properties": {"a": {"type": "string", "minLength": -1}}}, "properties.a.minLength"),
        ({"additionalProperties": {"type": "string"}}, "additionalProperties"),
        ({"minProperties": 1}, "minProperties"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_with_its_path_where_the_tool_is_strict(
    name: str, schema: Any, path: str
) -> None:
    _, form = template_of(name)
    with pytest.raises(InvalidRequestError) as caught:
        assert WRITER.calls(form, {"f": schema}, None, ["f"])
    assert str(caught.value.param) == f"tools.0.function.parameters.{path}"


@pytest.mark.parametrize("name", FORMATS)
def test_what_cannot_be_enforced_is_left_out_and_named_where_the_tool_is_not_strict(name: str) -> None:
    _, form = template_of(name)
    schema = {"properties": {"a": {"type": "string"}}, "minProperties": 1, "additionalProperties": {"type": "string"}}
    left_out = WRITER.calls(form, {"f": schema}, None).left_out
    assert set(left_out) <= {
        f"tools.0.function.parameters.{keyword}" for keyword in ("minProperties", "additionalProperties")
    }
    assert left_out


def test_a_choice_of_required_properties_is_enforced(grammars: Grammars) -> None:
    schema = {
        "properties": {"a": {"type": "integer"}, "b": {"oneOf": [{"type": "integer"}]}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    }
    constraint = grammars.constraint(WRITER.calls(template_of("pythonic")[1], {"f": schema}, None, ["f"]).text)
    for text, is_right in (("[f(a=1)]", True), ("[f(b=1)]", True), ("[f(a=1, b=2)]", True), ("[f()]", False)):
        tokens = TOKENIZER.encode(text, add_special_tokens=False)
        assert (constraint.count_allowed(tokens) == len(tokens)) == is_right, text


def test_names_that_a_format_cannot_write_are_refused() -> None:
    tags, python = template_of("qwen_xml")[1], template_of("pythonic")[1]
    for form, tools in (
        (tags, {"f": {"properties": {"a>b": {}}}}),
        (tags, {"f": {"properties": {" a": {}}}}),
        (tags, {"f": {"properties": {"a": {"enum": ["</parameter>"]}}}}),
        (tags, {"f": {"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}}),
        (python, {"f": {"properties": {"a-b": {}}}}),
        (python, {"f": {"properties": {"class": {}}}}),
        (python, {"f": {"properties": {"a": {"type": "string", "pattern": "x"}}}}),
        (python, {"f-g": {}}),
        (python, {"f.if": {}}),
    ):
        with pytest.raises(InvalidRequestError, match=r"tools\.0\.function"):
            assert WRITER.calls(form, tools, None, tools).text


@pytest.mark.parametrize("name", FORMATS)
def test_references_lead_into_the_schema_of_their_own_tool(grammars: Grammars, name: str) -> None:
    tools = {
        tool: {"properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"], "$defs": {"x": {"enum": [value]}}}
        for tool, value in (("f", "one"), ("g", "two"))
    }
    for seed in range(6):
        assert check(grammars, name, tools, seed)


def test_many_alternatives_and_references_to_references_end_soon() -> None:
    defs = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 4} for at in range(40)} | {"d40": {"type": "null"}}
    tools: Any = {"f": {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": defs}}
    for name in ("qwen_xml", "pythonic"):
        with pytest.raises(InvalidRequestError, match="through over 64 parts"):
            WRITER.calls(template_of(name)[1], tools, None, tools)
        assert WRITER.calls(template_of(name)[1], tools, None).left_out
    text = "<tool_call>\n<function=f>\n<parameter=a>\nnull\n</parameter>\n</function>\n</tool_call>"
    assert read(template_of("qwen_xml")[0], text, tools).calls


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^[a-c]+$", "abc", "abd"),
        (r"b+", "abba", "aca"),
        (r"^a", "ab", "ba"),
        (r"a\$$", "xa$", "a"),
        (r"x|y", "ay", "ab"),
        (r"^[$^|]$", "|", "a"),
        (r"^a/b\n$", "a/b\n", "a/b"),
    ],
)
def test_patterns_hold_for_the_text_of_a_tag(grammars: Grammars, pattern: str, right: str, wrong: str) -> None:
    _, form = template_of("qwen_xml")
    tools = {"f": {"properties": {"a": {"type": "string", "pattern": pattern, "maxLength": 9}}, "required": ["a"]}}
    constraint = grammars.constraint(WRITER.calls(form, tools, None).text)
    for text, is_right in ((right, True), (wrong, False)):
        whole = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
        tokens = TOKENIZER.encode(whole, add_special_tokens=False)
        assert (constraint.count_allowed(tokens) == len(tokens)) == is_right


def test_values_of_json_are_written_as_python_writes_them() -> None:
    assert python_literal({"a": [True, None, 1.5, "x\"\n'"]}) == '{"a": [True, None, 1.5, "x\\"\\n\'"]}'
