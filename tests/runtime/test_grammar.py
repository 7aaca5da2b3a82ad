"""Answers under a grammar: whatever tokens are drawn, they follow it; forced, undone or replayed, it is the same."""

import json
import os
import random
import threading

import jsonschema
import pytest

pytest.importorskip("llguidance")

from diptych.control.errors import ConstraintError
from diptych.runtime.sampling.grammar import GrammarConstraint, Grammars
from diptych.serving.answers.grammar.grammar_text import Grammar, GrammarWriter, with_schemas
from diptych.serving.answers.response.bundled_templates import TEMPLATES
from diptych.serving.answers.response.response_parser import ReadAnswer, ResponseParser
from diptych.serving.answers.response.response_template import load_response_template
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.link.engine_options import BUNDLED_MODEL

TOKENIZER = Tokenizer(BUNDLED_MODEL)
EOS = (0, 2)
WRITER = GrammarWriter(TOKENIZER.special_token_ids)
FLAGS = [f"field_{number}" for number in range(5)]
SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", {"a": None}]}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": "x"}]},
    {
        "type": "object",
        "properties": {name: {"$ref": "#/$defs/flag"} for name in FLAGS},
        "required": FLAGS,
        "additionalProperties": False,
        "$defs": {"flag": {"type": "boolean"}},
    },
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER.fast.to_str(), 4096, EOS)


def compiled(grammar: Grammar) -> str:
    """The text that a worker is given."""
    return with_schemas(grammar.text)[0]


def tokens_of(mask: bytes | None) -> list[int]:
    assert mask is not None
    return [8 * index + bit for index, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


def walk(constraint: GrammarConstraint, rnd: random.Random, limit: int = 400) -> list[int]:
    """Tokens drawn at random among those that are allowed, up to the end of the sequence."""
    tokens: list[int] = []
    while len(tokens) < limit:
        forced = constraint.forced(99)
        choices = tokens_of(constraint.allowed()) if not forced else []
        ends = [token for token in EOS if token in choices]
        token = forced[0] if forced else rnd.choice(ends if ends and rnd.random() < 0.5 else choices)
        if token in EOS:
            return tokens
        if not forced:
            assert constraint.count_allowed([token, *EOS]) >= 1
        constraint.accept([token])
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_any_tokens_that_are_allowed_make_a_valid_answer(grammars: Grammars, number: int) -> None:
    grammar = compiled(WRITER.schema(SCHEMAS[number], "x"))
    for seed in range(8):
        tokens = walk(grammars.constraint(grammar), random.Random(seed))
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), SCHEMAS[number])


def test_forced_tokens_stay_forced_and_nothing_else_is_allowed_by_their_text(grammars: Grammars) -> None:
    constraint = grammars.constraint(compiled(WRITER.schema(SCHEMAS[3], "x")))
    forced = list(constraint.forced(99))
    assert TOKENIZER.decode(forced).startswith('{"field_0":')
    assert constraint.forced(2) == forced[:2]
    for number, token in enumerate(forced):
        assert list(constraint.forced(99)) == forced[number:]
        constraint.accept([token])
    off = grammars.constraint(compiled(WRITER.schema(SCHEMAS[3], "x")), forces=False)
    assert off.forced(99) == ()


def test_what_is_undone_or_replayed_leaves_no_trace(grammars: Grammars) -> None:
    grammar = compiled(WRITER.schema(SCHEMAS[0], "x"))
    rnd = random.Random(5)
    tokens = walk(grammars.constraint(grammar), rnd)
    constraint = grammars.constraint(grammar)
    for number, token in enumerate(tokens):
        mask, forced = constraint.allowed(), list(constraint.forced(9))
        fresh = grammars.constraint(grammar)
        fresh.accept(tokens[:number])
        assert (fresh.allowed(), list(fresh.forced(9))) == (mask, forced)
        count = rnd.randrange(len(tokens) - number)
        constraint.accept(tokens[number : number + count])
        constraint.rollback(count)
        assert (constraint.allowed(), list(constraint.forced(9))) == (mask, forced)
        constraint.accept([token])
    constraint.accept([EOS[0]])
    constraint.rollback(1)
    assert EOS[0] in tokens_of(constraint.allowed())


def test_a_token_that_is_not_allowed_is_refused(grammars: Grammars) -> None:
    constraint = grammars.constraint(WRITER.choice(["yes", "no"], "x").text)
    wrong = TOKENIZER.encode("maybe", add_special_tokens=False)
    assert constraint.count_allowed(wrong) == 0
    with pytest.raises(ConstraintError):
        constraint.accept(wrong)


def test_a_grammar_that_does_not_compile_is_an_error_of_its_request(grammars: Grammars) -> None:
    with pytest.raises(ConstraintError, match="does not compile"):
        grammars.constraint("start: nothing")


@pytest.mark.parametrize("name", [name for name, spec in TEMPLATES.items() if "calls" in spec])
def test_calls_that_a_grammar_allows_are_read_as_calls(grammars: Grammars, name: str) -> None:
    template = load_response_template(name, TEMPLATES[name])
    assert template.calls is not None
    tools = {"f": SCHEMAS[0], "g.h": SCHEMAS[3]}
    for seed, max_calls in ((1, None), (2, 1)):
        tokens = walk(
            grammars.constraint(compiled(WRITER.calls(template.calls, tools, max_calls, tools))), random.Random(seed)
        )
        parser, answer = ResponseParser(template, tools=tools), ReadAnswer()
        answer.add([*parser.push(TOKENIZER.decode(tokens)), *parser.finish()])
        assert answer.content is None
        assert answer.calls and (max_calls is None or len(answer.calls) == 1)
        for call in answer.calls:
            jsonschema.validate(json.loads(call.arguments), tools[call.name])
    form, free = template.calls, grammars.constraint(compiled(WRITER.text_with_calls(template.calls, tools)))
    head = form.first + form.begin
    right, wrong = ('"f"', '"nope"') if form.quotes_name else ("f", "nope")
    for called, is_right in ((right, True), (wrong, False)):
        before = "" if form.is_whole else "Well then. "
        tokens = TOKENIZER.encode(f"{before}{head}{called}{form.between}", add_special_tokens=False)
        assert (free.count_allowed(tokens) == len(tokens)) == is_right


@pytest.mark.skipif(not hasattr(os, "setpriority"), reason="a niceness for each thread")
def test_the_thread_that_compiles_gives_way_to_the_others(grammars: Grammars) -> None:
    thread = grammars._pool.submit(threading.get_native_id).result()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert os.getpriority(os.PRIO_PROCESS, thread) == min(19, own + 10)
