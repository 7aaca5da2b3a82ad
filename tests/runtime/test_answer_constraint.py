"""A budget for reasoning: after that number of tokens its end is forced, whatever is undone or replayed."""

from collections.abc import Sequence

import pytest

from diptych.control.errors import ConstraintError, InvalidRequestError
from diptych.control.request import SamplingParams
from diptych.runtime.sampling.answer_constraint import ThinkingBudget, constraint_of


def after(constraint: ThinkingBudget, tokens: Sequence[int]) -> list[int]:
    constraint.accept(tokens)
    return list(constraint.forced(9))


def test_the_end_is_forced_when_the_budget_is_used_up() -> None:
    assert after(ThinkingBudget(3, (), (8, 9)), [1, 2]) == []
    assert after(ThinkingBudget(3, (), (8, 9)), [1, 2, 3]) == [8, 9]
    assert after(ThinkingBudget(3, (), (8, 9)), [1, 2, 3, 8]) == [9]
    assert after(ThinkingBudget(3, (), (8, 9)), [1, 2, 3, 8, 9, 4]) == []
    assert after(ThinkingBudget(0, (), (8, 9)), []) == [8, 9]
    assert list(ThinkingBudget(0, (), (8, 9)).forced(1)) == [8]


def test_reasoning_that_ends_by_itself_or_never_begins_is_left_alone() -> None:
    assert after(ThinkingBudget(3, (), (8, 9)), [1, 8, 9, 5, 6, 7]) == []
    assert after(ThinkingBudget(2, (7,), (8,)), [1, 2, 3, 4]) == []
    assert after(ThinkingBudget(2, (7,), (8,)), [7, 1, 2]) == [8]


def test_drafts_stop_at_the_budget_and_can_be_undone() -> None:
    constraint = ThinkingBudget(3, (), (8, 9))
    assert constraint.count_allowed([1, 2, 3, 4]) == 3
    constraint.accept([1, 2, 3, 8, 9])
    constraint.rollback(1)
    assert list(constraint.forced(9)) == [9]
    constraint.rollback(3)
    assert (list(constraint.forced(9)), constraint.count_allowed([5, 5, 5])) == ([], 2)
    assert constraint.allowed() is None


def test_a_request_gets_the_constraint_that_it_asks_for() -> None:
    assert constraint_of(SamplingParams(), None) is None
    assert isinstance(constraint_of(SamplingParams(thinking_budget=1, thinking_end=(8,)), None), ThinkingBudget)
    with pytest.raises(ConstraintError, match="llguidance"):
        constraint_of(SamplingParams(grammar="start: /x/"), None)
    with pytest.raises(InvalidRequestError, match="thinking_end"):
        SamplingParams(thinking_budget=1)
