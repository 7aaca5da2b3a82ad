"""Text comes out whole, in order, and never past a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from diptych.serving.answers.detokenizer import Detokenizer, StopStrings, whole_texts
from diptych.serving.link.engine_options import BUNDLED_MODEL

FAST = FastTokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))


def pieces(token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(FAST, prompt or [], whole_texts(FAST))
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.text(min_size=1, max_size=60))
def test_the_pieces_of_any_text_add_up_to_it(text: str) -> None:
    assert "".join(pieces(FAST.encode(text, add_special_tokens=False).ids)) == text


@given(st.lists(st.integers(0, 4095), max_size=60))
def test_any_tokens_give_text_without_an_exception(token_ids: list[int]) -> None:
    text = "".join(pieces(token_ids))
    assert text.replace("\ufffd", "") == FAST.decode(token_ids).replace("\ufffd", "") or "\ufffd" in text


def test_a_character_of_several_tokens_comes_out_once_and_whole() -> None:
    token_ids = FAST.encode("\U0001f642", add_special_tokens=False).ids
    assert len(token_ids) > 1
    assert pieces(token_ids) == [*[""] * (len(token_ids) - 1), "\U0001f642", ""]


def test_bytes_that_never_become_a_character_come_out_in_bounded_time() -> None:
    broken = FAST.encode("\U0001f642", add_special_tokens=False).ids[1]
    said = pieces([broken] * 40)
    assert any("\ufffd" in piece for piece in said[:12])
    assert "".join(said) == "\ufffd" * 40


def test_a_prompt_that_ends_inside_a_character_does_no_harm() -> None:
    token_ids = FAST.encode("\U0001f642", add_special_tokens=False).ids
    word = FAST.encode("def", add_special_tokens=False).ids
    assert "".join(pieces(word, prompt=token_ids[:2])) == "def"


def test_special_tokens_give_no_text() -> None:
    assert "".join(pieces([0, 1, 2])) == ""


def run(stops: list[str], texts: list[str]) -> tuple[str, str | None]:
    checker = StopStrings(stops)
    said = "".join(checker.push(text) for text in texts)
    return said + ("" if checker.matched else checker.flush()), checker.matched


@pytest.mark.parametrize(
    ("stops", "texts", "said", "matched"),
    [
        (["END"], ["abcENDxyz"], "abc", "END"),
        (["END"], ["ab", "cE", "N", "Dx", "yz"], "abc", "END"),
        (["END"], ["abEN", "C"], "abENC", None),
        (["END"], ["abEN"], "abEN", None),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["aab"], ["aa", "ab"], "a", "aab"),
        (["bcd", "c"], ["ab", "c", "d"], "ab", "c"),
        (["x", "xy"], ["a", "xy"], "a", "xy"),
    ],
)
def test_stop_strings_across_tokens(stops: list[str], texts: list[str], said: str, matched: str | None) -> None:
    assert run(stops, texts) == (said, matched)


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_pieces_stop_where_the_whole_text_would(texts: list[str], stops: list[str]) -> None:
    said, matched = run(stops, texts)
    whole = "".join(texts)
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if matched is None:
        assert said == whole
        assert not ends
    else:
        assert whole.startswith(said + matched)
        assert not any(stop in said for stop in stops)
