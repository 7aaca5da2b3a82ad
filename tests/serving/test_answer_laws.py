"""Laws of reading answers, in every format: nothing of an answer is lost, and where it is cut changes nothing."""

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from answer_texts import FORMATS, NAMES, THOUGHTS, written
from tests.laws import law

from diptych.serving.answers.response.bundled_templates import TEMPLATES
from diptych.serving.answers.response.response_parser import ReadAnswer, ResponseParser
from diptych.serving.answers.response.response_template import load_response_template

ALL = {name: load_response_template(name, spec) for name, spec in TEMPLATES.items() if name != "thinking"}
STRING = {"type": "string"}
SCHEMA = {"type": "object", "properties": {"city": STRING, "days": STRING, "query": STRING}}
TOOLS = dict.fromkeys(NAMES, SCHEMA)
CLUTTER = ("\n", " ", "```\n", "`", '"', "{", "}", "<think>", "</think>", "<tool_call>", "</tool_call>", "</function>",
           "</parameter>", "<parameter=city>", "[TOOL_CALLS]", "erase", ", ", ">>>", "\\", "<|tool_call>")  # fmt: skip


def read(name: str, pieces: list[str], *, is_cut: bool = False) -> ReadAnswer:
    parser, answer = ResponseParser(ALL[name], tools=TOOLS), ReadAnswer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish(is_cut=is_cut))
    return answer


def answer_text(name: str, rnd: random.Random) -> tuple[str, list[str]]:
    """Answers of the format, with words of our own in any place between and within their marks and values."""
    made = "".join(written(name if name in FORMATS else "hermes", rnd)[0] for _ in range(rnd.randrange(1, 3)))
    words = []
    for _ in range(rnd.randrange(1, 6)):
        at = rnd.randrange(len(made) + 1)
        if rnd.random() < 0.5:
            made = made[:at] + rnd.choice(CLUTTER) + made[at:]
        else:
            words.append(f"¡{len(words)}¡")
            made = made[:at] + words[-1] + made[at:]
    words = [word for word in words if word in made]
    return made, words


def check(name: str, rnd: random.Random) -> None:
    text, words = answer_text(name, rnd)
    is_cut = rnd.random() < 0.3
    whole = read(name, [text], is_cut=is_cut)
    cuts = sorted(rnd.randrange(len(text) + 1) for _ in range(rnd.randrange(8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(name, pieces, is_cut=is_cut) == whole, (text, pieces)
    assert read(name, list(text), is_cut=is_cut) == whole, text
    said = "".join([whole.content or "", whole.reasoning or "", *(call.name + call.arguments for call in whole.calls)])
    assert [word for word in words if word not in said] == [], (name, text, whole)
    assert all(call.name in TOOLS for call in whole.calls)


@law(weight=1.5)
@pytest.mark.parametrize("name", ALL)
def test_every_word_of_an_answer_is_in_its_content_reasoning_or_calls(name: str, seed: int) -> None:
    check(name, random.Random(seed))


@law(weight=0.5)
@pytest.mark.parametrize("name", ALL)
def test_a_whole_answer_has_arguments_that_are_json(name: str, seed: int) -> None:
    text, _, _, calls = written(name if name in FORMATS else "hermes", random.Random(seed))
    answer = read(name, [text])
    assert [json.loads(call.arguments) for call in answer.calls] == [arguments for _, arguments in calls]


@pytest.mark.parametrize("name", [name for name in THOUGHTS if name not in ("granite",)])
def test_reasoning_is_read_in_the_marks_of_each_family(name: str) -> None:
    begin, end = THOUGHTS[name]
    answer = read(name, [f"{begin}I see.{end}Yes."])
    assert (answer.reasoning, answer.content) == ("I see.", "Yes.")
