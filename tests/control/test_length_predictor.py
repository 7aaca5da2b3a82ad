"""How long answers will be: what is learned from those that ended, and from those that were cut off."""

import random

import pytest

from diptych.control.length_predictor import (
    DEFAULT_TOKENS,
    HALF_LIFE,
    LONGEST,
    MAX_FAMILIES,
    NUM_BANDS,
    WINDOW,
    LengthErrorStats,
    LengthGroup,
    LengthPredictor,
    band_of,
)
from diptych.control.request import RequestOptions, Submission

FAR = 100_000  # a limit that does not matter


def ask(prompt: int = 100, service_class: str = "standard", hashes: tuple[bytes, ...] = ()) -> Submission:
    return Submission("a", prompt, FAR, hashes, RequestOptions(service_class=service_class))


def group_of(lengths: LengthPredictor, request: Submission) -> LengthGroup:
    return lengths.group(request.options.service_class, request.num_prompt_tokens, request.hashes)


def learn(lengths: LengthPredictor, request: Submission, *answers: int, is_cut: bool = False) -> None:
    for answer in answers:
        lengths.observe(group_of(lengths, request), answer, is_cut=is_cut)


def mean(lengths: LengthPredictor, request: Submission, num_generated: int = 0, max_tokens: int = FAR) -> int:
    return lengths.mean(group_of(lengths, request), num_generated, max_tokens)


def test_bands_follow_each_other_and_are_at_most_a_quarter_of_their_lengths_wide() -> None:
    bands = [band_of(length) for length in range(5000)]
    assert bands == sorted(bands) and set(bands) == set(range(bands[-1] + 1))
    for band in set(bands):
        lengths = [length for length in range(5000) if bands[length] == band]
        assert len(lengths) == 1 or len(lengths) <= lengths[0] / 4
    assert band_of(LONGEST) == NUM_BANDS - 1


def test_before_any_answer_the_default_is_expected_and_later_as_much_again() -> None:
    lengths = LengthPredictor()
    assert mean(lengths, ask()) == pytest.approx(DEFAULT_TOKENS, rel=0.05)
    assert mean(lengths, ask(), 1024) == pytest.approx(1024, rel=0.05)
    assert mean(lengths, ask(), 0, 10) == 10
    assert mean(lengths, ask(), 1024, 1030) == 6


def test_no_expectation_exceeds_its_limit_or_is_less_than_one_token() -> None:
    rng, lengths = random.Random(3), LengthPredictor()
    for _ in range(2000):
        request = ask(rng.randrange(1, 3000), rng.choice(("batch", "standard")), (rng.randbytes(1),))
        learn(lengths, request, rng.randrange(0, 2000), is_cut=rng.random() < 0.3)
        limit = rng.choice((1, 2, 100, 3000, 2 * LONGEST))
        generated, group = rng.randrange(limit), group_of(lengths, request)
        for expected in (lengths.mean(group, generated, limit), lengths.high(group, generated, limit)):
            assert 1 <= expected <= limit - generated


def test_equal_answers_are_expected_exactly() -> None:
    for answer in (1, 5, 100, 777, 5000):
        lengths = LengthPredictor()
        learn(lengths, ask(), *[answer] * 4000)
        group = group_of(lengths, ask())
        assert mean(lengths, ask()) == pytest.approx(answer, rel=0.02, abs=1)
        assert lengths.high(group, 0, FAR) == answer
        assert lengths.high(group, answer - 1, FAR) == 1


def test_what_is_generated_already_rules_out_shorter_answers() -> None:
    lengths = LengthPredictor()
    learn(lengths, ask(), *[10, 1000] * 300)
    assert mean(lengths, ask()) == pytest.approx(505, rel=0.05)
    assert mean(lengths, ask(), 20) == pytest.approx(980, rel=0.05)
    assert mean(lengths, ask(), 0, 100) == pytest.approx(55, rel=0.05)


def test_answers_that_were_cut_off_do_not_make_answers_look_shorter() -> None:
    rng, lengths = random.Random(4), LengthPredictor()
    for _ in range(5000):
        answer, patience = rng.randrange(1, 1000), rng.randrange(1, 1500)
        learn(lengths, ask(), min(answer, patience), is_cut=patience < answer)
    assert mean(lengths, ask()) == pytest.approx(500, rel=0.08)
    assert lengths.high(group_of(lengths, ask()), 0, FAR) == pytest.approx(800, rel=0.15)


def test_answers_that_all_reach_their_limits_are_expected_to_reach_any_limit() -> None:
    lengths = LengthPredictor()
    learn(lengths, ask(), *[300] * 1000, is_cut=True)
    assert mean(lengths, ask(), 0, 300) == pytest.approx(300, rel=0.02)


def test_a_group_counts_as_far_as_it_is_known() -> None:
    lengths = LengthPredictor()
    learn(lengths, ask(), *[100] * 2000)
    learn(lengths, ask(5000, "batch"), 900, 900, *[900] * 6)
    young = mean(lengths, ask(5000, "batch"))
    learn(lengths, ask(5000, "batch"), *[900] * 200)
    assert 400 < young < mean(lengths, ask(5000, "batch"))
    assert mean(lengths, ask(5000, "batch")) == pytest.approx(900, rel=0.05)
    assert mean(lengths, ask()) == pytest.approx(100, rel=0.05)


def test_prompts_that_begin_alike_are_a_family() -> None:
    lengths = LengthPredictor()
    stories, titles = ((b"system", bytes([number]), bytes([number, 1])) for number in (1, 2))
    for _ in range(200):
        learn(lengths, ask(hashes=stories), 1200)
        learn(lengths, ask(hashes=titles), 8)
    assert mean(lengths, ask(hashes=stories)) == pytest.approx(1200, rel=0.05)
    assert mean(lengths, ask(hashes=titles)) < 20
    assert mean(lengths, ask(hashes=(b"system",))) == pytest.approx(604, rel=0.1)
    assert mean(lengths, ask(2000, "batch", stories)) == pytest.approx(604, rel=0.1)


def test_families_that_were_not_seen_for_long_are_forgotten() -> None:
    lengths = LengthPredictor()
    learn(lengths, ask(hashes=(b"old",)), *[3000] * 100)
    learn(lengths, ask(), *[10] * 3000)
    assert mean(lengths, ask(hashes=(b"old",))) > 2500
    for number in range(MAX_FAMILIES):
        group_of(lengths, ask(hashes=(number.to_bytes(4, "big"),)))
    assert mean(lengths, ask(hashes=(b"old",))) < 100


def test_old_answers_are_forgotten() -> None:
    lengths = LengthPredictor()
    learn(lengths, ask(), *[1000] * 8000)
    learn(lengths, ask(), *[10] * HALF_LIFE)
    assert mean(lengths, ask()) == pytest.approx(505, rel=0.05)
    learn(lengths, ask(), *[10] * (4 * HALF_LIFE))
    assert mean(lengths, ask()) == pytest.approx(10 + 1000 / 32, rel=0.1)


def test_an_expectation_depends_on_what_ended_and_not_on_who_asked_when() -> None:
    rng = random.Random(5)
    asked, silent = LengthPredictor(), LengthPredictor()
    for _ in range(500):
        request, answer = ask(rng.randrange(1, 100)), rng.randrange(1, 500)
        learn(asked, request, answer)
        learn(silent, request, answer)
        if rng.random() < 0.5:
            mean(asked, request)
    for prompt in range(1, 100):
        assert mean(asked, ask(prompt)) == mean(silent, ask(prompt))


def test_the_error_is_that_of_the_last_answers_beside_the_static_one() -> None:
    watch = LengthErrorStats()
    assert watch.errors == {"learned": 0, "static": 0}
    for _ in range(WINDOW):
        watch.observe(1, FAR, 10_000)
    for _ in range(WINDOW):
        watch.observe(110, FAR, 100)
    assert watch.errors == pytest.approx({"learned": 0.1, "static": (DEFAULT_TOKENS - 100) / 100})
    for _ in range(WINDOW):
        watch.observe(50, 50, 50)
    assert watch.errors == {"learned": 0, "static": 0}
