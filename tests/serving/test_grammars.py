"""Grammars before a worker has them: written, tried in a process of their own, and waited for beside the steps."""

import asyncio
import contextlib
import select
from typing import Any

import psutil
import pytest

pytest.importorskip("llguidance")

from diptych.control.commands import Drop, Prefill, Reserve, Serve
from diptych.control.errors import InvalidRequestError, UnavailableError
from diptych.control.request import SamplingParams
from diptych.serving import edge_limits
from diptych.serving.answers.grammar.grammar_checker import GrammarChecker
from diptych.serving.answers.grammar.grammar_text import Grammar, GrammarWriter, Thinking, with_schemas
from diptych.serving.answers.response.bundled_templates import TEMPLATES
from diptych.serving.answers.response.response_template import load_response_template
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.protocol import CompletionBody
from diptych.serving.api.structured import wanted_grammar
from diptych.serving.link.engine_options import BUNDLED_MODEL
from diptych.serving.link.messages import AttemptTokens, Order, pack_command, pack_token_ids
from diptych.serving.worker.awaited_grammars import AwaitedGrammars

TOKENIZER = Tokenizer(BUNDLED_MODEL)
WRITER = GrammarWriter(TOKENIZER.special_token_ids)
GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def wanted(**fields: Any) -> Grammar | None:
    return wanted_grammar(CompletionBody.model_validate({"prompt": "x", **fields}), WRITER)


def test_each_way_to_ask_for_a_form_is_a_grammar() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": GOOD}}
    texts = [
        wanted(response_format=schema),
        wanted(structured_outputs={"json": GOOD}),
        wanted(guided_json=GOOD),
        wanted(guided_json='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], '
               '"additionalProperties": false}'),
    ]  # fmt: skip
    assert len({with_schemas(grammar.text)[0] for grammar in texts if grammar is not None}) == 1
    assert wanted(response_format={"type": "text"}, structured_outputs=None, guided_json=None) is None
    for fields in (
        {"guided_regex": "a/b"},
        {"guided_choice": ["a", 'b"']},
        {"response_format": {"type": "json_object"}},
    ):
        assert wanted(**fields) is not None
    foreign = wanted(guided_grammar="start: /x/")
    assert foreign is not None and foreign.text == "start: /x/"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_a_wrong_wish_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        wanted(**fields)
    assert caught.value.param == param


def test_what_is_too_deep_or_too_long_is_refused_before_it_is_tried() -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    with pytest.raises(InvalidRequestError, match=r"^x\.properties\.a\.properties.*nested more than 100 deep"):
        WRITER.schema(deep, "x")
    with pytest.raises(InvalidRequestError, match="the limit is 131072"):
        assert WRITER.schema({"enum": ["x" * 2**21]}, "x").text
    with pytest.raises(InvalidRequestError, match=r"^x has more than 10000 parts"):
        WRITER.schema({"type": "string", "enum": [str(n) for n in range(30_000)]}, "x")


def check_all(grammars: list[Grammar], limit: Any = None) -> list[str]:
    """What becomes of each: "" or the error."""

    async def main() -> list[str]:
        checker = GrammarChecker(TOKENIZER.fast.to_str(), [0, 2], 4096)
        found = []
        for grammar in grammars:
            try:
                await checker.check(grammar)
                found.append("")
            except InvalidRequestError as error:
                found.append(f"{error.param} {error.message}")
        await checker.close()
        return found

    return asyncio.run(main())


def test_grammars_are_tried_and_errors_have_their_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "GRAMMAR_PROCESSOR_S", 0.1)
    monkeypatch.setattr(edge_limits, "GRAMMAR_CLOCK_S", 240.0)  # what is slow waits for everybody else
    nested = {"properties": {"a": {"items": {"$ref": "#/$defs/b"}}}, "$defs": {"b": {"type": "strin"}}}
    slow = {"type": "object", "properties": {f"k{n}": {"type": "string", "maxLength": 1000} for n in range(2000)}}
    thinking = GrammarWriter({"</think>": 2}, Thinking("<think>", "</think>", is_open=True))
    good = [WRITER.schema(GOOD, "x"), thinking.schema(GOOD, "x"), Grammar("", foreign='root ::= "a" | "b"')]
    twice = {"properties": {"x": {"type": "array", "uniqueItems": True}}}
    bad = [
        (WRITER.schema(nested, "f.schema"), "f.schema.$defs.b.type f.schema.$defs.b.type: it is 'strin', and must be"),
        (WRITER.schema(twice, "s"), "s.properties.x.uniqueItems s.properties.x.uniqueItems: it cannot be enforced"),
        (WRITER.regex("(a", "guided_regex"), "guided_regex guided_regex: invalid regex"),
        (Grammar("", param="g", foreign="start: nothing"), "g g: unknown name"),
        (WRITER.schema(slow, "s"), "s s: it takes longer than 100 ms of a processor to compile"),
    ]
    found = check_all([*good, *(grammar for grammar, _ in bad), good[0]])
    assert found[:3] == ["", "", ""]
    for error, (_, expected) in zip(found[3:-1], bad, strict=True):
        assert error.startswith(expected)
    assert found[-1] == ""


def started_since(before: list[psutil.Process]) -> psutil.Process:
    """The one process that this one has started since it had these (other tests leave some to Python)."""
    [process] = [child for child in psutil.Process().children() if child not in before]
    return process


def test_a_process_that_dies_is_started_again() -> None:
    async def main() -> None:
        before = psutil.Process().children()
        checker = GrammarChecker(TOKENIZER.fast.to_str(), [0, 2], 4096)
        await checker.check(WRITER.choice(["a"], "x"))
        started_since(before).kill()
        assert await checker.check(WRITER.choice(["b"], "x"))
        await checker.close()

    asyncio.run(main())


def test_a_fork_serves_until_a_grammar_was_too_much_for_it_or_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "GRAMMAR_PROCESSOR_S", 0.1)
    monkeypatch.setattr(edge_limits, "GRAMMAR_CLOCK_S", 240.0)  # what is slow waits for everybody else
    slow = {"type": "object", "properties": {f"k{n}": {"type": "string", "maxLength": 1000} for n in range(2000)}}

    async def main() -> None:
        before = psutil.Process().children()
        checker = GrammarChecker(TOKENIZER.fast.to_str(), [0, 2], 4096)

        async def fork_after(grammar: Grammar) -> psutil.Process:
            with contextlib.suppress(InvalidRequestError):
                await checker.check(grammar)
            await asyncio.sleep(0.2)  # a new fork is made after the reply
            [fork] = started_since(before).children()
            return fork

        first = await fork_after(WRITER.choice(["a"], "x"))
        assert await fork_after(WRITER.regex("(a", "x")) == first
        assert await fork_after(WRITER.choice(["b"], "x")) == first
        second = await fork_after(WRITER.schema(slow, "x"))
        assert second != first and not first.is_running()
        second.kill()
        assert await checker.check(WRITER.choice(["c"], "x"))
        third = await fork_after(WRITER.choice(["d"], "x"))
        assert third != second
        await checker.close()
        third.wait(10)  # the fork ends with its parent

    asyncio.run(main())


def test_a_machine_without_time_is_said_and_nothing_is_kept_against_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(edge_limits, "GRAMMAR_CLOCK_S", 0.3)

    async def main() -> None:
        before = psutil.Process().children()
        checker = GrammarChecker(TOKENIZER.fast.to_str(), [0, 2], 4096)
        await checker.check(WRITER.choice(["a"], "x"))
        [fork] = started_since(before).children()
        fork.suspend()  # as where others have all processors
        grammar = WRITER.schema(GOOD, "format")
        with pytest.raises(UnavailableError, match="format: the machine is too busy") as refused:
            await checker.check(grammar)
        assert (refused.value.status, refused.value.code) == (503, "grammar_timeout")
        assert refused.value.retry_after_s and refused.value.retry_after_s >= 1
        assert (await checker.check(grammar)).text
        await checker.close()

    asyncio.run(main())


def test_a_grammar_that_takes_too_much_memory_is_refused_and_the_next_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    large = WRITER.schema({"properties": {f"k{n}": {"enum": [n, f"v{n}"]} for n in range(1500)}}, "s")
    monkeypatch.setattr(edge_limits, "GRAMMAR_PROCESSOR_S", 60.0)  # nothing here depends on how fast the machine is
    monkeypatch.setattr(edge_limits, "GRAMMAR_CLOCK_S", 240.0)
    monkeypatch.setattr("diptych.serving.answers.grammar.grammar_checker.REPLY_LIMIT_S", 300.0)
    assert check_all([large]) == [""]
    monkeypatch.setattr(edge_limits, "GRAMMAR_MEMORY_BYTES", 4 << 20)
    assert check_all([large, WRITER.choice(["a"], "x")]) == ["s s: it takes too much memory to compile", ""]
    assert edge_limits.LIMITS["GRAMMAR_MEMORY_BYTES"].beyond == "400 `invalid_grammar`"


def test_as_many_grammars_wait_as_the_limit_and_one_more_is_refused() -> None:
    async def main() -> None:
        checker = GrammarChecker(TOKENIZER.fast.to_str(), [0, 2], 4096)
        grammars = [WRITER.choice([str(number)], "x") for number in range(edge_limits.WAITING_GRAMMARS + 1)]
        await checker.check(known := WRITER.choice(["known"], "x"))
        async with checker._turn:  # another one takes long
            waiting = [asyncio.ensure_future(checker.check(grammar)) for grammar in grammars[:-1]]
            await asyncio.sleep(0)
            with pytest.raises(UnavailableError) as refused:
                await checker.check(grammars[-1])
            assert f"{refused.value.status} `{refused.value.code}`" == edge_limits.LIMITS["WAITING_GRAMMARS"].beyond
            assert refused.value.retry_after_s and (await checker.check(known)).text  # which needs no turn
            assert not any(task.done() for task in waiting)
        assert all(tried.text for tried in await asyncio.gather(*waiting))
        assert (await checker.check(grammars[-1])).text
        await checker.close()

    asyncio.run(main())


def test_what_is_left_out_of_a_schema_is_named_where_strict_is_false() -> None:
    twice = {"properties": {"x": {"type": "array", "uniqueItems": True}}}

    async def main() -> None:
        checker = GrammarChecker(TOKENIZER.fast.to_str(), [0, 2], 4096)
        for strict, hint in ((None, '"strict": false'), (True, '"strict": false')):
            described = {"name": "n", "schema": twice, "strict": strict}
            grammar = wanted(response_format={"type": "json_schema", "json_schema": described})
            assert grammar is not None
            with pytest.raises(InvalidRequestError, match=hint) as refused:
                await checker.check(grammar)
            assert refused.value.param == "response_format.json_schema.schema.properties.x.uniqueItems"
        described = {"name": "n", "schema": twice, "strict": False}
        grammar = wanted(response_format={"type": "json_schema", "json_schema": described})
        assert grammar is not None
        for _ in range(2):  # known, it is named, too
            tried = await checker.check(grammar)
            assert tried.left_out == ("response_format.json_schema.schema.properties.x.uniqueItems",)
        form = load_response_template("hermes", TEMPLATES["hermes"]).calls
        assert form is not None
        calls = WRITER.calls(form, {"f": twice, "g": GOOD}, None)
        assert (await checker.check(calls)).left_out == ("tools.0.function.parameters.properties.x.uniqueItems",)
        with pytest.raises(InvalidRequestError, match=r"properties\.x\.uniqueItems: it cannot be enforced"):
            await checker.check(WRITER.calls(form, {"f": twice, "g": GOOD}, None, ["f"]))
        guided = wanted(guided_json=twice)  # has no field strict
        assert guided is not None
        with pytest.raises(InvalidRequestError, match=r"cannot be enforced$"):
            await checker.check(guided)
        await checker.close()

    asyncio.run(main())


def test_schemas_of_calls_in_tags_and_python_are_weakened_by_the_same_rules() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"oneOf": [{"type": "integer"}, {"type": "null"}]}, "s": {"type": "string"}},
        "minProperties": 1,
    }
    for name in ("qwen_xml", "pythonic"):
        form = load_response_template(name, TEMPLATES[name]).calls
        assert form is not None
        assert WRITER.calls(form, {"f": schema}, 1).left_out == ("tools.0.function.parameters.minProperties",)
        with pytest.raises(InvalidRequestError) as refused:
            WRITER.calls(form, {"f": schema}, 1, ["f"])
        assert refused.value.param == "tools.0.function.parameters.minProperties"
        choices = {"oneOf": [{"properties": {"k": {"const": kind}}, "required": ["k"]} for kind in ("a", "b")]}
        assert WRITER.calls(form, {"f": choices}, 1, ["f"]).left_out == ()


class SlowGrammars:
    """Grammars that are ready when the test says so."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.on_compiled: Any = None

    def prepare(self, text: str) -> bool:
        return text in self.ready


def order_of(command: Any, grammar: str = "") -> tuple[Order, Any]:
    tokens = AttemptTokens(pack_token_ids([5]), SamplingParams(grammar=grammar)) if grammar else None
    return Order(pack_command(command), tokens), command


def test_orders_wait_for_their_grammar_in_order_and_others_do_not() -> None:
    grammars = SlowGrammars()
    room = AwaitedGrammars(grammars)  # type: ignore[arg-type]
    serve, other = Serve(0, "a", "a", 0), Serve(0, "b", "b", 0)
    assert room.holds(*order_of(serve, "slow"))
    assert not room.holds(*order_of(other))
    assert not room.holds(*order_of(Reserve(0, "c", "c", 0, 0, False), "slow"))
    assert room.holds(*order_of(Prefill(0, "d", "d", 0, 1, 0, (), 0), "slower"))
    assert list(room.released()) == []
    assert not select.select([room.fileno()], [], [], 0)[0]
    grammars.ready.add("slow")
    grammars.on_compiled()
    assert select.select([room.fileno()], [], [], 0)[0]
    assert [command for _, command in room.released()] == [serve]
    drop = Drop(0, "d")
    assert room.holds(*order_of(drop))
    orders = list(room.released())  # to be dropped, it needs no grammar
    assert [type(command) for _, command in orders] == [Prefill, Drop]
    assert orders[0][0].tokens is not None and orders[0][0].tokens.sampling.grammar == ""
    room.close()
