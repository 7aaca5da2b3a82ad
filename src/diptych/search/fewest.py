"""The search for the smallest fleet that does something: by doubling and halving, over one number or over two.

More workers never do worse is taken for granted: of a larger fleet than one that holds nothing is asked, and none that
is smaller than one that fails.
"""

from collections.abc import Callable
from typing import Literal

Answer = Literal["holds", "fails", "hopeless"]  # hopeless: more workers would not help either


def fewest_workers(ask: Callable[[int], Answer], most: int, start: int = 1) -> int | None:
    """The smallest count in [1, most] for which ``ask`` says that it holds; None when there is none. start: the count
    that is asked first."""
    found = _bracket(ask, most, start)
    return None if found is None else _least(lambda size: ask(size) == "holds", *found)


def fewest_split(
    ask: Callable[[int, int], Answer], most: int, weights: tuple[int, int] = (1, 1), start: int = 1
) -> tuple[int, int] | None:
    """The two counts, each in [1, most], that hold with the least sum of weight * count (of equal sums the one with the
    smallest first count); None when there are none. start: of both counts, what is asked first.

    Pairs that hold lie above a staircase. It is walked from the smallest first count on: of each next one it is asked
    only whether it needs so much less of the second that the sum falls.
    """
    found = _bracket(lambda count: ask(count, count), most, start)
    if found is None:
        return None
    size = found[1]
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


def _bracket(ask: Callable[[int], Answer], most: int, start: int) -> tuple[int, int] | None:
    """A count that fails (0: none is known) and a larger one that holds, by doubling or halving from ``start``."""
    low, count = 0, min(start, most)
    answer = ask(count)
    if answer == "holds":
        while count > 1:
            if ask(count // 2) != "holds":
                return count // 2, count
            count //= 2
        return 0, count
    while answer != "holds":
        if answer == "hopeless" or count == most:
            return None
        low, count = count, min(most, 2 * count)
        answer = ask(count)
    return low, count


def _least(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest count above ``low`` that holds; ``high`` does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
