"""How long a running stream may stand still: what it waits for when it has lost its blocks, and what waits for it."""

from itertools import pairwise

import pytest

from diptych.control.commands import Prefill, Reserve, Serve, wait_class_of
from diptych.control.config import (
    BudgetConfig,
    CacheConfig,
    CapsConfig,
    EngineConfig,
    OrderName,
    PreemptionConfig,
    PreemptionName,
    SchedulerConfig,
)
from diptych.control.engine.engine_core import EngineCore
from diptych.control.events import (
    Event,
    HandoffReserved,
    HandoffRevoked,
    RequestAdmitted,
    RequestPreempted,
    RequestResumed,
)
from diptych.control.request import Request, RequestOptions, WaitClass
from diptych.control.step import SchedulerOutput, StepResult
from tests.control.driver import Driver, expect_answers

BLOCK = 16
ORDERS: tuple[OrderName, ...] = ("fcfs", "priority", "shortest", "deadline")


def make(num_blocks: int, scheduler: SchedulerConfig, *, num_host_blocks: int = 0) -> Driver:
    """A worker that expects short answers: it admits too much, and its streams must grow into something."""
    driver = Driver(EngineConfig(CacheConfig(num_blocks, BLOCK, num_host_blocks, watermark_blocks=0), scheduler))
    expect_answers(driver.core, 1)
    return driver


def small_steps(order: OrderName = "fcfs", tokens: int = 4, **changes: object) -> SchedulerConfig:
    """Prompts take many steps."""
    budget = BudgetConfig("fixed", tokens, min_chunk_tokens=1)
    return SchedulerConfig(order, budget, max_num_seqs=4, **changes)  # type: ignore[arg-type]


def preempted(driver: Driver) -> list[tuple[str, bool]]:
    return [(event.request_id, event.is_stream) for event in driver.log if isinstance(event, RequestPreempted)]


def admitted(driver: Driver) -> list[str]:
    return [event.request_id for event in driver.log if isinstance(event, RequestAdmitted)]


def gaps(driver: Driver, request_id: str) -> list[int]:
    """Nanoseconds between tokens of a request, by the steps in which it took part."""
    times, first = [driver.first_token_ns(request_id)], True
    for step, output in zip(driver.steps(), driver.outputs, strict=True):
        if first:
            first = step.end_ns != times[0]
        elif output.num_decodes:
            times.append(step.end_ns)
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("order", ORDERS)
def test_a_stream_grows_into_the_blocks_of_a_prompt_that_is_half_computed(order: OrderName) -> None:
    driver = make(10, small_steps(order))
    driver.add("stream", 32, 60)
    while "stream" not in {event.request_id for event in driver.log if type(event).__name__ == "FirstToken"}:
        driver.step()
    driver.add("prompt", 110, 8)
    driver.run()
    assert preempted(driver)[0] == ("prompt", False)
    assert {name for name, is_stream in preempted(driver) if is_stream} == set()
    ended = driver.finished()
    assert ended["prompt"].num_preemptions == ended["stream"].num_preemptions == 0
    assert ended["prompt"].latency.num_output_tokens == 8
    assert driver.core.stats().num_preemptions == 0


def test_a_stream_does_not_grow_into_the_blocks_of_a_prompt_that_may_displace_it() -> None:
    driver = make(10, small_steps("priority", preemption=PreemptionConfig(from_waiting=True)))
    driver.add("stream", 32, 60, priority=3)
    for _ in range(9):
        driver.step()
    driver.add("prompt", 110, 8, priority=0)
    driver.run()
    assert preempted(driver)[0] == ("stream", True)


def test_a_prompt_that_is_computed_for_another_worker_keeps_its_blocks() -> None:
    """Its KV may be on its way out of them."""
    driver = make(10, small_steps())
    driver.add("stream", 32, 60)
    for _ in range(9):
        driver.step()
    request = driver.add("handed over", 110, 8)
    request.hands_off = True
    while driver.core.requests.get("stream") and not preempted(driver):
        driver.step()
    assert preempted(driver) == [("stream", True)]


@pytest.mark.parametrize("displaces", [False, True])
def test_an_important_prompt_waits_for_a_stream_that_lost_its_blocks_unless_it_may_displace_it(displaces: bool) -> None:
    preemption = PreemptionConfig(from_waiting=displaces, max_per_request=1)
    driver = make(16, small_steps("priority", tokens=64, preemption=preemption))
    driver.add("a", 100, 100, priority=4)
    driver.add("b", 80, 100, priority=5)
    while not preempted(driver):
        driver.step()
    driver.add("important", 4, 4, priority=0)
    driver.run()
    assert admitted(driver)[-2:] == (["important", "b"] if displaces else ["b", "important"])


def test_streams_come_back_in_the_order_in_which_they_came() -> None:
    driver = make(30, small_steps("shortest", tokens=64))
    for name, length in (("a", 120), ("b", 100), ("c", 80), ("d", 60)):
        driver.add(name, length, 120)
    driver.run()
    lost = [name for name, is_stream in preempted(driver) if is_stream]
    assert len(set(lost)) > 1
    back = admitted(driver)[4:]
    waiting: list[str] = []
    for event in driver.log:
        if isinstance(event, RequestPreempted):
            waiting.append(event.request_id)
        elif isinstance(event, RequestAdmitted) and not event.is_first:
            assert event.request_id == min(waiting)
            waiting.remove(event.request_id)
    assert sorted(back) == sorted(lost)


def test_no_cap_on_prompts_keeps_a_stream_from_its_blocks() -> None:
    driver = make(18, small_steps(caps=CapsConfig(max_partial_prefills=1)))
    driver.add("a", 16, 60)
    driver.add("b", 16, 100)
    for _ in range(9):
        driver.step()
    driver.add("handed over", 180, 8).hands_off = True
    while driver.core.scheduler.waiting or driver.core.scheduler.prefilling:
        driver.step()
        if admitted(driver) == ["a", "b", "handed over", "b"]:
            break
    assert "handed over" in driver.core.scheduler.prefilling
    assert admitted(driver)[3:] == ["b"]


def test_prompts_that_leave_with_their_first_token_do_not_stop_streams_for_ever() -> None:
    driver = make(20, SchedulerConfig("fcfs", BudgetConfig("whole", 64), max_num_seqs=4))
    driver.add("stream", 16, 40)
    driver.step()
    number = 0
    while "stream" in driver.core.requests:
        for _ in range(2):
            driver.add(f"prompt{number}", 60, 1)
            number += 1
        driver.step()
        assert number < 2000, "the stream never ends"
    capacity = driver.core.kv.capacity_tokens
    longest = 5e6 + 50_000 * 60 + 5 * 60 * 61 / 2
    assert max(gaps(driver, "stream")) <= (capacity / 60 + 2) * longest


def test_blocks_that_a_request_shares_with_its_victim_are_not_counted_as_room_for_it() -> None:
    preemption = PreemptionConfig(from_waiting=True, min_steps=1)
    scheduler = SchedulerConfig("priority", BudgetConfig("fixed", 256), preemption=preemption, max_num_seqs=8)
    driver = make(16, scheduler)
    stem = list(range(96))
    driver.add("least", stem, 60, priority=9)
    driver.add("low", 64, 60, priority=8)
    for _ in range(4):
        driver.step()
    driver.add("high", [*stem, *range(1000, 1090)], 30, priority=0)
    driver.run()
    assert {name for name, _ in preempted(driver)} == {"least", "low"}


class Worker:
    """An engine that gets reservations; nothing is computed for real."""

    def __init__(self, num_blocks: int, **changes: object) -> None:
        self.now = 0
        self.log: list[Event] = []
        scheduler = SchedulerConfig(**changes)  # type: ignore[arg-type]
        self.core = EngineCore(EngineConfig(CacheConfig(num_blocks, BLOCK, 40), scheduler))
        expect_answers(self.core, 1)

    def step(self) -> SchedulerOutput | None:
        self.now += 1
        output = self.core.begin_step(self.now)
        if output is None:
            self.log += self.core.take_events()
        else:
            self.log += self.core.end_step(StepResult(output.step_id), self.now)
        return output

    def reserve(self, name: str, num_tokens: int, standing: WaitClass = WaitClass.NEW, priority: int = 0) -> None:
        request = Request(name, num_tokens, 8, options=RequestOptions(priority=priority))
        request.wait_class_at_arrival = standing
        assert self.core.reserve(request, self.now) == []

    def until_preempted(self) -> None:
        for _ in range(400):
            self.step()
            if any(isinstance(event, RequestPreempted) for event in self.log):
                return
        raise AssertionError("no stream lost its blocks")

    def names(self, kind: type[Event]) -> list[str]:
        return [event.request_id for event in self.log if isinstance(event, kind)]  # type: ignore[attr-defined]


def crowded(**changes: object) -> Worker:
    """Two streams that grow, and three reservations for prompts that other workers will compute."""
    worker = Worker(30, **changes)
    for name in ("first", "second"):
        assert worker.core.add_request(Request(name, 80, 100), worker.now)
    worker.step()
    for number in range(3):
        worker.reserve(f"prompt{number}", 40)
    worker.step()
    assert worker.names(HandoffReserved) == ["prompt0", "prompt1", "prompt2"]
    return worker


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_stream_without_blocks_recalls_the_latest_reservations_and_no_more_than_it_needs(
    preemption: PreemptionName,
) -> None:
    worker = crowded(preemption=PreemptionConfig(preemption))
    worker.until_preempted()
    for _ in range(5):
        worker.step()
    revoked = worker.names(HandoffRevoked)
    assert revoked and revoked == ["prompt2", "prompt1", "prompt0"][: len(revoked)]
    for name in revoked:
        worker.core.drop(name, worker.now)
    for _ in range(3):
        worker.step()
    back = [*worker.names(RequestAdmitted)[2:], *worker.names(RequestResumed)]
    assert back == ["second"], "it has its blocks again, while two of five requests still hold theirs"
    assert len(revoked) < 3
    worker.core.kv.check()


def test_kv_that_comes_although_it_was_recalled_begins_to_decode() -> None:
    worker = crowded()
    worker.until_preempted()
    worker.step()
    (name, *_) = worker.names(HandoffRevoked)
    assert worker.core.deliver(name, worker.now, first_step_ns=0, first_token_ns=1)
    assert worker.core.scheduler.incoming.revoked.keys() == set(worker.names(HandoffRevoked)) - {name}
    worker.step()
    assert name in worker.core.scheduler.batch


def test_reservations_are_seated_by_standing_and_then_by_arrival() -> None:
    worker = Worker(num_blocks=200)
    for name, standing in (
        ("new", WaitClass.NEW),
        ("returning", WaitClass.RETURNING),
        ("newer", WaitClass.NEW),
        ("stream", WaitClass.STREAM),
        ("returning later", WaitClass.RETURNING),
    ):
        worker.reserve(name, 40, standing)
    worker.step()
    assert worker.names(HandoffReserved) == ["stream", "returning", "returning later", "new", "newer"]


def test_the_standing_of_an_attempt_follows_from_its_command() -> None:
    assert wait_class_of(Serve(0, "a", "a", 0)) is WaitClass.NEW
    assert wait_class_of(Reserve(0, "a", "a~1", 0, 0, False)) is WaitClass.RETURNING
    assert wait_class_of(Prefill(0, "a", "a~2", 7, 1, 0, (), 0)) is WaitClass.STREAM


@pytest.mark.parametrize("order", ORDERS)
def test_a_stream_whose_worker_died_passes_the_prompts_that_wait_here(order: OrderName) -> None:
    driver = make(10, small_steps(order))
    driver.add("busy", 100, 4)
    driver.step()
    driver.add("prompt", 20, 4)
    driver.add("stream", 130, 4, standing=WaitClass.STREAM)
    driver.run()
    assert admitted(driver) == ["busy", "stream", "prompt"]


def test_a_stream_of_which_every_block_is_full_comes_back_from_the_host_when_it_is_alone() -> None:
    """It held the whole cache, and its next token needs no block more than that."""
    scheduler = small_steps("priority", tokens=64, preemption=PreemptionConfig("swap", from_waiting=True, min_steps=1))
    driver = make(5, scheduler, num_host_blocks=8)
    driver.add("whole cache", 60, 20, priority=1)
    while driver.core.kv.pool.num_available:
        driver.step()
    driver.add("high", 16, 2, priority=0)
    driver.run()
    assert preempted(driver) == [("whole cache", True)]
    assert driver.finished()["whole cache"].latency.num_output_tokens == 20


def test_a_request_that_displaces_others_is_admitted_with_the_plan_that_displaces_them() -> None:
    """Its own answer may not fit yet: it can displace more when it grows. Else they would lose their blocks in vain."""
    preemption = PreemptionConfig(from_waiting=True, min_steps=1)
    scheduler = SchedulerConfig("priority", BudgetConfig("fixed", 256), preemption=preemption, max_num_seqs=8)
    driver = make(17, scheduler)
    for number, priority in enumerate((1, 8, 9)):
        driver.add(f"stream{number}", 60, 40, priority=priority)
    for _ in range(8):
        driver.step()
    expect_answers(driver.core, 100, count=1000)
    driver.add("high", 130, 100, priority=0)
    driver.step()
    assert preempted(driver) == [("stream2", True), ("stream1", True)]
    assert admitted(driver)[-1] == "high"
    driver.run()
