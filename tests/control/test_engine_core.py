"""One worker from outside: what it refuses, what it measures, what it says of a request at its end."""

from typing import Any

import pytest

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.errors import ConfigError, ContextLengthError, DiptychError, OverloadedError
from diptych.control.events import Event, FirstToken, KVEvents, KVSnapshot, RequestFinished, StepFinished
from diptych.control.request import FinishReason, Request, RequestOptions, SamplingParams, WaitClass
from diptych.control.slo import LatencyBreakdown, Slo
from diptych.control.step import StepFeatures, StepResult, chunk_attention


def core_of(*, num_blocks: int = 34, **changes: Any) -> EngineCore:
    """Blocks of 16 tokens, of which two are never promised; at most 64 tokens a step; a context of 1000 tokens."""
    settings = SchedulerConfig("fcfs", BudgetConfig("fixed", 64), max_num_seqs=16, max_waiting=2)
    config = EngineConfig(CacheConfig(num_blocks, 16, watermark_blocks=2), settings, max_model_len=1000)
    return EngineCore(config.with_(**changes))


def step(core: EngineCore, now: int, took_ns: int = 10, **result: Any) -> list[Event]:
    output = core.begin_step(now)
    assert output is not None
    return core.end_step(StepResult(output.step_id, **result), now + took_ns)


def finished(events: list[Event]) -> RequestFinished:
    (event,) = [event for event in events if isinstance(event, RequestFinished)]
    return event


@pytest.mark.parametrize(
    ("right", "wrong", "param"),
    [
        ((1, 1), (0, 1), "prompt"),
        ((999, 1), (1000, 1), "prompt"),
        ((10, 1), (10, 0), "max_tokens"),
        ((500, 12), (500, 13), "max_tokens"),  # 32 blocks hold 512 tokens
    ],
)
def test_a_request_is_taken_up_to_each_limit_and_refused_by_name_beyond_it(
    right: tuple[int, int], wrong: tuple[int, int], param: str
) -> None:
    core = core_of(num_blocks=34 if param == "max_tokens" else 200)
    core.check_request(Request("right", *right))
    with pytest.raises(DiptychError) as caught:
        core.check_request(Request("wrong", *wrong))
    assert caught.value.param == param
    event = finished(core.add_request(Request("wrong", *wrong), 7))
    assert event.reason is FinishReason.ERROR and event.error is not None
    assert (event.error.param, event.error.kind) == (param, type(caught.value).__name__)
    assert not core.has_work


def test_max_tokens_is_cut_to_what_the_context_leaves() -> None:
    core = core_of(num_blocks=200)
    request = Request("a", 990, 500)
    core.add_request(request, 0)
    assert request.max_tokens == 10


def test_a_prompt_for_another_worker_needs_room_for_itself_only() -> None:
    for length, fits in ((512, True), (513, False)):
        request = Request("a", length, 400)
        request.hands_off = True
        if fits:
            core_of().check_request(request)
        else:
            with pytest.raises(ContextLengthError, match="513 tokens; the KV cache holds 512"):
                core_of().check_request(request)


def test_as_many_requests_wait_as_the_limit_says_and_the_next_is_refused() -> None:
    core = core_of()
    for name in "ab":
        core.add_request(Request(name, 10, 5), 0)
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        core.check_request(Request("c", 10, 5))
    step(core, 0)
    core.check_request(Request("c", 10, 5))
    with pytest.raises(ConfigError, match="'a' is in use"):
        core.add_request(Request("a", 10, 5), 20)


def test_a_request_that_must_see_its_prompt_takes_nothing_from_the_cache() -> None:
    hashes = hash_blocks(list(range(40)), 16)
    for sampling, cached in ((SamplingParams(), 32), (SamplingParams(prompt_logprobs=0), 0)):
        core = core_of()
        core.add_request(Request("before", 40, 1, block_hashes=hashes), 0)
        step(core, 0)
        request = Request.for_sampling("a", 40, sampling, block_hashes=hashes)
        core.add_request(request, 20)
        output = core.begin_step(20)
        assert output is not None and output.prefills[0].start == cached
        assert request.num_cached_tokens == cached


def test_an_attempt_that_goes_on_counts_what_was_sampled_as_its_prompt() -> None:
    options = RequestOptions(priority=3, slo=Slo(1, 2))
    request = Request.for_sampling("a", 40, SamplingParams(max_tokens=30), num_output_tokens=12, options=options)
    assert (request.num_prompt_tokens, request.max_tokens, request.num_tokens) == (52, 18, 52)
    assert (request.priority, request.slo) == (3, Slo(1, 2))


def test_the_end_of_a_request_says_where_its_time_went_and_whether_that_was_soon_enough() -> None:
    for tpot_ns, met in ((50, True), (49, False)):
        core = core_of(slo=Slo(ttft_ns=110))
        core.add_request(Request("a", 70, 3, options=RequestOptions(slo=Slo(tpot_ns=tpot_ns))), 0)
        assert not [event for event in step(core, 30, 20) if isinstance(event, FirstToken)]  # 64 tokens of 70
        assert FirstToken(110, "a") in step(core, 60, 50)
        step(core, 120, 20)
        event = finished(step(core, 150, 60))
        assert event == RequestFinished(
            210, "a", FinishReason.LENGTH, 70, 0, 0, LatencyBreakdown(30, 80, 100, 3), met, None
        )


def test_a_request_that_stops_fails_or_is_aborted_ends_once_with_the_reason() -> None:
    core = core_of()
    for name in "ab":
        core.add_request(Request(name, 10, 5), 0)
    step(core, 0)
    core.add_request(Request("c", 10, 5), 10)
    events = step(core, 20, stopped=(("a", FinishReason.STOP), ("gone", FinishReason.STOP)), failed=(("b", "no"),))
    ends = {event.request_id: event for event in events if isinstance(event, RequestFinished)}
    assert {name: event.reason for name, event in ends.items()} == {"a": FinishReason.STOP, "b": FinishReason.ERROR}
    assert ends["b"].message == "no" and ends["a"].latency.num_output_tokens == 2
    assert finished(core.abort("c", 40)).reason is FinishReason.ABORT
    assert core.abort("c", 50) == []
    output = core.begin_step(60)
    assert output is not None and sorted(output.finished) == ["a", "b", "c"] and not output.is_compute
    assert core.end_step(StepResult(output.step_id), 61) == []
    assert not core.has_work and core.kv.pool.num_used == 0


def test_a_failure_by_the_own_grammar_is_told_from_others() -> None:
    core = core_of()
    for name in "ab":
        core.add_request(Request(name, 10, 5), 0)
    events = step(core, 0, failed=(("a", "no"), ("b", "no")), beyond_grammar=frozenset("a"))
    errors = {
        event.request_id: event.error.exception()
        for event in events
        if isinstance(event, RequestFinished) and event.error
    }
    assert {name: error.status for name, error in errors.items()} == {"a": 400, "b": 500}


def test_a_step_is_measured_from_its_begin_to_its_end() -> None:
    core = core_of()
    core.add_request(Request("a", 100, 4), 0)
    for begin_ns, end_ns, prefills in ((5, 50, (("a", 0, 64),)), (60, 80, (("a", 64, 36),))):
        output = core.begin_step(begin_ns)
        assert output is not None
        (event,) = [event for event in core.end_step(StepResult(output.step_id), end_ns) if type(event) is StepFinished]
        assert (event.start_ns, event.end_ns, event.prefills) == (begin_ns, end_ns, prefills)


def test_the_model_learns_from_steps_what_they_computed_and_how_long_that_took() -> None:
    core, taught = core_of(), StepTimeModel()
    core.add_request(Request("a", 80, 4), 0)
    for now, took_ns in ((0, 40), (50, 30), (100, 7)):
        step(core, now, took_ns)
    for features, took_ns in (
        (StepFeatures(64, chunk_attention(0, 64)), 40),
        (StepFeatures(16, chunk_attention(64, 16)), 30),
        (StepFeatures(0, 0, 1, 81), 7),
    ):
        assert core.model.coefficients != taught.coefficients
        taught.observe(features, took_ns)
    assert core.model.num_observed == taught.num_observed
    assert core.model.coefficients == taught.coefficients


def test_changes_of_the_cache_are_numbered_from_one_and_a_snapshot_says_which_it_covers() -> None:
    hashes = hash_blocks(list(range(40)), 16)
    core = core_of(num_blocks=5)
    assert core.kv_snapshot(0) == [KVSnapshot(0, 0, ())]
    core.add_request(Request("a", 40, 2, block_hashes=hashes), 0)
    assert [event for event in step(core, 0) if isinstance(event, KVEvents)] == [KVEvents(10, 1, hashes, ())]
    step(core, 20)
    others = hash_blocks(list(range(100, 140)), 16)
    core.add_request(Request("b", 40, 2, block_hashes=others), 40)
    assert core.begin_step(40) is not None  # takes the three blocks that are free, or two and a cached one
    *changes, snapshot = core.kv_snapshot(45)
    assert isinstance(snapshot, KVSnapshot) and snapshot.sequence == 1 + len(changes)
    assert set(snapshot.hashes) <= set(hashes)


@pytest.mark.parametrize("gone", ["a", "b", "c"])
def test_an_abort_while_a_step_runs_changes_nothing_for_the_others_in_it(gone: str) -> None:
    settings = SchedulerConfig("fcfs", BudgetConfig("fixed", 64), max_num_seqs=9)
    core = core_of(scheduler=settings)
    for name in "abc":
        core.add_request(Request(name, 10, 3), 0)
    assert core.begin_step(0) is not None
    core.abort(gone, 5)
    others = [name for name in "abc" if name != gone]
    events = core.end_step(StepResult(0), 10)
    assert [event.request_id for event in events if isinstance(event, FirstToken)] == others
    step(core, 20)
    ended = [event.request_id for event in step(core, 30) if isinstance(event, RequestFinished)]
    assert ended == others
    assert not core.requests and core.kv.pool.num_used == 0


@pytest.mark.parametrize("standing", [WaitClass.NEW, WaitClass.STREAM])
@pytest.mark.parametrize("reason", list(FinishReason))
def test_whole_answers_that_ended_by_themselves_teach_how_long_others_will_be(
    reason: FinishReason, standing: WaitClass
) -> None:
    core = core_of(num_blocks=42)
    for number in range(20):  # 20 answers of two tokens
        request = Request(str(number), 10, 2 if reason is FinishReason.LENGTH else 100)
        request.wait_class_at_arrival = standing  # a stream has given a part of its answer elsewhere
        core.add_request(request, 0)
        step(core, 0)
        if reason is FinishReason.LENGTH:
            step(core, 0)
        elif reason is FinishReason.ABORT:
            step(core, 0)
            core.abort(str(number), 0)
        elif reason is FinishReason.STOP:
            step(core, 0, stopped=((str(number), reason),))
        else:
            step(core, 0, failed=((str(number), "no"),))
    core.add_request(Request("a", 250, 250), 0)  # both would fill 64 blocks with all their tokens
    core.add_request(Request("b", 250, 250), 0)
    for _ in range(9):
        step(core, 0)
    at_once = core.stats().num_decoding + core.stats().num_prefilling
    assert at_once == (2 if (reason, standing) == (FinishReason.STOP, WaitClass.NEW) else 1)
