"""Which request goes first: work, waiting, deadlines, and what age is worth."""

import pytest

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, OrderName, SchedulerConfig
from diptych.control.slo import NS_PER_MS, Slo
from diptych.control.step import SchedulerOutput, chunk_attention
from tests.control.driver import Driver


class TrueToModel(Driver):
    """A worker whose steps take what its step-time model says: the prior, which then needs no learning."""

    def cost(self, output: SchedulerOutput) -> int:
        return output.predicted_ns


def occupied(order: OrderName, *, aging: float = 0.25) -> Driver:
    """One seat, taken for a while: what comes now waits, and is ordered."""
    settings = SchedulerConfig(order, BudgetConfig("fixed", 512), max_num_seqs=1, aging=aging)
    driver = TrueToModel(EngineConfig(CacheConfig(1000, 16), settings))
    driver.add("first", 16, 100)
    driver.step()
    return driver


def answered(driver: Driver) -> list[str]:
    """The requests that waited, by their first tokens."""
    driver.run()
    return sorted(set(driver.prompts) - {"first"}, key=driver.first_token_ns)


def work_ns(num_tokens: int) -> float:
    """Time for a prompt, by the prior of the step-time model."""
    return 50_000 * num_tokens + chunk_attention(0, num_tokens)


@pytest.mark.parametrize("aging", [0.25, 1.0])
@pytest.mark.parametrize(("share", "expected"), [(0.95, ["short", "long"]), (1.05, ["long", "short"])])
def test_a_short_prompt_passes_a_long_one_until_that_has_waited_for_what_it_has_more_to_do(
    share: float, expected: list[str], aging: float
) -> None:
    driver = occupied("shortest", aging=aging)
    driver.add("long", 600, 1)
    driver.now += int(share * (work_ns(600) - work_ns(60)) / aging)
    driver.add("short", 60, 1)
    assert answered(driver) == expected


def test_equal_work_goes_by_arrival_and_priority_goes_before_both() -> None:
    driver = occupied("shortest")
    for name, length, priority in (("late", 60, 1), ("later", 60, 1), ("long", 300, 0), ("longest", 400, 0)):
        driver.add(name, length, 1, priority=priority)
    assert answered(driver) == ["long", "longest", "late", "later"]


@pytest.mark.parametrize(("slack_ms", "expected"), [(-5, ["second", "first in"]), (5, ["first in", "second"])])
def test_the_deadline_that_leaves_less_time_for_its_work_goes_first(slack_ms: int, expected: list[str]) -> None:
    driver = occupied("deadline")
    driver.add("first in", 100, 1, slo=Slo(ttft_ns=5000 * NS_PER_MS))
    more_ns = int(work_ns(400) - work_ns(100))
    driver.add("second", 400, 1, slo=Slo(ttft_ns=(5000 + slack_ms) * NS_PER_MS + more_ns))
    assert answered(driver) == expected


def test_by_arrival_neither_work_nor_priority_nor_deadline_counts() -> None:
    driver = occupied("fcfs")
    driver.add("long", 600, 1, priority=5)
    driver.add("short", 60, 1, slo=Slo(ttft_ns=1))
    driver.add("important", 60, 1, priority=-5)
    assert answered(driver) == ["long", "short", "important"]
