"""Taking a decode's place away, and giving it back: when, to which request, and in which order they return."""

import pytest

from diptych.control.config import (
    BudgetConfig,
    CacheConfig,
    EngineConfig,
    OrderName,
    PreemptionConfig,
    PreemptionName,
    SchedulerConfig,
)
from diptych.control.events import RequestAdmitted, RequestPreempted, RequestResumed
from tests.control.driver import Driver, expect_answers


def make(order: OrderName, preemption: PreemptionConfig, *, num_blocks: int = 400, max_num_seqs: int = 16) -> Driver:
    scheduler = SchedulerConfig(order, BudgetConfig("fixed", 64), preemption=preemption, max_num_seqs=max_num_seqs)
    return Driver(EngineConfig(CacheConfig(num_blocks, 16, 30, watermark_blocks=2), scheduler))


def preempted(driver: Driver) -> list[str]:
    return [event.request_id for event in driver.log if isinstance(event, RequestPreempted)]


@pytest.mark.parametrize("min_steps", [1, 5, 9])
def test_a_running_request_is_displaced_after_the_steps_that_it_is_due_and_not_before(min_steps: int) -> None:
    preemption = PreemptionConfig(from_waiting=True, min_steps=min_steps)
    driver = make("priority", preemption, max_num_seqs=1)
    driver.add("low", 20, 100, priority=1)
    driver.step()
    driver.add("high", 20, 10, priority=0)
    decodes = 0
    while not preempted(driver):
        output = driver.step()
        assert output is not None
        decodes += output.num_decodes
    assert decodes == min_steps
    driver.run()
    assert driver.finished()["low"].num_preemptions == 1


@pytest.mark.parametrize(("gap", "displaces"), [(2, True), (3, False)])
def test_only_a_request_that_is_more_important_by_the_gap_displaces_another(gap: int, displaces: bool) -> None:
    driver = make("priority", PreemptionConfig(from_waiting=True, priority_gap=gap, min_steps=1), max_num_seqs=1)
    driver.add("low", 20, 30, priority=2)
    for _ in range(5):
        driver.step()
    driver.add("high", 20, 10, priority=0)
    driver.run()
    assert bool(preempted(driver)) == displaces


def test_the_least_important_is_displaced_first_then_the_latest_and_no_more_of_them_than_needed() -> None:
    driver = make("priority", PreemptionConfig(from_waiting=True, min_steps=1), max_num_seqs=4)
    for name, priority in (("first", 2), ("worse", 3), ("last", 2), ("good", 1)):
        driver.add(name, 10, 100, priority=priority)
    for _ in range(4):
        driver.step()
    for number, victim in enumerate(("worse", "last", "first")):
        driver.add(f"high{number}", 10, 100, priority=0)
        driver.step()
        assert preempted(driver)[-1] == victim
    driver.run()
    assert len(preempted(driver)) == 3 == sum(event.num_preemptions for event in driver.finished().values())


def test_a_request_without_blocks_enough_displaces_nothing_when_all_victims_were_not_enough() -> None:
    driver = make("priority", PreemptionConfig(from_waiting=True, min_steps=1), num_blocks=32)
    driver.add("important", 300, 20, priority=0)
    driver.add("low", 20, 60, priority=9)
    for _ in range(8):
        driver.step()
    driver.add("large", 250, 10, priority=1)  # 16 blocks: more than are free, even without "low"
    for _ in range(3):
        driver.step()
    assert preempted(driver) == []
    driver.run()


@pytest.mark.parametrize("order", ["fcfs", "shortest", "deadline"])
def test_a_request_that_lost_its_blocks_comes_back_before_new_ones(order: OrderName) -> None:
    driver = make(order, PreemptionConfig("recompute"), num_blocks=16)
    expect_answers(driver.core, 1)
    driver.add("a", 100, 100)
    driver.add("b", 80, 100)
    while not preempted(driver):
        driver.step()
    (victim,) = preempted(driver)
    driver.add("new", 4, 4)
    driver.run()
    admitted = [event.request_id for event in driver.log if isinstance(event, RequestAdmitted)]
    assert admitted[-2:] == [victim, "new"]


@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_a_displaced_request_gives_all_its_tokens_and_its_first_one_once(kind: PreemptionName) -> None:
    driver = make("priority", PreemptionConfig(kind, from_waiting=True, min_steps=1), max_num_seqs=1)
    driver.add("low", 40, 30, priority=1)
    for _ in range(6):
        driver.step()
    driver.add("high", 20, 10, priority=0)
    driver.run()
    latency = driver.finished()["low"].latency
    assert latency.num_output_tokens == 30
    assert len([event for event in driver.log if isinstance(event, RequestResumed)]) == (kind == "swap")
    assert driver.steps()[0].start_ns == latency.queue_ns
    assert driver.core.stats().num_preemptions == 1


def test_a_small_request_does_not_pass_a_more_important_one_that_waits_for_its_blocks_on_the_host() -> None:
    driver = make("priority", PreemptionConfig("swap", from_waiting=True, min_steps=1), num_blocks=18)
    driver.add("large", 160, 20, priority=1)
    driver.add("least", 20, 20, priority=3)
    for _ in range(6):
        driver.step()
    driver.add("high", 200, 30, priority=0)
    driver.step()
    assert preempted(driver) == ["least", "large"]
    driver.add("small", 10, 5, priority=2)
    driver.run()
    returned = [
        event.request_id
        for event in driver.log
        if isinstance(event, RequestAdmitted | RequestResumed) and event.request_id in ("large", "small")
    ]
    assert returned == ["large", "large", "small"]  # admitted, resumed; admitted
