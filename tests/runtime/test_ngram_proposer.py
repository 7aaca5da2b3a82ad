"""What came next before is guessed to come next again; how often that was right is counted without trying it."""

import itertools
import random

import numpy as np

from diptych.control.request import SamplingParams
from diptych.runtime.step.draft_tokens import DraftTokens
from diptych.runtime.step.ngram_proposer import LENGTHS, MAX_PAUSE, MatchCounts, NgramProposer
from diptych.runtime.step.request_state import RequestState


def lookup(tokens: list[int]) -> NgramProposer:
    return NgramProposer(tokens, MatchCounts())


def test_the_continuation_of_the_longest_match_is_guessed_and_of_equals_the_latest() -> None:
    assert lookup([1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]).guess(2)[0] == [4, 9]
    assert lookup([2, 3, 4, 9, 2, 3, 5, 8, 7, 2, 3]).guess(2)[0] == [5, 8]
    assert lookup([1, 2, 3, 4]).guess(4) == ([], [])
    assert lookup([1]).guess(4) == ([], [])


def test_a_match_that_reaches_the_end_repeats_itself() -> None:
    assert lookup([5, 6, 7, 5, 6, 7, 5, 6, 7]).guess(7)[0] == [5, 6, 7, 5, 6, 7, 5]
    assert lookup([4, 4, 4]).guess(3)[0] == [4, 4, 4]


def test_a_match_is_followed_until_it_fails_and_then_another_is_sought() -> None:
    found = lookup([1, 2, 3, 4, 5, 6, 1, 2])
    found.extend([3, 4])
    assert found.guess(2)[0] == [5, 6]
    found.extend([1, 2])  # not what was guessed; but it was there before, too
    assert found.guess(1)[0] == [3]
    assert found.num_tokens == 12


def test_chances_fall_along_a_guess_and_follow_what_was_right() -> None:
    found = lookup([1, 2, 3, 4, 5, 6, 7, 8] * 2 + [1, 2])
    chances = found.guess(8)[1]
    assert chances == sorted(chances, reverse=True)
    assert all(0.0 < chance < 1.0 for chance in chances)
    shared = MatchCounts()
    for _ in range(400):
        shared.add(2, False)
        shared.add(9, True)
    assert shared.chance(2) < 0.05 and shared.chance(9) > 0.9
    own = MatchCounts(shared)
    for _ in range(40):
        own.add(2, True)  # this answer quotes, the others do not
    assert own.chance(2) > 0.8
    assert shared.chance(2) < own.chance(2)
    assert own.chance(LENGTHS) == own.chance(LENGTHS + 50)


def test_random_text_is_hardly_guessed_after_a_while() -> None:
    rng = random.Random(1)
    shared = MatchCounts()
    for _ in range(3):
        found = NgramProposer([rng.randrange(12) for _ in range(300)], shared)
        for _ in range(300):
            found.extend([rng.randrange(12)])
    assert shared.chance(2) < 0.15


def test_guesses_are_those_of_a_search_through_everything() -> None:
    rng = random.Random(2)
    for _ in range(200):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(2, 60))]
        found = lookup(tokens[:1])
        for token in tokens[1:]:
            found.extend([token])
        guess, _ = found.guess(1)
        seen = {tuple(tokens[at : at + 2]) for at in range(len(tokens) - 2)}
        assert bool(guess) == (tuple(tokens[-2:]) in seen)
        if guess:
            assert any(tokens[at : at + 3] == [*tokens[-2:], guess[0]] for at in range(len(tokens) - 2))


def test_in_a_wide_batch_an_answer_that_is_never_guessed_is_looked_up_more_rarely_until_a_run() -> None:
    found = lookup(list(range(100, 200)))
    pauses = []
    for token in range(1000, 1200):
        found.extend([token])
        pauses.append(found.pause(64))
    assert pauses == sorted(pauses) and (pauses[0], pauses[-1]) == (2, MAX_PAUSE)
    assert [found.pause(streams) for streams in (1, 2, 8, 64)] == [1, 2, 8, MAX_PAUSE]
    found.extend(list(range(120, 125)))
    assert found.pause(64) == 1  # a match that is likely to go on is followed
    found.extend([125, 126, 999])
    assert found.pause(64) == MAX_PAUSE  # two right guesses are no run
    found.extend([150, 151])
    assert found.pause(64) == MAX_PAUSE  # a short match may be chance
    found.extend([152, 153, 154, 998])
    assert found.pause(64) == 1


def test_a_prediction_is_guessed_where_the_answer_begins_to_repeat_it() -> None:
    drafted = DraftTokens(drafts=True)
    predicted = tuple(range(500, 540))
    state = RequestState("r", [1, 2, 3], 3, SamplingParams(max_tokens=100, predicted=predicted))
    tokens = np.array([1, 2, 3, 500, 501, 502, 600, 510, 511, 512], dtype=np.int32)
    guesses = []
    for length in range(4, len(tokens) + 1):
        offer = drafted.after(state, tokens[:length], 50)
        guesses.append(state.drafted[:2] if offer is not None else ())
    assert guesses == [(), (502, 503), (503, 504), (), (), (512, 513), (513, 514)]


def test_what_came_during_a_pause_is_known_at_the_next_look() -> None:
    drafted = DraftTokens(drafts=True)
    tokens = np.array([*range(100, 140), *range(200, 300), *range(100, 140)], dtype=np.int32)
    state = RequestState("r", tokens[:40].tolist(), 40, SamplingParams(max_tokens=500))
    looks, found = [], 0
    for length in range(41, len(tokens) + 1):
        if length >= state.next_look:
            looks.append(length)
        offer = drafted.after(state, tokens[:length], 100, num_streams=64)
        if offer is not None:
            found = found or length
            assert state.drafted[0] == (tokens[length] if length < len(tokens) else 200)
    assert len(looks) < 60 and max(b - a for a, b in itertools.pairwise(looks)) > 4
    assert 142 <= found <= 172  # the repetition begins at 140
