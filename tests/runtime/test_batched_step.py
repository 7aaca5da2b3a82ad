"""Steps that are sampled as a whole, on the device, give the tokens that sampling row by row on the host gives: with
drafts right and wrong, constraints, penalties, log probabilities and failures, and with arrays that travel."""

from collections.abc import Callable

import pytest
import torch

from diptych.control.config import BudgetConfig, CacheConfig, PreemptionConfig, PreemptionName, SchedulerConfig
from diptych.control.request import FinishReason, SamplingParams
from diptych.runtime.device.host_copies import ToDevice
from diptych.runtime.sampling.batch_sampler import BatchSampler
from diptych.runtime.step.draft_tokens import DraftTokens
from diptych.runtime.step.model_runner import ModelRunner
from tests.runtime.checkpoints import prompt_of, runner
from tests.runtime.driving import greedy
from tests.runtime.fake_device import FakeMemory
from tests.runtime.test_speculation import (
    DTYPE_AND_SET,
    FAMILY,
    Eager,
    Guesses,
    Rhyme,
    check_same,
    extras,
    run,
)

CPU = torch.device("cpu")


@pytest.fixture
def shared() -> ModelRunner:
    return runner(FAMILY, DTYPE_AND_SET[1], DTYPE_AND_SET[0])


def batched(shared: ModelRunner, drafted: DraftTokens, **changes: object) -> Eager:
    """An engine whose runner takes the paths of a GPU: index arrays in one copy, sampling on the device."""
    memory = FakeMemory()
    engine = Eager(shared, drafted, BatchSampler(CPU, memory), **changes)
    engine.runner._to_device = ToDevice(memory)
    return engine


@pytest.mark.parametrize("constrained", [False, True])
def test_requests_of_every_kind_get_the_same_tokens(shared: ModelRunner, constrained: bool) -> None:
    plain = run(Eager(shared, DraftTokens(drafts=False)), max_tokens=50, constrained=constrained)
    answers = {request_id: generation.token_ids for request_id, generation in plain.items()}
    undrafted = batched(shared, DraftTokens(drafts=False))
    check_same(plain, run(undrafted, max_tokens=50, constrained=constrained))
    engine = batched(shared, Guesses(answers, 3))
    check_same(plain, run(engine, max_tokens=50, constrained=constrained))
    assert extras(engine)[1] > 100
    assert {generation.finish_reason for generation in plain.values()} == {FinishReason.LENGTH, FinishReason.STOP}


@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_streams_that_lose_their_blocks_go_on_with_the_same_tokens(shared: ModelRunner, kind: PreemptionName) -> None:
    plain = run(Eager(shared, DraftTokens(drafts=False)), max_tokens=40)
    cache = CacheConfig(14, 32, num_host_blocks=64 * (kind == "swap"), watermark_blocks=0, admission="greedy")
    scheduler = SchedulerConfig(
        order="fcfs",
        budget=BudgetConfig("fixed", 40, min_chunk_tokens=1),
        preemption=PreemptionConfig(kind),
        max_num_seqs=20,
    )
    engine = batched(shared, DraftTokens(drafts=False), scheduler=scheduler, cache=cache)
    check_same(plain, run(engine, max_tokens=40))


def test_log_probabilities_of_prompts_are_the_same_bits(shared: ModelRunner) -> None:
    results = []
    for make in (Eager, batched):
        engine = make(shared, DraftTokens(drafts=False))
        engine.add("r", prompt_of(150), greedy(5, prompt_logprobs=3, logprobs=2))
        results.append(engine.run()["r"])
    assert results[0].prompt_logprobs == results[1].prompt_logprobs and len(results[0].prompt_logprobs) == 150
    assert results[0].logprobs == results[1].logprobs


@pytest.mark.parametrize("make", [Eager, batched])
def test_a_constraint_that_cannot_go_on_fails_its_request_alone(
    shared: ModelRunner, make: Callable[..., Eager]
) -> None:
    class Broken(Rhyme):
        def allowed(self) -> bytes | None:
            if len(self.tokens) == 8:
                raise ValueError("the grammar is lost")
            return super().allowed()

    engine = make(shared, DraftTokens(drafts=True))
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    engine.add("whole", prompt_of(9), sampling)
    engine.add_constrained("broken", prompt_of(12), sampling)
    engine.runner.forget("broken")
    engine.runner.add_request("broken", prompt_of(12), sampling, constraint=Broken())
    done = engine.run()
    assert (done["broken"].finish_reason, done["broken"].message) == (FinishReason.ERROR, "the grammar is lost")
    assert len(done["whole"].token_ids) == 30


@pytest.mark.parametrize("make", [Eager, batched])
def test_a_row_that_is_not_a_number_fails_its_request_alone(
    shared: ModelRunner, make: Callable[..., Eager], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(shared, DraftTokens(drafts=False))
    samplings = [greedy(20), SamplingParams(max_tokens=20, seed=1), SamplingParams(max_tokens=20, seed=2, top_p=0.5)]
    for number, sampling in enumerate(samplings * 2):
        engine.add(f"r{number}", prompt_of(5 + number, seed=number), sampling)
    for _ in range(4):
        engine.step()
    broken: list[str] = []
    compute = shared.model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        found = compute(hidden).clone()
        batch = engine.runner._batch
        if len(batch) == len(found) == 6 and not broken:
            for slot in (1, 3, 4):
                found[slot, 7] = torch.nan
                broken.append(batch.request_ids[slot])
        return found

    monkeypatch.setattr(type(shared.model), "logits", lambda _, hidden: logits(hidden))
    done = engine.run()
    assert len(broken) == 3
    for request_id, generation in done.items():
        if request_id in broken:
            assert (generation.finish_reason, generation.message) == (
                FinishReason.ERROR,
                "the model computed a logit that is not a number",
            )
        else:
            assert len(generation.token_ids) == 20


def test_a_greedy_decode_step_copies_once_to_the_device_and_once_back(shared: ModelRunner) -> None:
    engine = batched(shared, DraftTokens(drafts=False))
    for number in range(9):
        engine.add(f"r{number}", prompt_of(30 + number, seed=number), greedy(20))
    for _ in range(8):
        engine.step()
    memory = engine.runner._to_device._memory
    assert isinstance(memory, FakeMemory) and len(engine.core.scheduler.batch) == 9
    before = len(memory.events)
    engine.step()
    assert len(memory.events) == before + 2


def test_sampling_a_decode_step_brings_no_row_of_logits_to_the_host(
    shared: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.runtime.sampling.step_sampling.row_as_float32", None)
    engine = batched(shared, DraftTokens(drafts=False))
    for number in range(9):
        engine.add(f"r{number}", prompt_of(30 + number, seed=number), SamplingParams(max_tokens=20, seed=1, top_p=0.9))
    for _ in range(8):
        engine.step()
    memory = engine.runner._to_device._memory
    assert isinstance(memory, FakeMemory)
    before = len(memory.events)
    engine.step()
    assert len(memory.events) == before + 3  # index arrays, how to sample, tokens
    assert all(len(generation.token_ids) == 20 for generation in engine.run().values())
