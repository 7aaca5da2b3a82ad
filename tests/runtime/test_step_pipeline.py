"""Steps that are launched before the result of the one before is known give the same tokens, bit for bit.

A CPU stands for the device: its results come through page-locked memory, and nobody reads them before their event.
"""

import random

import pytest
import torch

from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.recording import RecordingEngineCore
from diptych.control.errors import BrokenInvariantError
from diptych.control.events import RequestFinished
from diptych.control.request import FinishReason, Request, SamplingParams
from diptych.control.step import SchedulerOutput, StepResult
from diptych.runtime.local_engine import engine_config
from diptych.runtime.step.draft_tokens import DraftTokens
from diptych.runtime.step.model_runner import ModelRunner, StepInFlight
from diptych.runtime.step.step_pipeline import StepPipeline
from tests.runtime.checkpoints import prompt_of, runner
from tests.runtime.driving import greedy
from tests.runtime.test_batched_step import batched
from tests.runtime.test_speculation import DTYPE_AND_SET, FAMILY, Eager, Guesses, check_same, extras, run


class CountingPipeline(StepPipeline):
    """num_ahead: steps that were launched while the tokens of the one before were still on their way."""

    def __init__(self, own: ModelRunner) -> None:
        super().__init__(own)
        self.num_ahead = 0
        launch = own.launch

        def counted(output: SchedulerOutput, behind: StepInFlight | None = None) -> StepInFlight:
            if behind is not None:
                assert behind.pending is not None
                assert behind.pending.tokens._packed._copied is not None, "its tokens were waited for"
                self.num_ahead += 1
            return launch(output, behind)

        own.launch = counted  # type: ignore[method-assign]


def deep(shared: ModelRunner, drafted: DraftTokens | None = None, **changes: object) -> tuple[Eager, CountingPipeline]:
    """An engine of depth 2."""
    engine = batched(shared, drafted or DraftTokens(drafts=False), **changes)
    pipeline = engine._pipeline = CountingPipeline(engine.runner)
    return engine, pipeline


@pytest.fixture
def shared() -> ModelRunner:
    return runner(FAMILY, DTYPE_AND_SET[1], DTYPE_AND_SET[0])


def test_requests_of_every_kind_get_the_same_tokens(shared: ModelRunner) -> None:
    """Those with penalties, constraints and drafts hold the pipeline at depth 1 as long as they are there."""
    plain = run(Eager(shared, DraftTokens(drafts=False)), max_tokens=50, constrained=True)
    answers = {request_id: generation.token_ids for request_id, generation in plain.items()}
    undrafted, _ = deep(shared)
    check_same(plain, run(undrafted, max_tokens=50, constrained=True))
    engine, _ = deep(shared, Guesses(answers, 3))
    check_same(plain, run(engine, max_tokens=50, constrained=True))
    assert extras(engine)[1] > 100


SAMPLINGS = (
    greedy(60),
    greedy(60, logprobs=2),
    SamplingParams(max_tokens=55, temperature=1.2, seed=5),
    SamplingParams(max_tokens=61, temperature=0.9, top_p=0.8, seed=6, logprobs=0, min_tokens=20, stop_token_ids=(3, 9)),
    SamplingParams(max_tokens=70, seed=8, stop_token_ids=tuple(range(0, 384, 9))),
    SamplingParams(max_tokens=70, seed=9, logit_bias={4: 3.0}, stop_token_ids=tuple(range(0, 384, 30))),
)


def add_all(engine: Eager, count: int = 12) -> None:
    for number in range(count):
        engine.add(f"r{number}", prompt_of(5 + 13 * number, seed=number), SAMPLINGS[number % len(SAMPLINGS)])
        if number % 3 == 0:
            engine.step()


def test_steady_decodes_run_ahead_and_a_late_stop_costs_a_row_and_no_token(shared: ModelRunner) -> None:
    plain_engine = Eager(shared, DraftTokens(drafts=False))
    add_all(plain_engine)
    plain = plain_engine.run()
    engine, pipeline = deep(shared)
    add_all(engine)
    check_same(plain, engine.run())
    assert pipeline.num_ahead > 30
    assert {generation.finish_reason for generation in plain.values()} == {FinishReason.LENGTH, FinishReason.STOP}
    ends = [[event for event in one.events if isinstance(event, RequestFinished)] for one in (plain_engine, engine)]
    counts = [{event.request_id: event.latency.num_output_tokens for event in found} for found in ends]
    assert counts[0] == counts[1]
    engine.core.kv.pool.check()
    assert engine.runner.num_requests == 0 and engine.core.kv.pool.num_used == 0


def test_drafts_are_verified_behind_an_empty_pipeline(shared: ModelRunner) -> None:
    plain_engine = Eager(shared, DraftTokens(drafts=False))
    add_all(plain_engine, 2)
    plain = plain_engine.run()
    answers = {request_id: generation.token_ids for request_id, generation in plain.items()}
    engine, pipeline = deep(shared, Guesses(answers, 4, rate=0.5))
    add_all(engine, 2)
    check_same(plain, engine.run())
    assert extras(engine)[1] > 0 and pipeline.num_ahead > 0


def test_aborts_while_a_step_is_ahead_disturb_nobody(shared: ModelRunner) -> None:
    plain_engine = Eager(shared, DraftTokens(drafts=False))
    add_all(plain_engine)
    plain = plain_engine.run()
    engine, pipeline = deep(shared)
    add_all(engine)
    rng = random.Random(1)
    leaving = [f"r{number}" for number in (0, 3, 7)]
    results = {}
    while engine.core.requests or pipeline.under_way is not None:
        if leaving and pipeline.under_way is not None and rng.random() < 0.3:
            engine.abort(leaving.pop())
        engine.step()
    results = engine.run()
    for request_id, generation in plain.items():
        if results[request_id].finish_reason is FinishReason.ABORT:
            got = results[request_id].token_ids
            assert got == generation.token_ids[: len(got)]
        else:
            check_same({request_id: generation}, {request_id: results[request_id]})
    assert engine.runner.num_requests == 0 and engine.core.kv.pool.num_used == 0


def test_a_step_ahead_that_runs_out_of_memory_loses_no_token_of_the_one_before(shared: ModelRunner) -> None:
    plain_engine = Eager(shared, DraftTokens(drafts=False))
    for engine in (plain_engine,):
        for number in range(3):
            engine.add(f"r{number}", prompt_of(9 + number, seed=number), greedy(30))
    plain = plain_engine.run()
    engine, pipeline = deep(shared)
    for number in range(3):
        engine.add(f"r{number}", prompt_of(9 + number, seed=number), greedy(30))
    forward = engine.runner.forward

    def scarce(batch: object) -> torch.Tensor:
        if pipeline.num_ahead == 5:
            raise torch.OutOfMemoryError("no memory")
        return forward(batch)  # type: ignore[arg-type]

    engine.runner.forward = scarce  # type: ignore[method-assign, assignment]
    results = engine.run()
    for request_id, generation in results.items():
        assert generation.finish_reason is FinishReason.ERROR
        assert 5 <= len(generation.token_ids) < 30
        assert generation.token_ids == plain[request_id].token_ids[: len(generation.token_ids)]
    assert engine.core.kv.pool.num_used == 0 and engine.runner.num_requests == 0


@pytest.mark.parametrize("place", ["launch", "forward", "collect"])
def test_an_interrupt_while_two_steps_are_under_way_leaves_an_engine_that_serves_the_next_requests(
    shared: ModelRunner, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_engine = Eager(shared, DraftTokens(drafts=False))
    add_all(plain_engine)
    plain = plain_engine.run()
    engine, pipeline = deep(shared)
    method = getattr(engine.runner, place)

    def interrupted(*args: object, **changes: object) -> object:
        if pipeline.num_ahead == 5 and engine.core._plan_ahead is not None:
            raise KeyboardInterrupt
        return method(*args, **changes)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, place, interrupted)
        add_all(engine)
        with pytest.raises(KeyboardInterrupt):
            engine.run()
    for request_id in list(engine.core.requests):
        engine.abort(request_id)
    engine.run()
    assert engine.core.kv.pool.num_used == 0 and engine.runner.num_requests == 0
    add_all(engine)
    check_same(plain, engine.run())
    assert pipeline.num_ahead > 30


def test_what_is_recorded_at_depth_2_decides_the_same(shared: ModelRunner) -> None:
    engine, pipeline = deep(shared)
    rows: list[tuple[object, ...]] = []
    engine.core = RecordingEngineCore(engine.core.config, rows.append)
    add_all(engine, 8)
    engine.run()
    assert pipeline.num_ahead > 20
    again, plans, under_way, most = EngineCore(engine.core.config), [], 0, 0
    for kind, *fields in rows:
        if kind == "add":
            request_id, num_prompt, max_tokens, hashes = fields[1][:4]
            again.add_request(Request(request_id, num_prompt, max_tokens, block_hashes=list(hashes)), fields[0])
        elif kind == "begin":
            plans.append((again.begin_step(fields[0]), fields[1]))
            under_way += fields[1] is not None
            most = max(most, under_way)
        elif kind == "end":
            now, step_id, stopped, full_blocks, *_ = fields
            again.end_step(StepResult(step_id, stopped, full_blocks), now)
            under_way -= 1
    assert all(ours == theirs for ours, theirs in plans)
    assert most == 2


def test_a_core_plans_ahead_only_what_follows_whatever_comes(shared: ModelRunner) -> None:
    core = EngineCore(engine_config(shared))
    hashes = [bytes([number]) * 32 for number in range(9)]
    core.add_request(Request("a", 40, 6, block_hashes=hashes[:1]), 0)
    first = core.begin_step(0)
    assert first is not None and first.prefills and core.begin_step(0) is None  # it joins behind it
    core.end_step(StepResult(first.step_id), 1)
    second = core.begin_step(1)
    third = core.begin_step(1)
    assert second is not None and third is not None and (third.num_decodes, third.step_id) == (1, second.step_id + 1)
    with pytest.raises(BrokenInvariantError, match="two steps"):
        core.begin_step(1)
    core.end_step(StepResult(second.step_id), 2)
    core.add_request(Request("b", 40, 6, block_hashes=hashes[1:2]), 2)
    assert core.begin_step(2) is None  # a prompt waits: the plan that admits it comes behind an empty pipeline
    core.end_step(StepResult(third.step_id, stopped=(("a", FinishReason.STOP),)), 3)
    fourth = core.begin_step(3)
    assert fourth is not None and fourth.finished == ("a",) and fourth.prefills
