"""The search for the smallest fleet that does something: by doubling and halving, over one number or over two.

More workers never do worse is taken for granted: of a larger fleet than one that holds nothing is asked, and none that
is smaller than one that fails.
"""

from collections.abc import Callable
from typing import Literal

Answer = Literal["holds", "fails", "hopeless"]  # hopeless: more workers would not help either


def fewest_workers(ask: Callable[[int], Answer], most: int) -> int | None:
    """The smallest count in [1, most] for which ``ask`` says that it holds; None when there is none."""
    count = _enough(ask, most)
    return None if count is None else _least(lambda size: ask(size) == "holds", _failed_half(count), count)


def fewest_split(
    ask: Callable[[int, int], Answer], most: int, weights: tuple[int, int] = (1, 1)
) -> tuple[int, int] | None:
    """The two counts, each in [1, most], that hold with the least sum of weight * count (of equal sums the one with the
    smallest first count); None when there are none.

    Pairs that hold lie above a staircase. It is walked from the smallest first count on: of each next one it is asked
    only whether it needs so much less of the second that the sum falls.
    """
    size = _enough(lambda count: ask(count, count), most)
    if size is None:
        return None
    first = _least(lambda count: ask(count, size) == "holds", 0, size)
    best = first, _least_second(ask, first, size)
    while True:
        first += 1
        second = (_sum(best, weights) - 1 - weights[0] * first) // weights[1]  # the most that is less in all
        if second < 1 or first > most:
            return best
        if ask(first, second) == "holds":
            best = first, _least_second(ask, first, second)


def _least_second(ask: Callable[[int, int], Answer], first: int, most: int) -> int:
    return _least(lambda count: ask(first, count) == "holds", 0, most)


def _sum(counts: tuple[int, int], weights: tuple[int, int]) -> int:
    return counts[0] * weights[0] + counts[1] * weights[1]


def _enough(ask: Callable[[int], Answer], most: int) -> int | None:
    """The first of 1, 2, 4, ... that holds."""
    count = 1
    while True:
        answer = ask(count)
        if answer == "holds":
            return count
        if answer == "hopeless" or count == most:
            return None
        count = min(most, 2 * count)


def _failed_half(count: int) -> int:
    """The largest count that the doubling up to ``count`` saw failing."""
    power = 1
    while 2 * power < count:
        power *= 2
    return power if count > 1 else 0


def _least(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest count above ``low`` that holds; ``high`` does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
