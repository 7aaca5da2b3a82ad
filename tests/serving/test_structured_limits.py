"""The limits of structured output against the compiler itself: what they allow is compiled and followed to its end."""

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("llguidance")

from diptych.control.errors import InvalidRequestError
from diptych.runtime.grammar import Grammars
from diptych.serving import edge_limits
from diptych.serving.answers.grammar.grammar_checker import GrammarChecker
from diptych.serving.answers.grammar.grammar_text import Grammar, GrammarWriter
from diptych.serving.answers.grammar.schema_document import Node
from diptych.serving.answers.grammar.schema_rewriting import rewrite
from diptych.serving.answers.grammar.value_terms import Numbers, Texts, exactly
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
    """So many texts that differ."""
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
