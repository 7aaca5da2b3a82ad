"""However an answer grows, its readers copy and look at each character a few times, and not once for each token."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from answer_texts import FORMATS, NAMES, written
from copies import Copies
from tests.laws import law

from diptych.control.request import SamplingParams
from diptych.serving.answers.answer_stream import AnswerStream, Generation
from diptych.serving.answers.response import held_text, response_parser
from diptych.serving.answers.response.bundled_templates import TEMPLATES
from diptych.serving.answers.response.held_text import PIECE, HeldText
from diptych.serving.answers.response.json_text import JsonText
from diptych.serving.answers.response.response_parser import MAX_MISREAD, ReadAnswer, ResponseParser, reader_of
from diptych.serving.answers.response.response_template import load_response_template
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.text_argument import TextArgument
from diptych.serving.link.engine_options import BUNDLED_MODEL

ALL = {name: load_response_template(name, spec) for name, spec in TEMPLATES.items() if name != "thinking"}
STRING = {"type": "string"}
SCHEMA = {"type": "object", "properties": {"city": STRING, "days": STRING, "query": STRING}}
TOOLS = dict.fromkeys(NAMES, SCHEMA)
RUNS = ("a", " ", "\n", "\\", "`", "<", "{", "[", "(", ",", '"', "'", "<a>", "\\u00e4", '"a",', "f(a=1), ", "\n    ",
        "</parameter>", "</think>", "<tool_call>")  # fmt: skip
LENGTH = 4000
TOKEN = 40
TOKENIZER = Tokenizer(BUNDLED_MODEL)
MOST = 8  # copies of a character; the square would be LENGTH / TOKEN / 2


def grown(name: str, seed: int) -> str:
    """An answer of a format with something very long in it."""
    rng = random.Random(f"{name} {seed}")
    text = written(name if name in FORMATS else "hermes", rng)[0]
    at, run = rng.randrange(len(text) + 1), rng.choice(RUNS)
    return text[:at] + (run * LENGTH)[:LENGTH] + text[at:]


@law(weight=0.3)
@pytest.mark.parametrize("name", ALL)
def test_no_text_of_an_answer_is_copied_with_each_token(name: str, seed: int) -> None:
    text = grown(name, seed)
    parser = ResponseParser(ALL[name], tools=TOOLS)
    copies, num_said = Copies(parser), 0
    for at in range(0, len(text), TOKEN):
        num_said += sum(len(part.text) for part in parser.push(text[at : at + TOKEN]))
        copies.look()
    num_said += sum(len(part.text) for part in parser.finish())
    copies.look()
    assert copies.num_characters <= MOST * len(text), text[:60]
    assert num_said <= MOST * len(text)


BEGINNINGS = [
    *((name, written(name if name in FORMATS else "hermes", random.Random(name))[0][:60]) for name in ALL),
    ("lfm2", "<|tool_call_start|>[get_weather("),
    ("lfm2", "<|tool_call_start|>[get_weather(city='"),
]


@pytest.mark.parametrize("end", ["", "}"])
@pytest.mark.parametrize(("name", "opened"), BEGINNINGS)
def test_marks_in_a_row_are_not_each_read_to_the_end(
    name: str, opened: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = 0

    def counted(*arguments: Any) -> Any:
        reader = reader_of(*arguments)
        if reader is not None:
            push = reader.push

            def counting(text: str) -> Any:
                nonlocal num_read
                num_read += len(text)
                return push(text)

            reader.push = counting  # type: ignore[method-assign]
        return reader

    monkeypatch.setattr(response_parser, "reader_of", counted)
    monkeypatch.setattr(held_text, "PIECE", 8)  # a reader that refuses at once has got no more
    for size in sorted({len(opened) // 2, len(opened)} - {0}):
        text = opened[:size] * (LENGTH // size // 4) + end
        num_read = 0
        answer, cut = ReadAnswer(), ReadAnswer()
        parser = ResponseParser(ALL[name], tools=TOOLS)
        answer.add([*parser.push(text), *parser.finish()])
        assert num_read <= (MAX_MISREAD + 4) * len(text), opened[:size]
        parser = ResponseParser(ALL[name], tools=TOOLS)
        for at in range(0, len(text), TOKEN):
            cut.add(parser.push(text[at : at + TOKEN]))
        cut.add(parser.finish())
        assert cut == answer


@law(weight=0.2)
def test_a_long_word_is_read_the_same_however_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    word = "".join(rng.choices("0123456789e.-+ab", k=rng.choice((1, 10, 5000))))
    text = f'{{"a": {word}, "b": [{word} , ] }} behind'
    whole = JsonText()
    written_whole, rest = whole.push(text)
    reader, said = JsonText(), []
    at = 0
    while at < len(text) and not reader.is_over:
        size = rng.choice((1, 7, 1000))
        more, rest_of_piece = reader.push(text[at : at + size])
        said.append(more)
        at += size
    assert ("".join(said), rest_of_piece + text[at:]) == (written_whole, rest)
    assert list(json.loads(written_whole)) == ["a", "b"]


@pytest.mark.parametrize("seed", range(20))
def test_held_text_is_taken_as_it_came(seed: int) -> None:
    rng = random.Random(seed)
    held, whole = HeldText(), ""
    for _ in range(100):
        text = rng.choice(["", "a", "bc", "d" * rng.randrange(2 * PIECE)])
        step = rng.randrange(5)
        if step == 0:
            held.append(text)
            whole += text
        elif step == 1:
            held.prepend(text)
            whole = text + whole
        elif step == 2:
            size = rng.randrange(len(whole) + 3)
            assert held.take(size) == whole[:size]
            whole = whole[size:]
        elif step == 3:
            piece = held.pop()
            assert bool(piece) == bool(whole) and len(piece) <= PIECE and whole.startswith(piece)
            whole = whole[len(piece) :]
        else:
            before = HeldText()
            before.append(text)
            held.take_back(before)
            whole = text + whole
            assert not len(before)
        assert len(held) == len(whole)
    assert held.take() == whole


@law(weight=0.3)
def test_the_text_of_a_custom_call_is_the_same_however_its_json_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices(["a", '"', "\\", "\n", "é", "😀", "u", "d83d", "\ud800", "\udc00"], k=rng.randrange(20)))
    given = json.dumps({"input": text})
    space = " \n" * rng.choice((0, 1, 20))
    given = space + given[:1] + space + given[1:]
    if rng.random() < 0.3:  # and what is no JSON
        at = rng.randrange(len(given))
        given = given[:at] + rng.choice(("\\u12", "\\q", "\\ud83d", '"', "{")) + given[at:]
    whole, cut = TextArgument(), TextArgument()
    said = whole.feed(given) + whole.rest()
    told = "".join(cut.feed(piece) for piece in pieces_of(given, rng)) + cut.rest()
    assert told == said
    said.encode()  # no halves of pairs
    try:
        value = json.loads(given)
    except ValueError:
        return
    if isinstance(value, dict) and list(value) == ["input"]:
        assert said == value["input"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def pieces_of(text: str, rng: random.Random) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        size = rng.randint(1, 6)
        pieces.append(text[at : at + size])
        at += size
    return pieces


@pytest.mark.parametrize(
    "given",
    [
        '{"input": "' + "a" * LENGTH,
        " " * LENGTH + '{"input": "a"}',
        '{"other": "' + "a" * LENGTH,
        '{"input": "\\ud800' + "a" * LENGTH,
        '{"input": "\\uzzzz' + "a" * LENGTH,
        '{"input": "' + "\\u00e4" * (LENGTH // 6),
        "a" * LENGTH,
    ],
)
def test_no_text_of_a_custom_call_is_copied_with_each_token(given: str) -> None:
    argument = TextArgument()
    copies = Copies(argument)
    for at in range(0, len(given), TOKEN):
        argument.feed(given[at : at + TOKEN])
        copies.look()
    assert copies.num_characters <= MOST * len(given)


def test_no_text_that_waits_for_its_reader_is_copied_with_each_token() -> None:
    """The reader may be a client that does not read."""
    stream = AnswerStream("a", 0, [1], SamplingParams(max_tokens=2000), TOKENIZER)
    Generation("a", [stream])
    tokens = TOKENIZER.encode("some words that are said again and again" * 100)
    copies = Copies(stream)
    for token in tokens:
        stream.push(token)
        copies.look()
    text = stream.take().text
    assert copies.num_characters <= MOST * len(text)
    assert text == TOKENIZER.decode(tokens)
