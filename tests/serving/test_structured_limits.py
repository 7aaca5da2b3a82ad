"""The limits of structured output against the compiler itself: what they allow is compiled and followed to its end."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytest.importorskip("llguidance")

from servers import RunningServer

from diptych.control.errors import ErrorRecord, GrammarLimitError, InvalidRequestError
from diptych.runtime.sampling.grammar import Grammars
from diptych.serving import edge_limits
from diptych.serving.answers.grammar.grammar_checker import GrammarChecker
from diptych.serving.answers.grammar.grammar_text import Grammar, GrammarWriter
from diptych.serving.answers.response.bundled_templates import TEMPLATES
from diptych.serving.answers.response.response_template import CallForm, load_response_template
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.protocol import CompletionBody
from diptych.serving.api.structured import wanted_grammar
from diptych.serving.link.engine_options import BUNDLED_MODEL

TOKENIZER = Tokenizer(BUNDLED_MODEL)
WRITER = GrammarWriter(TOKENIZER.special_token_ids)
GRAMMARS = Grammars(TOKENIZER.fast.to_str(), 4096, [0])
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on how fast the machine is."""
    monkeypatch.setattr(edge_limits, "GRAMMAR_PROCESSOR_S", 60.0)
    monkeypatch.setattr(edge_limits, "GRAMMAR_CLOCK_S", 240.0)
    monkeypatch.setattr("diptych.serving.answers.grammar.grammar_checker.REPLY_LIMIT_S", 300.0)


def wanted(**fields: Any) -> Grammar:
    grammar = wanted_grammar(CompletionBody.model_validate({"prompt": "x", **fields}), WRITER)
    assert grammar is not None
    return grammar


def tried(*grammars: Grammar) -> list[str]:
    """Each as a worker is given it. Raises InvalidRequestError for the first that is refused."""

    async def main() -> list[str]:
        checker = GrammarChecker(TOKENIZER.fast.to_str(), [0], 4096)
        try:
            return [(await checker.check(grammar)).text for grammar in grammars]
        finally:
            await checker.close()

    return asyncio.run(main())


def allows(text: str, answer: str) -> bool:
    """Whether a grammar allows an answer, token by token as a worker asks, and its end. Raises ConstraintError."""
    constraint = GRAMMARS.constraint(text, forces=False)
    for token in [*TOKENIZER.encode(answer), 0]:
        mask = constraint.allowed()
        assert mask is not None
        if not mask[token // 8] >> token % 8 & 1:
            return False
        if token:
            constraint.accept([token])
    return True


def choices_of(shape: str, number: int) -> list[str]:
    """``number`` texts that differ."""
    numbers, chance = range(number), random.Random(number)
    return {
        "numbered": lambda: [f"choice {n}" for n in numbers],
        "same begin": lambda: [f"{'a' * 20}{n:05d}" for n in numbers],
        "same end": lambda: [f"{n:05d}{'a' * 20}" for n in numbers],
        "each begins the next": lambda: [LETTERS[n % 62] + LETTERS[n // 62 % 3] * (n // 186 + 1) for n in numbers],
        "two letters": lambda: [f"{n:013b}" for n in numbers],
        "random": lambda: ["".join(chance.choice(LETTERS) for _ in range(26)) for n in numbers],
        "two bytes": lambda: [chr(0x400 + n // 64) + chr(0x400 + n % 64) for n in numbers],
    }[shape]()


@pytest.mark.parametrize(
    "shape",
    ["numbered", "same begin", "same end", "each begins the next", "two letters", "random", "two bytes"],
)
def test_as_many_choices_as_the_limit_are_followed_and_one_more_is_refused(shape: str) -> None:
    choices = choices_of(shape, edge_limits.CHOICES)
    assert len(set(choices)) == edge_limits.CHOICES
    [text] = tried(wanted(guided_choice=choices))
    for choice in [*choices[:3], *choices[-3:], *choices[:: len(choices) // 11]]:
        assert allows(text, choice)
    for other in ("", choices[-1] + "?", "?" + choices[0]):
        assert not allows(text, other)
    with pytest.raises(InvalidRequestError, match=f"guided_choice is no list of 1 to {edge_limits.CHOICES} texts"):
        wanted(guided_choice=[*choices, "one more"])


def test_choices_are_these_texts_and_no_others() -> None:
    chance = random.Random(3)
    alphabet = 'ab"\\/\n{é€😀'
    texts = ["".join(chance.choice(alphabet) for _ in range(chance.randrange(4))) for _ in range(60)]
    for number in (1, 2, 7, 30):
        choices = chance.sample(texts, number)
        [text] = tried(wanted(guided_choice=choices))
        assert [allows(text, other) for other in texts] == [other in choices for other in texts]


@pytest.mark.parametrize("values", ["texts", "numbers", "both"])
def test_a_schema_of_as_many_parts_as_the_limit_is_followed_and_one_more_is_refused(values: str) -> None:
    number = edge_limits.SCHEMA_PARTS - 2  # besides the schema and the list
    kinds: dict[str, list[str | int]] = {
        "texts": [f"v{n}" for n in range(number)],
        "numbers": list(range(number)),
        "both": [n if n % 2 else f"v{n}" for n in range(number)],
    }
    [text] = tried(wanted(guided_json={"enum": kinds[values]}))
    assert all(allows(text, json.dumps(value)) for value in kinds[values][:: number // 9])
    assert not allows(text, json.dumps(number))
    with pytest.raises(InvalidRequestError, match=f"guided_json has more than {edge_limits.SCHEMA_PARTS} parts"):
        wanted(guided_json={"enum": [*kinds[values], -1]})


@pytest.mark.parametrize(
    ("begin", "end", "wrap"),
    [
        ("[", "]", lambda inner: {"type": "array", "items": inner}),
        ("", "", lambda inner: {"allOf": [inner]}),
        (
            '{"a": ',
            "}",
            lambda inner: {
                "type": "object",
                "properties": {"a": inner},
                "required": ["a"],
                "additionalProperties": False,
            },
        ),
    ],
)
def test_a_schema_as_deep_as_the_limit_is_followed_and_one_deeper_refused(
    begin: str, end: str, wrap: Callable[[Any], Any]
) -> None:
    schema, times = {"type": "integer"}, 0
    levels = 1 if begin == "[" else 2
    while (times + 1) * levels <= edge_limits.SCHEMA_DEPTH:
        schema, times = wrap(schema), times + 1
    [text] = tried(wanted(guided_json=schema))
    assert allows(text, begin * times + "7" + end * times)
    with pytest.raises(InvalidRequestError, match=f"is nested more than {edge_limits.SCHEMA_DEPTH} deep"):
        wanted(guided_json=wrap(schema))


@pytest.mark.parametrize("letter", ["a", "é", "€", "😀"])
def test_a_grammar_of_as_many_bytes_as_the_limit_is_followed_and_one_more_is_refused(letter: str) -> None:
    text = "start: /x+/\n// "
    text += letter * ((edge_limits.GRAMMAR_BYTES - len(text)) // len(letter.encode()))
    text += "a" * (edge_limits.GRAMMAR_BYTES - len(text.encode()))
    [compiled] = tried(wanted(guided_grammar=text))
    assert allows(compiled, "xxx")
    with pytest.raises(InvalidRequestError, match=f"of {edge_limits.GRAMMAR_BYTES + 1} bytes; the limit is"):
        assert wanted(guided_grammar=text + "a").text


@pytest.mark.parametrize("repeated", ["a", "[ab]", "(a|b)", "ab|"])
def test_a_regular_expression_as_long_as_a_grammar_may_be_is_followed(repeated: str) -> None:
    room = edge_limits.GRAMMAR_BYTES - len(wanted(guided_regex="a").text) + 1
    pattern = repeated * (room // len(repeated))
    [text] = tried(wanted(guided_regex=pattern[: -1 if pattern.endswith("|") else None]))
    constraint = GRAMMARS.constraint(text, forces=False)
    [token] = TOKENIZER.encode("a")
    constraint.accept([token])
    assert constraint.allowed()


def test_calls_of_hundreds_of_tools_are_followed() -> None:
    template = load_response_template("generic", TEMPLATES["generic"])
    assert template.calls is not None
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    schemas = {f"tool_{number}": {**parameters, "additionalProperties": False} for number in range(300)}
    calls = WRITER.calls(template.calls, schemas, None)
    assert not calls.left_out
    [text] = tried(calls)
    for name in ("tool_0", "tool_150", "tool_299"):
        assert allows(text, f'<tool_call>\n{{"name": "{name}", "arguments": {{"x": 1}}}}\n</tool_call>')


CALLED = ["generic", "hermes", "llama3_json", "mistral", "qwen_xml", "pythonic"]
WIDE_SCHEMA = {
    "type": "object",
    "properties": {f"field_{n}": {"type": "string", "description": "of a tool " * 20} for n in range(4)},
    "required": ["field_0"],
    "additionalProperties": False,
}


def form_of(name: str) -> CallForm:
    form = load_response_template(name, TEMPLATES[name]).calls
    assert form is not None
    return form


@pytest.mark.parametrize("name", [name for name in CALLED if name in TEMPLATES])
def test_as_many_tools_as_a_request_may_have_can_be_called_and_what_does_not_fit_is_named(name: str) -> None:
    form, number = form_of(name), edge_limits.TOOLS
    schemas = {f"tool_of_a_long_name_{n}": WIDE_SCHEMA for n in range(number)}
    grammar = WRITER.calls(form, schemas, 1)
    assert grammar.num_bytes <= edge_limits.GRAMMAR_BYTES
    assert 0 < len(grammar.left_out) < number and grammar.num_bytes > 0.8 * edge_limits.GRAMMAR_BYTES
    assert set(grammar.left_out) <= {f"tools.{n}.function.parameters" for n in range(number)}
    again = WRITER.calls(form, schemas, 1)
    assert (again.text, again.left_out) == (grammar.text, grammar.left_out)  # the same tools, each time


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_of_tools_that_do_not_fit_the_names_are_enforced_and_the_longest_schemas_are_not() -> None:
    form, number = form_of("generic"), edge_limits.TOOLS
    short = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    schemas = {f"tool_{n}": {**(short if n < 8 else WIDE_SCHEMA), "additionalProperties": False} for n in range(number)}
    grammar = WRITER.calls(form, schemas, None)
    assert not {f"tools.{n}.function.parameters" for n in range(8)} & set(grammar.left_out)
    [text] = tried(grammar)
    opened = int(grammar.left_out[0].split(".")[1])
    assert allows(text, call_of("tool_0", '{"x": 1}')) and not allows(text, call_of("tool_0", '{"x": "1"}'))
    for arguments in ("{}", '{"field_0": 7}', '{"other": [true]}'):
        assert allows(text, call_of(f"tool_{opened}", arguments))
    assert not allows(text, call_of(f"tool_{opened}", "7"))
    assert not allows(text, call_of(f"tool_{number}", "{}"))


def test_strict_tools_that_do_not_fit_are_refused_with_their_number_their_size_and_the_limit() -> None:
    form = form_of("generic")
    schemas = {f"tool_{n}": WIDE_SCHEMA for n in range(edge_limits.TOOLS)}
    words = (
        rf"1024 tools, 1000 of them with strict schemas, make a grammar of \d+ bytes; .* {edge_limits.GRAMMAR_BYTES}"
    )
    with pytest.raises(InvalidRequestError, match=words) as refused:
        WRITER.calls(form, schemas, None, list(schemas)[:1000])
    assert refused.value.param == "tools"
    strict = list(schemas)[:20]
    grammar = WRITER.calls(form, schemas, None, strict)  # those of a few are kept, whatever else goes
    assert not {f"tools.{n}.function.parameters" for n in range(20)} & set(grammar.left_out)


def test_a_few_tools_keep_their_schemas_and_a_form_that_is_wanted_beside_counts() -> None:
    form = form_of("generic")
    schemas = {f"tool_{n}": WIDE_SCHEMA for n in range(60)}
    assert not WRITER.calls(form, schemas, None).left_out
    beside = WRITER.calls(form, schemas, None, beside=edge_limits.GRAMMAR_BYTES - 30_000)
    assert beside.left_out and beside.num_bytes <= 30_000


# Alternatives of a rule are items of the parser's row, of which there may be 2,000: at once, or after two choices.
MANY = "many: " + " | ".join(f'"{number:04d}"' for number in range(2001)) + "\n"
WIDE = f"start: many\n{MANY}"
LATE = f'start: ("a" | "b") ("c" | "d") many\n{MANY}'


def test_a_grammar_whose_answers_all_fail_at_their_first_choice_is_refused_with_the_limit() -> None:
    with pytest.raises(InvalidRequestError, match=r"^guided_grammar: .*max is 2000") as refused:
        tried(wanted(guided_grammar=WIDE))
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "guided_grammar", "invalid_grammar")


def test_a_grammar_that_fails_in_an_answer_is_the_error_of_that_answer_alone() -> None:
    [text] = tried(wanted(guided_grammar=LATE))
    other = GRAMMARS.constraint(text)
    with pytest.raises(GrammarLimitError, match="max is 2000") as failed:
        allows(text, "ac0007")
    assert (failed.value.status, failed.value.code) == (400, "grammar_too_complex")
    again = ErrorRecord.of(failed.value).exception()
    assert (again.status, again.code, again.message) == (400, "grammar_too_complex", failed.value.message)
    assert other.allowed()
    assert allows(tried(wanted(guided_regex="a+"))[0], "aaa")


def test_a_server_answers_400_where_an_answer_meets_the_limit_and_its_other_answers_go_on(
    server: RunningServer,
) -> None:
    fields = {"prompt": "x", "max_tokens": 24, "temperature": 0}

    async def main() -> tuple[httpx.Response, httpx.Response, str, httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            late = {**fields, "guided_grammar": LATE}
            plain, failed, streamed = await asyncio.gather(
                client.post("/v1/completions", json=fields),
                client.post("/v1/completions", json=late),
                client.post("/v1/completions", json={**late, "stream": True}),
            )
            return plain, failed, streamed.text, await client.post("/v1/completions", json=fields)

    plain, failed, streamed, after = asyncio.run(main())
    error = failed.json()["error"]
    assert (failed.status_code, error["code"], error["type"]) == (400, "grammar_too_complex", "invalid_request_error")
    assert "max is 2000" in error["message"]
    events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    assert [event["error"]["code"] for event in events if "error" in event] == ["grammar_too_complex"]
    assert plain.json()["choices"] == after.json()["choices"] and plain.status_code == 200
