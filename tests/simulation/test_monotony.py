"""More work is never faster, better hardware never slower: a few hundred of the pairs of benchmarks/monotony.py."""

import pytest

from tests.simulation.monotony import LAWS, Pair, random_pairs

SEEDS, STEPS = range(30), 10


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return [pair for seed in SEEDS for pair in random_pairs(seed, STEPS)]


def test_no_step_gets_faster_with_more_work_or_slower_on_better_hardware(pairs: list[Pair]) -> None:
    assert [found for pair in pairs if (found := pair.violation())] == []


def test_all_laws_are_among_them(pairs: list[Pair]) -> None:
    assert {pair.law for pair in pairs} == set(LAWS)
