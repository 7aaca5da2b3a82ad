"""What the scheduler promises, one sentence a test."""

from collections.abc import Callable
from typing import Any, get_args

import pytest

from diptych.control.config import (
    BudgetConfig,
    CacheConfig,
    CapsConfig,
    EngineConfig,
    OrderName,
    PreemptionConfig,
    PreemptionName,
    SchedulerConfig,
    shape_preset,
)
from diptych.control.engine.scheduler.order import ORDERS, OrderKey, RequestOrder
from diptych.control.engine.scheduler.step_time import LEARN_EVERY
from diptych.control.errors import ConfigError
from diptych.control.events import RequestPreempted, RequestResumed, StepFinished
from diptych.control.request import FinishReason, Request
from diptych.control.slo import NS_PER_MS, Slo
from diptych.control.step import StepFeatures, StepResult
from tests.control.driver import Driver, expect_answers


def make(
    order: OrderName = "fcfs",
    budget: BudgetConfig | None = None,
    caps: CapsConfig | None = None,
    preemption: PreemptionConfig | None = None,
    *,
    num_blocks: int = 400,
    num_host_blocks: int = 0,
    max_num_seqs: int = 16,
    **worker: Any,
) -> Driver:
    """A driver with the given policies and blocks of 16 tokens."""
    settings = SchedulerConfig(
        order=order,
        budget=budget or BudgetConfig("fixed", 64),
        caps=caps or CapsConfig(),
        preemption=preemption or PreemptionConfig(),
        max_num_seqs=max_num_seqs,
    )
    cache = CacheConfig(num_blocks, block_size=16, num_host_blocks=num_host_blocks, watermark_blocks=2)
    return Driver(EngineConfig(cache, settings, **worker))


def optimistic(driver: Driver) -> Driver:
    """Make the core expect answers of one token, so that it admits too much."""
    expect_answers(driver.core, 1)
    return driver


def chunks(driver: Driver, request_id: str) -> list[int]:
    """Sizes of the chunks in which a prompt was computed."""
    return [p.num_tokens for output in driver.outputs for p in output.prefills if p.request_id == request_id]


def test_a_short_prompt_passes_a_long_one_that_is_half_done() -> None:
    driver = make("shortest")
    driver.add("long", 1000)
    for _ in range(5):
        driver.step()
    driver.add("short", 20)
    driver.run()
    assert driver.first_token_ns("short") < driver.first_token_ns("long")
    short_step = next(o for o in driver.outputs if any(p.request_id == "short" for p in o.prefills))
    assert short_step.step_id <= 6


def test_first_come_first_served_keeps_the_order_of_arrival() -> None:
    driver = make("fcfs")
    driver.add("long", 1000)
    driver.add("short", 20)
    driver.run()
    assert driver.first_token_ns("long") <= driver.first_token_ns("short")
    assert chunks(driver, "long")[:15] == [64] * 15


def test_aging_lets_a_long_prompt_through_a_stream_of_short_ones() -> None:
    driver = make("shortest")
    driver.add("long", 600, 2)
    for number in range(400):
        driver.add(f"s{number}", 60, 2)
        driver.step()
    driver.run()
    last_short = max(driver.first_token_ns(f"s{n}") for n in range(400))
    assert driver.first_token_ns("long") < last_short


def test_a_lower_priority_number_goes_first() -> None:
    driver = make("priority")
    for name, priority in (("low", 5), ("high", 0), ("middle", 3)):
        driver.add(name, 100, priority=priority)
    driver.run()
    times = [driver.first_token_ns(name) for name in ("high", "middle", "low")]
    assert times == sorted(times)


def test_the_earliest_deadline_goes_first_and_a_hopeless_one_steps_back() -> None:
    driver = make("deadline", BudgetConfig("fixed", 32))
    driver.add("relaxed", 64, slo=Slo(ttft_ns=10_000 * NS_PER_MS))
    driver.add("tight", 64, slo=Slo(ttft_ns=100 * NS_PER_MS))
    driver.add("hopeless", 64, slo=Slo(ttft_ns=1))
    driver.run()
    assert driver.first_token_ns("tight") < driver.first_token_ns("relaxed")
    assert driver.finished()["hopeless"].reason is FinishReason.LENGTH


def test_a_hopeless_request_that_is_alone_is_computed_at_once() -> None:
    driver = make("deadline", BudgetConfig("fixed", 32))
    driver.now = 10**9
    driver.add("hopeless", 8, slo=Slo(ttft_ns=1))
    assert driver.core.begin_step(driver.now) is not None


def test_unified_runs_prompts_whole_and_before_decodes() -> None:
    driver = Driver(EngineConfig(CacheConfig(400, 16), shape_preset("unified")))
    driver.add("a", 300, 50)
    driver.step()
    driver.add("b", 700)
    driver.run()
    assert chunks(driver, "a") == [300]
    assert chunks(driver, "b") == [700]


def test_a_fixed_budget_counts_decodes_and_prompt_tokens_together() -> None:
    driver = make(budget=BudgetConfig("fixed", 32))
    driver.add("stream", 10, 40)
    driver.step()
    driver.add("long", 100)
    driver.run()
    assert chunks(driver, "long") == [31, 31, 31, 7]


def test_chunks_shrink_so_that_a_running_stream_keeps_its_objective() -> None:
    driver = make(budget=BudgetConfig("slo", 2048), slo=Slo(tpot_ns=40 * NS_PER_MS), num_blocks=1000)
    driver.add("warm", 1500, 3)
    driver.run()
    for tokens in (16, 64, 256, 512) * 8:  # what the machine of the driver really costs
        features = StepFeatures(tokens, tokens * (tokens + 1) // 2, tokens // 16, tokens * 30)
        driver.core.observe(
            features,
            5_000_000 + 50_000 * tokens + 5 * features.prefill_attention + 100_000 * features.decode_seqs
            + 20 * features.decode_context,
        )  # fmt: skip
    driver.add("stream", 10, 60)
    driver.step()
    begun = len(driver.steps())
    driver.add("long", 6000)
    while driver.core.scheduler.prefilling or driver.core.scheduler.waiting:
        driver.step()
    gaps = [step.end_ns - step.start_ns for step in driver.steps()[begun:]]
    assert max(gaps) <= 40 * NS_PER_MS
    assert sum(gaps) / len(gaps) > 20 * NS_PER_MS  # and the room is used
    driver.run()


def test_a_hopeless_objective_does_not_shrink_the_step_for_everybody() -> None:
    driver = make(budget=BudgetConfig("slo", 2048, 100 * NS_PER_MS), num_blocks=1000)
    driver.add("hopeless", 10, 500, slo=Slo(tpot_ns=1))
    driver.step()
    driver.add("long", 3000)
    driver.run()
    assert max(chunks(driver, "long")) > 200


def test_partial_prefills_never_exceed_their_cap() -> None:
    driver = make("fcfs", BudgetConfig("fixed", 256), CapsConfig(2, 1, 100))
    for number in range(12):
        driver.add(f"r{number}", 90 if number % 2 else 400)
    driver.run()  # the driver asserts both caps in every step


def test_a_capped_long_prompt_is_skipped_and_short_ones_behind_it_run() -> None:
    driver = make("fcfs", BudgetConfig("fixed", 512), CapsConfig(4, 1, 100))
    driver.add("long-1", 1000)
    driver.add("long-2", 1000)
    driver.add("short", 10)
    first = driver.step()
    assert first is not None
    assert {p.request_id for p in first.prefills} == {"long-1"}  # the budget is used up by then
    driver.run()
    assert driver.first_token_ns("short") < driver.first_token_ns("long-2")


def test_a_whole_prompt_gets_its_blocks_at_admission() -> None:
    driver = make()
    request = driver.add("a", 500)
    driver.step()
    assert request.num_blocks == -(-500 // 16)
    driver.run()


def test_admission_looks_at_the_peak_to_come() -> None:
    driver = make(num_blocks=40)  # 640 tokens
    driver.add("a", 200, 200)
    driver.add("b", 200, 200)
    driver.run()
    assert not [event for event in driver.log if isinstance(event, RequestPreempted)]
    ended = driver.finished()
    assert ended["b"].latency.queue_ns > 0


@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_a_decode_that_cannot_grow_displaces_the_latest_arrival(kind: PreemptionName) -> None:
    preemption = PreemptionConfig(kind)
    driver = optimistic(make(preemption=preemption, num_blocks=24, num_host_blocks=30))
    for number in range(3):
        driver.add(f"r{number}", 100, 120)
    driver.run()
    preempted = [event for event in driver.log if isinstance(event, RequestPreempted)]
    assert preempted
    assert all(event.swapped == (kind == "swap") for event in preempted)
    assert "r0" not in {event.request_id for event in preempted}
    if kind == "swap":
        assert [event for event in driver.log if isinstance(event, RequestResumed)]
    assert all(event.latency.num_output_tokens == 120 for event in driver.finished().values())


def test_a_more_important_request_displaces_a_running_one_but_not_at_once_and_not_forever() -> None:
    preemption = PreemptionConfig(from_waiting=True, min_steps=5, max_per_request=2)
    driver = make("priority", preemption=preemption, max_num_seqs=1)
    driver.add("low", 20, 100, priority=10)
    driver.step()
    for number in range(6):
        driver.add(f"high{number}", 20, 10, priority=0)
        for _ in range(20):
            driver.step()
    driver.run()
    ended = driver.finished()
    assert ended["low"].num_preemptions == 2
    assert ended["low"].latency.num_output_tokens == 100
    steps = [e for e in driver.log if isinstance(e, RequestPreempted)]
    assert all(event.by_priority for event in steps)


def test_a_half_prefilled_prompt_is_never_preempted() -> None:
    driver = optimistic(make("shortest", BudgetConfig("fixed", 16), num_blocks=30))
    driver.add("stream", 30, 300)
    for _ in range(3):
        driver.step()
    driver.add("long", 300)
    driver.run()
    assert {e.request_id for e in driver.log if isinstance(e, RequestPreempted)} <= {"stream"}


def test_the_second_request_reuses_the_prefix_of_the_first() -> None:
    driver = make()
    prompt = list(range(200))
    driver.add("a", prompt)
    driver.run()
    driver.add("b", [*prompt[:150], 7, 7, 7])
    driver.run()
    assert driver.finished()["b"].num_cached_tokens == 144  # nine blocks of 16


def test_siblings_that_arrive_together_compute_their_prefix_once() -> None:
    driver = make(budget=BudgetConfig("fixed", 512))
    prompt = list(range(320))
    for number in range(6):
        driver.add(f"n{number}", prompt)
    driver.run()
    computed = sum(p.num_tokens for output in driver.outputs for p in output.prefills)
    assert computed == 320 + 5 * 16  # the last block is computed by each: its logits are needed


def test_the_answer_of_one_turn_is_found_by_the_next() -> None:
    driver = make()
    prompt = list(range(30))
    driver.add("turn-1", prompt, 40)
    sequence = driver.executor.sequences["turn-1"]
    driver.run()
    driver.add("turn-2", [*sequence.tokens, 5, 5])
    driver.run()
    assert driver.finished()["turn-2"].num_cached_tokens == 64  # 69 tokens had their KV computed


def test_an_abort_frees_the_blocks_for_the_very_next_step() -> None:
    driver = make(num_blocks=40)
    driver.add("a", 400, 100)
    driver.add("b", 400, 100)
    driver.step()
    assert driver.core.scheduler.block_owners.num_running == 1
    driver.abort("a")
    driver.step()
    assert driver.core.requests["b"].block_tables
    driver.run()
    assert driver.finished()["a"].reason is FinishReason.ABORT


def test_what_can_never_fit_is_refused_with_a_reason() -> None:
    driver = make(num_blocks=20, max_model_len=1000)
    driver.add("prompt", 1000)
    driver.add("cache", 200, 300)
    driver.add("fine", 200, 10)
    driver.run()
    ended = driver.finished()
    assert "1000" in ended["prompt"].message
    assert "288" in ended["cache"].message
    assert ended["fine"].reason is FinishReason.LENGTH


def trusted(driver: Driver) -> Driver:
    """The step-time model has seen enough to be left alone for a while."""
    for tokens in range(16, 48):
        driver.core.observe(StepFeatures(tokens, tokens * tokens, 1, tokens), 5_000_000 + 50_000 * tokens)
    return driver


def test_a_plan_repeats_until_somebody_ends_or_there_is_something_to_learn() -> None:
    driver = trusted(make())
    driver.add("short", 20, 6)
    driver.add("b", 20, 300)
    driver.step()
    output = driver.step()
    assert output is not None
    assert output.max_repeats == 5  # five tokens after the first, and the shorter of the two has ended
    for _ in range(5):
        output = driver.step()
    assert output is not None
    assert output.max_repeats == LEARN_EVERY - 5
    driver.run()


def test_a_plan_repeats_only_up_to_the_next_block_when_blocks_are_scarce() -> None:
    driver = trusted(optimistic(make(num_blocks=8)))
    driver.add("a", 20, 40)
    driver.add("b", 44, 40)
    driver.step()
    output = driver.step()
    assert output is not None
    assert output.max_repeats == 4  # tokens 45 .. 48 fill the third block of b
    driver.run()


def test_a_full_house_repeats_its_plan_although_others_wait() -> None:
    driver = trusted(make(max_num_seqs=1))
    driver.add("a", 20, 12)
    driver.add("waits", 20, 12)
    driver.step()
    output = driver.step()
    assert output is not None
    assert (output.num_decodes, output.max_repeats) == (1, 11)
    driver.run()


def test_a_repeated_step_is_as_good_as_its_steps() -> None:
    one_by_one, at_once = trusted(make(num_blocks=100)), trusted(make(num_blocks=100))
    for driver in (one_by_one, at_once):
        driver.add("a", 20, 30)
        driver.add("b", 40, 90)
        driver.step()
    for _ in range(25):
        one_by_one.step()
    core = at_once.core
    output = core.begin_step(at_once.now)
    assert output is not None
    at_once.now = one_by_one.now
    (event,) = core.end_step(StepResult(output.step_id), at_once.now, num_steps=25)
    assert isinstance(event, StepFinished)
    assert event == StepFinished(
        output.step_id, event.start_ns, at_once.now, (), 2, 62, output.predicted_ns, num_steps=25
    )
    for request_id, request in core.requests.items():
        twin = one_by_one.core.requests[request_id]
        assert request.block_tables == twin.block_tables
        assert core.scheduler.batch.num_outputs(request) == one_by_one.core.scheduler.batch.num_outputs(twin) == 26
    assert core.scheduler.batch.context == one_by_one.core.scheduler.batch.context


def test_a_steady_decode_step_names_no_request() -> None:
    driver = make(budget=BudgetConfig("fixed", 2048))
    for number in range(10):
        driver.add(f"r{number}", 20, 50)
    for _ in range(3):
        driver.step()
    output = driver.step()
    assert output is not None
    assert output.num_decodes == 10
    assert (output.prefills, output.new_blocks, output.finished, output.paused) == ((), (), (), ())
    driver.run()


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: SchedulerConfig(caps=CapsConfig(2, 1, 4096)), "long_prefill_threshold"),
        (lambda: CapsConfig(2, 3, 100), "max_long_partial_prefills"),
        (lambda: CapsConfig(2, 1, 0), "long_prefill_threshold"),
        (lambda: SchedulerConfig(budget=BudgetConfig("whole"), caps=CapsConfig(2)), "max_partial_prefills"),
        (lambda: SchedulerConfig(max_num_seqs=5000), "max_num_seqs"),
        (lambda: SchedulerConfig(order="nearest"), "order"),  # type: ignore[arg-type]
        (lambda: SchedulerConfig(preemption=PreemptionConfig(from_waiting=True)), "preemption"),
        (lambda: CacheConfig(4, watermark_blocks=4), "num_blocks"),
        (lambda: BudgetConfig(margin=0), "margin"),
        (lambda: shape_preset("diagonal"), "shape"),  # type: ignore[arg-type]
    ],
)
def test_a_setting_that_has_no_effect_or_no_meaning_is_refused(build: Callable[[], object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.param == field


def test_a_worker_where_nothing_streams_may_be_given_longer_steps() -> None:
    longest = {}
    for idle_ns in (None, 200 * NS_PER_MS):
        budget = BudgetConfig(target_ns=50 * NS_PER_MS, idle_target_ns=idle_ns, max_batched_tokens=4096)
        driver = Driver(EngineConfig(CacheConfig(1000, 16), SchedulerConfig(budget=budget)))
        for name in ("first", "second"):  # the model has learnt what a token costs when the second comes
            before = len(driver.outputs)
            driver.add(name, 4000, 1)
            while driver.step():
                pass
        longest[idle_ns] = max(chunk.num_tokens for output in driver.outputs[before:] for chunk in output.prefills)
    assert longest[200 * NS_PER_MS] > 2 * longest[None]


def test_changed_settings_count_from_the_next_step_on_and_nobody_loses_a_place() -> None:
    driver = make("fcfs", BudgetConfig("fixed", 64))
    driver.add("runs", 20, 30)
    driver.add("long", 1000)
    driver.step()
    driver.add("short", 30)
    driver.step()
    assert "short" not in driver.core.scheduler.prefilling
    chunked = SchedulerConfig(order="shortest", budget=BudgetConfig("fixed", 200), max_num_seqs=16)
    driver.core.configure(chunked)
    output = driver.step()
    assert output is not None and output.num_decodes == 1
    assert [chunk.request_id for chunk in output.prefills] == ["short", "long"]
    assert driver.core.config.scheduler == chunked
    driver.run()
    assert driver.core.scheduler.preemption.num_preemptions == 0


def test_settings_for_more_sequences_than_the_worker_was_started_for_are_refused() -> None:
    driver = make(max_num_seqs=4)
    with pytest.raises(ConfigError, match="max_num_seqs is 5; this worker was started for 4"):
        driver.core.configure(SchedulerConfig(max_num_seqs=5))
    driver.core.configure(SchedulerConfig(max_num_seqs=2))
    driver.core.configure(SchedulerConfig(max_num_seqs=4))


class LongestFirst(RequestOrder):
    """An order that a stranger adds."""

    def rank(self, request: Request) -> OrderKey:
        return (-request.num_prompt_tokens, request.number)


def test_a_new_order_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "fcfs", LongestFirst)
    driver = make("fcfs", max_num_seqs=1)
    for name, prompt in (("first", 10), ("short", 20), ("long", 60)):
        driver.add(name, prompt)
    driver.run()
    assert driver.first_token_ns("long") < driver.first_token_ns("short") < driver.first_token_ns("first")


def test_every_order_that_can_be_named_exists() -> None:
    assert set(ORDERS) == set(get_args(OrderName))
