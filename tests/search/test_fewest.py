"""The smallest fleet that holds: against every fleet there is."""

from itertools import product
from random import Random
from typing import Any

import pytest

from diptych.search.fewest import Answer, fewest_split, fewest_workers


@pytest.mark.parametrize("needed", range(1, 40))
def test_the_smallest_count_is_found_in_few_questions(needed: int) -> None:
    asked: list[int] = []

    def ask(count: int) -> Answer:
        asked.append(count)
        return "holds" if count >= needed else "fails"

    assert fewest_workers(ask, 64) == needed
    assert len(asked) <= 2 * needed.bit_length() + 1


def test_a_limit_is_tried_and_not_exceeded() -> None:
    asked: list[int] = []

    def ask(count: int) -> Answer:
        asked.append(count)
        return "fails"

    assert fewest_workers(ask, 50) is None and max(asked) == 50
    assert fewest_workers(lambda count: "holds" if count == 50 else "fails", 50) == 50


def test_a_search_ends_where_more_workers_would_not_help() -> None:
    asked: list[int] = []

    def ask(count: int) -> Answer:
        asked.append(count)
        return "hopeless" if count >= 4 else "fails"

    assert fewest_workers(ask, 1024) is None and asked == [1, 2, 4]
    assert fewest_split(lambda first, second: "hopeless", 8) is None


def staircase(random: Random, size: int) -> list[int]:
    """The fewest of the second for each count of the first, falling; size + 1 where none is enough."""
    return sorted((random.randint(1, size + 1) for _ in range(size)), reverse=True)


@pytest.mark.parametrize("weights", [(1, 1), (4, 1), (1, 2)])
def test_a_split_is_the_smallest_of_all_that_hold(weights: tuple[int, int]) -> None:
    random, size = Random(1), 16
    for _ in range(300):
        needed = staircase(random, size)
        if needed[-1] > size:
            continue
        asked: set[Any] = set()

        def ask(first: int, second: int, needed: list[int] = needed, asked: set[Any] = asked) -> Answer:
            asked.add((first, second))
            return "holds" if second >= needed[first - 1] else "fails"

        found = fewest_split(ask, size, weights)
        assert found is not None and len(asked) < 80
        equal = next(count for count in (1, 2, 4, 8, 16) if count >= needed[count - 1])
        pairs = product(range(1, size + 1), range(1, equal + 1))
        holding = [pair for pair in pairs if pair[1] >= needed[pair[0] - 1]]
        least = min(first * weights[0] + second * weights[1] for first, second in holding)
        assert found[0] * weights[0] + found[1] * weights[1] == least
