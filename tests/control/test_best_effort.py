"""Requests of class batch: what they leave to others, what they keep, and when they come back."""

import pytest

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, PreemptionConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.errors import InvalidRequestError
from diptych.control.events import (
    Event,
    FirstToken,
    HandoffReserved,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestRested,
    RequestResumed,
)
from diptych.control.request import DEFAULT_OPTIONS, Request, RequestOptions
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.control.step import SchedulerOutput, StepFeatures, StepResult
from tests.control.driver import Driver, expect_answers

BLOCK = 16
BATCH = RequestOptions(service_class="batch")


def make(num_blocks: int = 200, *, num_host_blocks: int = 0, max_num_seqs: int = 8, **changes: object) -> Driver:
    """A worker whose prompts take several steps."""
    preemption = PreemptionConfig("swap" if num_host_blocks else "recompute")
    settings = {"order": "fcfs", "budget": BudgetConfig("fixed", 64), "preemption": preemption, **changes}
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, **settings)  # type: ignore[arg-type]
    driver = Driver(EngineConfig(CacheConfig(num_blocks, BLOCK, num_host_blocks, watermark_blocks=0), scheduler))
    lengths = driver.core.scheduler.lengths
    for service_class in ("standard", "batch"):
        for _ in range(100):
            lengths.observe(lengths.group(service_class, 100), 4)
    return driver


def names(driver: Driver, kind: type[Event]) -> list[str]:
    return [event.request_id for event in driver.log if isinstance(event, kind)]


def until_token(driver: Driver, name: str) -> None:
    """Step until the request has given a token."""
    while name not in names(driver, FirstToken):
        assert driver.step() is not None


@pytest.mark.parametrize("kind", ["whole", "fixed", "slo"])
def test_a_stream_rests_while_another_request_is_served_and_then_goes_on(kind: str) -> None:
    driver = make(budget=BudgetConfig(kind, 128))  # type: ignore[arg-type]
    driver.add("batch", 40, 60, service_class="batch")
    until_token(driver, "batch")
    driver.step()
    given = driver.core.scheduler.batch.num_outputs(driver.core.requests["batch"])
    driver.add("other", 100, 10)
    while "other" in driver.core.requests:
        output = driver.step()
        assert output is not None
        assert driver.core.requests["batch"].num_output_tokens <= given + 1
        assert driver.core.stats().num_resting in (0, 1)
    driver.run()
    assert names(driver, RequestRested) == names(driver, RequestResumed) == ["batch"]
    assert not names(driver, RequestPreempted)
    ended = driver.finished()
    assert (ended["batch"].latency.num_output_tokens, ended["other"].latency.num_output_tokens) == (60, 10)


def test_others_are_served_as_if_no_batch_were_there() -> None:
    """From the step after the one that was under way when they came."""

    def times(*, with_batch: bool) -> list[int]:
        driver = make()
        if with_batch:
            for number in range(4):
                driver.add(f"batch{number}", 100, 80, service_class="batch")
            for _ in range(20):
                driver.step()
        begun = driver.now
        for number in range(3):
            driver.add(f"other{number}", 90, 20 + number)
        while any(name.startswith("other") for name in driver.core.requests):
            driver.step()
        ends = driver.finished()
        return [driver.first_token_ns(f"other{number}") - begun for number in range(3)] + [
            ends[f"other{number}"].time_ns - begun for number in range(3)
        ]

    assert times(with_batch=True) == times(with_batch=False)


def test_a_prompt_that_is_half_computed_gives_way_at_the_next_step() -> None:
    driver = make()
    driver.add("batch", 640, 4, service_class="batch")
    driver.step()
    driver.add("other", 200, 4)
    for _ in range(4):
        output = driver.step()
        assert output is not None and {chunk.request_id for chunk in output.prefills} == {"other"}
    assert driver.core.stats().num_resting == 1
    driver.run()
    assert names(driver, RequestAdmitted) == ["batch", "other"]  # it went on where it was
    assert driver.first_token_ns("other") < driver.first_token_ns("batch")


def test_a_prompt_that_waits_gives_way_whatever_its_order_and_priority() -> None:
    driver = make(order="priority", preemption=PreemptionConfig(from_waiting=True))
    driver.add("batch", 100, 4, service_class="batch", priority=-5)
    driver.add("other", 100, 4, priority=5)
    driver.run()
    assert names(driver, RequestAdmitted) == ["other", "batch"]


def test_an_other_prompt_that_begins_like_one_set_aside_does_not_wait_for_it() -> None:
    driver = make()
    stem = list(range(320))
    driver.add("batch", [*stem, 7], 4, service_class="batch")
    driver.step()
    driver.add("first", 640, 200)  # decodes for long
    until_token(driver, "first")
    driver.add("alike", [*stem, 9], 4)
    until_token(driver, "alike")
    assert "first" in driver.core.requests and "batch" not in names(driver, FirstToken)
    driver.run()


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_others_are_admitted_into_the_blocks_of_those_set_aside(num_host_blocks: int) -> None:
    driver = make(num_blocks=12, num_host_blocks=num_host_blocks)
    driver.add("batch", 100, 60, service_class="batch")
    until_token(driver, "batch")
    driver.add("other", 120, 8)
    until_token(driver, "other")
    assert names(driver, RequestPreempted) == ["batch"]
    assert "batch" in driver.core.requests
    driver.run()
    assert driver.finished()["batch"].latency.num_output_tokens == 60
    assert len(names(driver, RequestResumed)) == (1 if num_host_blocks else 0)


def test_a_prompt_that_would_not_fit_all_the_same_takes_no_blocks() -> None:
    driver = make(num_blocks=30)
    driver.add("batch", 100, 60, service_class="batch")
    until_token(driver, "batch")
    driver.add("other", 200, 30)
    until_token(driver, "other")
    driver.add("large", 400, 8)
    while "other" in driver.core.requests:
        driver.step()
    assert not names(driver, RequestPreempted)
    driver.run()
    assert names(driver, RequestPreempted) == ["batch"]


def test_a_stream_grows_into_the_blocks_of_those_set_aside_before_those_of_a_prompt() -> None:
    driver = make(num_blocks=12, budget=BudgetConfig("fixed", 8, min_chunk_tokens=1))
    driver.add("batch", 64, 60, service_class="batch")
    until_token(driver, "batch")
    driver.add("other", 16, 100)
    until_token(driver, "other")
    for _ in range(8):
        driver.step()
    driver.add("prompt", 90, 4)
    driver.run()
    assert names(driver, RequestPreempted) == ["batch"]


def test_one_that_lost_its_blocks_comes_back_when_no_other_is_there() -> None:
    driver = make(num_blocks=12)
    driver.add("batch", 100, 60, service_class="batch")
    until_token(driver, "batch")
    driver.add("other", 60, 100)
    while "batch" not in names(driver, RequestPreempted):
        assert driver.step() is not None
    while "other" in driver.core.requests:
        driver.step()
        assert names(driver, RequestAdmitted).count("batch") == 1
    driver.run()
    assert names(driver, RequestAdmitted).count("batch") == 2


def test_those_set_aside_take_no_seats_from_others() -> None:
    driver = make(max_num_seqs=2)
    for number in range(2):
        driver.add(f"batch{number}", 30, 40, service_class="batch")
        until_token(driver, f"batch{number}")
    for number in range(2):
        driver.add(f"other{number}", 30, 40)
    until_token(driver, "other1")
    assert {"other0", "other1", "batch0", "batch1"} == set(driver.core.requests)
    driver.run()


def test_it_gives_way_no_longer_than_it_is_to() -> None:
    driver = make()
    limit_ns = 300 * NS_PER_MS
    driver.add("batch", 40, 200, service_class="batch", best_effort_ns=limit_ns)
    driver.add("waits", 40, 200, service_class="batch")
    until_token(driver, "waits")
    driver.add("other", 40, 400)
    until_token(driver, "other")
    while "other" in driver.core.requests:
        before = driver.now
        output = driver.step()
        assert output is not None
        is_back = "batch" in driver.executor.batch or "batch" not in driver.core.requests
        assert is_back == (before >= limit_ns), before
        assert "waits" not in driver.executor.batch
    assert names(driver, RequestResumed)[0] == "batch"
    driver.run()


def test_a_prompt_and_one_in_the_queue_stop_giving_way_too() -> None:
    driver = make(budget=BudgetConfig("fixed", 16, min_chunk_tokens=1))
    driver.add("half", 160, 4, service_class="batch", best_effort_ns=100 * NS_PER_MS)
    driver.step()
    driver.add("other", 40, 400)
    driver.add("queued", 40, 4, service_class="batch", best_effort_ns=200 * NS_PER_MS)
    until_token(driver, "queued")
    assert "other" in driver.core.requests and "half" in driver.finished()
    driver.run()


def test_no_time_to_give_way_means_as_any_other() -> None:
    driver = make()
    driver.add("batch", 40, 100, service_class="batch", best_effort_ns=0)
    until_token(driver, "batch")
    driver.add("other", 40, 20)
    driver.run()
    assert not names(driver, RequestRested)
    with pytest.raises(InvalidRequestError, match="best_effort_ns is -1"):
        RequestOptions(service_class="batch", best_effort_ns=-1)


def test_a_prompt_computed_for_another_worker_keeps_its_blocks_and_is_finished_if_others_need_them() -> None:
    driver = make(num_blocks=12)
    driver.add("handed over", 160, 4, service_class="batch").hands_off = True
    driver.step()
    driver.add("other", 100, 4)
    for _ in range(9):
        driver.step()
    assert driver.core.requests["handed over"].is_handed_off
    assert not names(driver, RequestPreempted)
    driver.core.release("handed over", driver.now)
    while "other" in driver.core.requests:
        driver.step()


def test_a_reservation_for_another_request_takes_the_blocks_of_a_running_batch() -> None:
    config = EngineConfig(CacheConfig(12, BLOCK, watermark_blocks=0), SchedulerConfig())
    core = EngineCore(config)
    expect_answers(core, 1)
    core.add_request(Request("batch", 100, 60, options=BATCH), 0)
    now, log = 0, []
    for _ in range(4):
        now += 1
        output = core.begin_step(now)
        assert output is not None
        log += core.end_step(StepResult(output.step_id), now)
    core.reserve(Request("later", 20, 4, options=BATCH), now)
    core.reserve(Request("other", 120, 8), now)
    for _ in range(3):
        now += 1
        if output := core.begin_step(now):
            log += core.end_step(StepResult(output.step_id), now)
        log += core.take_events()
    assert next(event.request_id for event in log if isinstance(event, HandoffReserved)) == "other"
    assert [event.request_id for event in log if isinstance(event, RequestPreempted)] == ["batch"]
    core.kv.check()


def test_a_step_of_batch_alone_may_be_broken_off_for_a_newcomer_and_is_done_again() -> None:
    driver = make(budget=BudgetConfig("fixed", 64))
    driver.add("stream", 30, 20, service_class="batch")
    until_token(driver, "stream")
    driver.add("prompt", 100, 4, service_class="batch")
    core = driver.core
    for with_prompt in (True, False):
        begun = core.begin_step(driver.now)
        assert begun is not None and begun.num_decodes and bool(begun.prefills) == with_prompt
        assert core.is_preemptible_by(DEFAULT_OPTIONS) and not core.is_preemptible_by(BATCH)
        before = core.model.coefficients
        apply_membership(driver, begun)
        driver.now += NS_PER_MS
        driver.log += core.end_step(StepResult(begun.step_id), driver.now, num_steps=0)
        assert core.model.coefficients == before
        again = driver.step()
        assert again is not None
        assert [(chunk.request_id, chunk.start) for chunk in again.prefills] == [
            (chunk.request_id, chunk.start) for chunk in begun.prefills
        ]
        assert again.features == begun.features
        while with_prompt and "prompt" in core.scheduler.prefilling:
            driver.step()
    driver.add("other", 30, 4)
    begun = core.begin_step(driver.now)
    assert begun is not None and not core.is_preemptible_by(DEFAULT_OPTIONS)
    driver.log += core.end_step(driver.executor.execute(begun), driver.now + 1)
    driver.run()
    assert driver.finished()["stream"].latency.num_output_tokens == 20


def apply_membership(driver: Driver, begun: SchedulerOutput) -> None:
    """What an executor does of a step that is broken off."""
    driver.executor.execute(
        SchedulerOutput(
            begun.step_id, finished=begun.finished, paused=begun.paused, swap_out=begun.swap_out,
            swap_in=begun.swap_in, resumed=begun.resumed, new_blocks=begun.new_blocks, features=StepFeatures(),
        )
    )  # fmt: skip


def test_a_request_that_ends_while_it_is_set_aside_leaves_nothing() -> None:
    driver = make()
    driver.add("prompt", 640, 4, service_class="batch", best_effort_ns=NS_PER_S)
    driver.step()
    driver.add("stream", 20, 60, service_class="batch")
    driver.add("other", 40, 60)
    until_token(driver, "other")
    driver.abort("prompt")
    driver.abort("stream")
    assert not len(driver.core.scheduler.best_effort) and not driver.core.scheduler.best_effort.has_limits
    driver.run()
    assert isinstance(driver.log[-1], RequestFinished) or driver.finished()


def test_a_plan_of_others_stands_while_batch_waits_unless_its_time_may_come() -> None:
    def longest(best_effort_ns: int | None) -> int:
        driver = make()
        for _ in range(100):
            driver.core.observe(StepFeatures(0, 0, 1, 40), 5 * NS_PER_MS)
        driver.add("batch", 40, 60, service_class="batch", best_effort_ns=best_effort_ns)
        until_token(driver, "batch")
        driver.add("waits", 40, 60, service_class="batch")
        driver.add("other", 40, 60)
        until_token(driver, "other")
        return max(output.max_repeats for _ in range(9) if (output := driver.step()))

    assert longest(None) > 1
    assert longest(10 * NS_PER_S) == 1
