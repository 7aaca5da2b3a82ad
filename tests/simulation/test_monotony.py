"""More work is never faster, better hardware never slower: pairs of benchmarks/monotony.py."""

from tests.laws import law
from tests.simulation.monotony import LAWS, random_pairs

STEPS = 10


@law(weight=1.0)
def test_no_step_gets_faster_with_more_work_or_slower_on_better_hardware(seed: int) -> None:
    assert [found for pair in random_pairs(seed, STEPS) if (found := pair.violation())] == []


def test_all_laws_are_among_them() -> None:
    assert {pair.law for seed in range(30) for pair in random_pairs(seed, 1)} == set(LAWS)
