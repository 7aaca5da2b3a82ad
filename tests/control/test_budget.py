"""How much a step does: what objectives, caps and cached prefixes leave to prompts."""

from typing import Any

import pytest

from diptych.control.config import BudgetConfig, CacheConfig, CapsConfig, EngineConfig, OrderName, SchedulerConfig
from diptych.control.request import WaitClass
from diptych.control.slo import NS_PER_MS, Slo
from diptych.control.step import SchedulerOutput, StepFeatures, chunk_attention
from tests.control.driver import Driver


class TrueToModel(Driver):
    """A worker whose steps take what its step-time model says: the prior, which then needs no learning."""

    def cost(self, output: SchedulerOutput) -> int:
        return output.predicted_ns


def make(budget: BudgetConfig, caps: CapsConfig | None = None, order: OrderName = "fcfs", **worker: Any) -> Driver:
    settings = SchedulerConfig(order, budget, caps or CapsConfig(), max_num_seqs=16)
    return TrueToModel(EngineConfig(CacheConfig(1000, 16), settings, **worker))


def chunk_sizes(driver: Driver, request_id: str) -> list[int]:
    return [p.num_tokens for output in driver.outputs for p in output.prefills if p.request_id == request_id]


def longest_step_ms(driver: Driver) -> float:
    return max(step.end_ns - step.start_ns for step in driver.steps()) / NS_PER_MS


@pytest.mark.parametrize(("tpot_ms", "limit_ms"), [(None, 50), (20, 20), (200, 50)])
def test_where_nothing_streams_a_newcomer_waits_for_no_step_beyond_the_target_or_the_objective(
    tpot_ms: int | None, limit_ms: int
) -> None:
    slo = Slo(tpot_ns=None if tpot_ms is None else tpot_ms * NS_PER_MS)
    driver = make(BudgetConfig(target_ns=50 * NS_PER_MS, max_batched_tokens=4096), slo=slo)
    driver.add("a", 4000, 1)
    driver.run()
    assert 0.75 * limit_ms < longest_step_ms(driver) <= 0.9 * limit_ms


def test_an_objective_counts_for_as_long_as_its_stream_runs() -> None:
    sizes = []
    for has_hurried in (False, True):
        driver = make(BudgetConfig(max_batched_tokens=4096))
        if has_hurried:
            driver.add("hurried", 16, 40, slo=Slo(tpot_ns=10 * NS_PER_MS))
            driver.step()
            driver.add("beside", 200, 1)
            driver.run()
            assert max(chunk_sizes(driver, "beside")) < 100
        driver.add("stream", 16, 200)
        driver.step()
        driver.add("long", 4000, 1)
        driver.run()
        sizes.append(chunk_sizes(driver, "long"))
    assert sizes[0] == sizes[1] and max(sizes[0]) > 1000


@pytest.mark.parametrize(("standing", "largest"), [(WaitClass.NEW, 5), (WaitClass.STREAM, 24)])
def test_a_stream_that_is_computed_again_may_lengthen_steps_by_a_quarter_of_their_decodes(
    standing: WaitClass, largest: int
) -> None:
    """The objective leaves 0.2 ms beside the decode of 5.2 ms, a quarter of which is 1.3; a token takes 0.05 ms."""
    driver = make(BudgetConfig(min_chunk_tokens=1), slo=Slo(tpot_ns=6 * NS_PER_MS))
    driver.add("running", 16, 400)
    driver.step()
    driver.add("computed", 200, 2, standing=standing)
    while driver.core.scheduler.waiting or driver.core.scheduler.prefilling:
        driver.step()
    assert max(chunk_sizes(driver, "computed")) == largest
    driver.run()


def test_the_tightest_objective_that_can_be_met_decides() -> None:
    largest = []
    for own_ms in (None, 30, 60):
        driver = make(BudgetConfig(max_batched_tokens=4096, target_ns=60 * NS_PER_MS))
        driver.add("stream", 16, 200, slo=None if own_ms is None else Slo(tpot_ns=own_ms * NS_PER_MS))
        driver.add("loose", 16, 200, slo=Slo(tpot_ns=200 * NS_PER_MS))
        driver.step()
        driver.step()
        before = len(driver.outputs)
        driver.add("long", 4000, 1)
        driver.run()
        assert longest_step_ms(driver) <= 0.9 * (own_ms or 60)
        largest.append(max(p.num_tokens for output in driver.outputs[before:] for p in output.prefills))
    assert largest[0] == largest[2] > 1.5 * largest[1]


def test_chunks_that_do_not_end_a_prompt_are_whole_tiles() -> None:
    driver = make(BudgetConfig(max_batched_tokens=4096, target_ns=37 * NS_PER_MS))
    driver.add("a", 3001, 1)
    driver.run()
    *others, last = chunk_sizes(driver, "a")
    assert others and all(size % 16 == 0 for size in others) and sum(others) + last == 3001


def test_a_chunk_of_less_than_two_tiles_is_as_large_as_it_can_be() -> None:
    driver = make(BudgetConfig(max_batched_tokens=4096, target_ns=7_100_000))
    driver.add("a", 100, 1)
    driver.run()
    assert chunk_sizes(driver, "a")[0] == 27  # 50 us each, and 1.39 ms are left of the step


def test_a_step_with_no_time_for_prompts_still_moves_the_first_of_them_by_the_smallest_chunk() -> None:
    driver = make(BudgetConfig(max_batched_tokens=4096, min_chunk_tokens=24), slo=Slo(tpot_ns=6_200_000))
    driver.add("stream", 16, 200)
    driver.step()
    driver.add("first", 100, 1)
    driver.add("second", 100, 1)
    output = driver.step()
    assert output is not None
    assert [(p.request_id, p.num_tokens) for p in output.prefills] == [("first", 24)]
    driver.run()
    assert chunk_sizes(driver, "first") == [24, 24, 24, 24, 4]


def test_whole_prompts_share_a_step_up_to_the_limit_and_a_longer_one_has_a_step_of_its_own() -> None:
    driver = make(BudgetConfig("whole", 100))
    for name, length in (("a", 60), ("b", 40), ("c", 1), ("longer", 101), ("d", 1)):
        driver.add(name, length, 1)
    driver.run()
    steps = [[p.request_id for p in output.prefills] for output in driver.outputs if output.prefills]
    assert steps == [["a", "b"], ["c"], ["longer"], ["d"]]


def test_a_prompt_that_ends_in_the_step_needs_no_place_among_those_that_do_not() -> None:
    driver = make(BudgetConfig("fixed", 64), CapsConfig(max_partial_prefills=1), "shortest")
    driver.add("long", 1000, 1)
    driver.step()
    driver.add("short", 20, 1)
    output = driver.step()
    assert output is not None
    assert [p.request_id for p in output.prefills] == ["short", "long"]
    driver.run()


def test_as_many_prompts_may_be_half_done_as_the_cap_says_and_no_more() -> None:
    driver = make(BudgetConfig("fixed", 64, min_chunk_tokens=1), CapsConfig(max_partial_prefills=2), "shortest")
    for name, length in (("c", 1000), ("b", 500), ("a", 100)):  # each is shorter than those before it
        driver.add(name, length, 1)
        output = driver.step()
        assert output is not None
        assert [p.request_id for p in output.prefills] == ["b" if name == "a" else name]
    driver.run()
    first = [driver.first_token_ns(name) for name in "bac"]
    assert first == sorted(first)


def test_a_prompt_is_long_by_what_is_not_cached_of_it_and_only_beyond_the_threshold() -> None:
    driver = make(BudgetConfig("fixed", 512), CapsConfig(0, 1, 100))
    stem = [driver.rng.randrange(1000) for _ in range(160)]
    driver.add("stem", stem, 1)
    driver.run()
    driver.add("long", 600, 1)
    driver.add("also long", 101, 1)
    driver.add("mostly cached", [*stem, *range(100)], 1)
    driver.add("at the threshold", 100, 1)
    driver.step()
    output = driver.step()
    assert output is not None
    started = {p.request_id for output in driver.outputs for p in output.prefills}
    assert {"mostly cached", "at the threshold"} <= started and "also long" not in started
    driver.run()


def test_what_is_cached_of_a_prompt_counts_as_no_work_in_the_order_and_in_the_backlog() -> None:
    driver = make(BudgetConfig("fixed", 64), order="shortest")
    stem = [driver.rng.randrange(1000) for _ in range(480)]
    driver.add("stem", stem, 1)
    driver.run()
    assert driver.core.load(driver.now).backlog_ns == 0
    driver.add("fresh", 200, 1)
    fresh_ns = driver.core.load(driver.now).backlog_ns
    assert fresh_ns == pytest.approx(50_000 * 200 + chunk_attention(0, 200), rel=1e-4)
    driver.add("cached", [*stem, *range(20)], 1)
    cached_ns = driver.core.load(driver.now).backlog_ns - fresh_ns
    assert cached_ns == pytest.approx(50_000 * 20 + chunk_attention(480, 20), rel=1e-4)
    driver.run()
    assert driver.first_token_ns("cached") < driver.first_token_ns("fresh")
    assert driver.finished()["cached"].num_cached_tokens == 480


def test_a_prompt_that_is_half_done_is_as_much_backlog_as_is_left_of_it() -> None:
    driver = make(BudgetConfig("fixed", 64))
    driver.add("a", 200, 4)
    for done in (0, 64, 128, 192):
        expected = 50_000 * (200 - done) + chunk_attention(done, 200 - done)
        assert driver.core.load(driver.now).backlog_ns == pytest.approx(expected, rel=1e-4)
        driver.step()
    assert driver.core.load(driver.now).backlog_ns == 0
    driver.run()


def test_a_load_report_says_what_is_used_and_what_was_generated_here() -> None:
    driver = make(BudgetConfig("fixed", 64), slo=Slo(tpot_ns=70 * NS_PER_MS))
    driver.add("a", 40, 20)
    driver.add("b", 20, 20)
    for _ in range(4):  # both prompts end with the first step, the others give a token each
        driver.step()
    load = driver.core.load(driver.now)
    assert (load.time_ns, load.num_blocks, load.used_blocks) == (driver.now, 1000, 3 + 2)
    assert load.output_tokens == 8
    prices = (load.fixed_ns, load.token_ns, load.pair_ns, load.sequence_ns, load.context_ns)
    assert prices == pytest.approx((5e6, 5e4, 1.0, 2e5, 50.0), rel=0.01)
    assert load.tpot_ns == 70 * NS_PER_MS
    stats = driver.core.stats()
    assert (stats.num_waiting, stats.num_prefilling, stats.num_decoding, stats.num_swapped) == (0, 0, 2, 0)
    assert stats.kv_usage == pytest.approx(5 / 1000)
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (60, 0)
    assert stats.step_time_coefficients == prices
    driver.run()


def test_a_step_is_predicted_from_all_that_it_computes() -> None:
    driver = make(BudgetConfig("fixed", 64))
    driver.add("a", 40, 20)
    driver.step()
    driver.add("b", 20, 20)
    output = driver.step()
    assert output is not None
    assert output.features == StepFeatures(20, chunk_attention(0, 20), 1, 41)
    predicted_ns = 5e6 + 5e4 * 20 + chunk_attention(0, 20) + 2e5 + 50 * 41
    assert output.predicted_ns == pytest.approx(predicted_ns, rel=1e-4)
    driver.run()
