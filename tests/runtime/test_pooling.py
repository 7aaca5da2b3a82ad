"""Embeddings are transformers' hidden states at length 1, however prompts are cut, batched, cached and restarted."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
import transformers

from diptych.control.events import RequestAdmitted
from diptych.control.request import FinishReason, Pooling, SamplingParams
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepTokens
from diptych.runtime.local_engine import engine_config
from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig, load_runner
from diptych.runtime.step.pooling import NOT_A_NUMBER
from diptych.serving.link.engine_options import BUNDLED_MODEL
from tests.runtime.checkpoints import prompt_of, reference, runner
from tests.runtime.driving import greedy
from tests.runtime.gathering_engine import GatheringEngine
from tests.runtime.kernel_sets import FASTEST, FLOAT32, NATIVE, pairwise
from tests.runtime.test_model_runner import fixed_budget

Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


def embedding(pooling: Pooling) -> SamplingParams:
    """What an embedding asks for."""
    return SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)


class EmbeddingEngine(GatheringEngine):
    """Keeps the vectors, too."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.vectors: dict[str, Vector] = {}

    def step(self) -> object:  # type: ignore[override]
        outcome = super().step()
        for request_id, vector in outcome.tokens.embeddings.items() if outcome else ():
            self.vectors[request_id] = np.frombuffer(vector, dtype="<f4")
        return outcome


def engine_of(shared: ModelRunner, budget: int) -> EmbeddingEngine:
    return EmbeddingEngine(shared, engine_config(shared, fixed_budget(budget, seqs=min(64, budget))))


def embed(shared: ModelRunner, prompts: Sequence[list[int]], pooling: Pooling, budget: int = 4096) -> list[Vector]:
    """All at once, in chunks that together have as many tokens as the budget."""
    engine = engine_of(shared, budget)
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, embedding(pooling))
    for generated in engine.run().values():
        assert (generated.token_ids, generated.finish_reason) == ([], FinishReason.LENGTH)
    return [engine.vectors[str(number)] for number in range(len(prompts))]


@torch.no_grad()
def expected(model: torch.nn.Module, prompt: list[int], pooling: Pooling) -> Vector:
    """The vector that a model of transformers without its head gives."""
    states = model(torch.tensor([prompt])).last_hidden_state[0].double()
    vector = states[-1] if pooling == "last" else states.mean(0)
    return (vector / vector.norm()).float().numpy()


@cache
def bundled() -> tuple[ModelRunner, torch.nn.Module]:
    """The bundled model, here and in transformers, in single precision."""
    theirs = transformers.AutoModel.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
    return load_runner(RunnerConfig(BUNDLED_MODEL, dtype="float32", num_blocks=64)), theirs


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_bundled_model_gives_the_hidden_states_of_transformers(pooling: Pooling) -> None:
    ours, theirs = bundled()
    prompts = [prompt_of(length, seed=length) for length in (1, 2, 33, 300)]
    for prompt, vector in zip(prompts, embed(ours, prompts, pooling, budget=64), strict=True):
        np.testing.assert_allclose(vector, expected(theirs, prompt, pooling), atol=2e-5)
        assert float(np.linalg.norm(vector)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    ("family", "instruction_set"), pairwise(["llama", "mistral-window", "qwen2", "qwen3"], FLOAT32, FASTEST)
)
def test_every_family_and_every_chunk_size_gives_them(family: str, instruction_set: str, pooling: Pooling) -> None:
    prompt = prompt_of(130)
    theirs = expected(reference(family).model.model, prompt, pooling)
    for budget in (1, 7, 32, 129, 130):
        [ours] = embed(runner(family, instruction_set), [prompt], pooling, budget)
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(("dtype", "instruction_set"), NATIVE)
def test_native_kernels_give_the_same_bits_in_every_batch_and_chunk(
    dtype: str, instruction_set: str, pooling: Pooling
) -> None:
    shared = runner("qwen3", instruction_set, dtype)
    prompts = [prompt_of(length, seed=length) for length in (40, 71, 150)]
    alone = [embed(shared, [prompt], pooling)[0] for prompt in prompts]
    for budget in (16, 50, 400):
        for one, other in zip(alone, embed(shared, prompts, pooling, budget), strict=True):
            np.testing.assert_array_equal(one, other)


def test_embeddings_beside_answers_change_neither() -> None:
    shared = runner("llama")
    prompts = [prompt_of(20 + 9 * number, seed=number) for number in range(6)]
    alone = [embed(shared, [prompt], "mean")[0] for prompt in prompts]
    engine = engine_of(shared, 48)
    for number, prompt in enumerate(prompts):
        engine.add(f"answer{number}", prompt, greedy(12))
        engine.add(f"vector{number}", prompt, embedding("mean"))
        engine.step()
    answers = engine.run()
    for number, prompt in enumerate(prompts):
        reference("llama").check_greedy(prompt, answers[f"answer{number}"].token_ids)
        np.testing.assert_allclose(engine.vectors[f"vector{number}"], alone[number], atol=1e-5)


def test_the_last_token_reads_the_prefix_cache_and_the_mean_computes_every_token() -> None:
    shared = runner("qwen2")
    prompt = prompt_of(100)
    for pooling, num_cached in (("last", 96), ("mean", 0)):
        engine = engine_of(shared, 4096)
        for name in ("first", "second"):
            engine.add(name, prompt, embedding(pooling))
            engine.run()
        admitted = [event.num_cached_tokens for event in engine.events if isinstance(event, RequestAdmitted)]
        assert admitted == [0, num_cached]
        np.testing.assert_allclose(engine.vectors["first"], engine.vectors["second"], atol=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_that_begins_again_counts_each_token_once(pooling: Pooling) -> None:
    shared, prompt = runner("llama"), prompt_of(64)
    blocks = tuple(range(shared.first_block, shared.first_block + 2))
    shared.add_request("r", prompt, embedding(pooling))
    payload = StepTokens([], [])
    for start, count in ((0, 20), (20, 20), (0, 32), (32, 31), (63, 1)):
        chunk = ScheduledPrefill("r", start, count, (blocks,), start + count == 64)
        payload = shared.execute(SchedulerOutput(0, prefills=(chunk,))).payload
        assert payload.token_ids == []
    shared.execute(SchedulerOutput(0, finished=("r",)))
    vector = np.frombuffer(payload.embeddings["r"], dtype="<f4")
    np.testing.assert_allclose(vector, expected(reference("llama").model.model, prompt, pooling), atol=1e-4)


def test_a_state_that_is_not_a_number_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = runner("llama")
    forward = shared.forward

    def broken(batch: object) -> torch.Tensor:
        hidden = forward(batch)  # type: ignore[arg-type]
        hidden[0] = float("nan")
        return hidden

    for other in ("vector", "answer"):
        engine = engine_of(shared, 4096)
        engine.add("broken", prompt_of(5), embedding("last"))
        engine.add(other, prompt_of(6), embedding("last") if other == "vector" else greedy(1))
        with monkeypatch.context() as patch:
            patch.setattr(shared, "forward", broken)
            engine.step()
        done = engine.run()
        assert (done["broken"].finish_reason, done[other].finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)
        assert "not a number" in done["broken"].message and "not a number" in NOT_A_NUMBER
        assert "broken" not in engine.vectors and (other in engine.vectors) == (other == "vector")
