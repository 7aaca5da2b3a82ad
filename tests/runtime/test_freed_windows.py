"""A cache that frees what lies before windows gives the bits of one that keeps everything. All memory that was never
written is not a number, so that a block that is read and should not be shows."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from diptych.control.config import BudgetConfig, PreemptionConfig, SchedulerConfig
from diptych.control.events import RequestAdmitted, RequestPreempted
from diptych.control.step import TokenLogprobs
from diptych.runtime.attention import make_attention
from diptych.runtime.kernels.instruction_set import AUTO
from diptych.runtime.kv_cache.kv_tensors import KVTensors
from diptych.runtime.kv_cache.layer_groups import deal
from diptych.runtime.local_engine import engine_config
from diptych.runtime.models.model_config import AttentionConfig, LayerAttention
from diptych.runtime.step.draft_tokens import DraftTokens
from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig, load_runner
from diptych.runtime.step.warm_up import warm_up
from tests.runtime.checkpoints import MAX_POSITIONS, prompt_of, reference, runner
from tests.runtime.driving import greedy
from tests.runtime.gathering_engine import GatheringEngine
from tests.runtime.kernel_sets import FLOAT32, NATIVE, every_pair
from tests.runtime.test_speculation import Eager

FAMILIES = [
    *("gemma3", "mistral-window", "gemma2", "olmo3", "qwen2-window", "smollm3", "muse-glimmer", "gpt-oss"),
    *("lfm2", "lfm2-biased"),
]
BLOCK_SIZE = 32


@lru_cache(16)
def freeing(family: str, instruction_set: str = AUTO, dtype: str = "float32", kv_dtype: str = "auto") -> ModelRunner:
    """A runner of a shared checkpoint whose cache was not a number before anything was written."""
    found = load_runner(
        RunnerConfig(
            model=reference(family, dtype).directory,
            instruction_set=instruction_set,
            num_blocks=400,
            num_host_blocks=64,
            max_num_seqs=64,
            block_size=BLOCK_SIZE,
            kv_dtype=kv_dtype,
            frees_windows=True,
        )
    )
    spoil(found)
    assert found.groups and any(group.window_tokens for group in found.groups)
    return found


def spoil(found: ModelRunner) -> None:
    """Let nothing in a cache be a number: of whole numbers, no scale."""
    for region in found.kv.regions:
        for cache in region:
            cache.fill_(-1 if cache.dtype is torch.int8 else float("nan"))


def chunked(tokens: int, preemption: str = "recompute") -> SchedulerConfig:
    """Prompts in chunks of at most ``tokens`` tokens."""
    budget = BudgetConfig(kind="fixed", max_batched_tokens=tokens, min_chunk_tokens=1)
    return SchedulerConfig(
        order="fcfs", budget=budget, preemption=PreemptionConfig(kind=preemption), max_num_seqs=min(64, tokens)
    )


def logprobs_of(
    found: ModelRunner, prompts: dict[str, list[int]], scheduler: SchedulerConfig, max_tokens: int = 40
) -> dict[str, list[TokenLogprobs]]:
    """Log probabilities of answers, four alternatives each."""
    engine = GatheringEngine(found, engine_config(found, scheduler, enable_prefix_cache=False))
    for index, (name, prompt) in enumerate(prompts.items()):
        engine.add(name, prompt, greedy(max_tokens + index, logprobs=4))
        if index % 3 == 0:
            engine.step()
    return {name: generation.logprobs for name, generation in engine.run().items()}


PROMPTS = {f"r{length}": prompt_of(length, seed=length) for length in (5, 31, 90, 150, 300, 601)}


@pytest.mark.parametrize(("family", "dtype", "instruction_set"), every_pair(FAMILIES, NATIVE))
def test_log_probabilities_are_those_of_a_cache_that_keeps_everything(
    family: str, dtype: str, instruction_set: str
) -> None:
    expected = logprobs_of(runner(family, instruction_set, dtype), PROMPTS, chunked(2000))
    found = freeing(family, instruction_set, dtype)
    for tokens in (2000, 70, 33):
        spoil(found)
        assert logprobs_of(found, PROMPTS, chunked(tokens)) == expected
    assert found.num_requests == 0


@pytest.mark.parametrize("family", ["gemma3", "mistral-window", "lfm2", "lfm2-biased"])
@pytest.mark.parametrize(("dtype", "instruction_set"), NATIVE)
def test_steps_in_parts_give_the_bits_of_steps_in_one_call(
    family: str, dtype: str, instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = freeing(family, instruction_set, dtype)
    assert found.model.layers.native_step is not None
    whole = logprobs_of(found, PROMPTS, chunked(100))
    monkeypatch.setattr(found.model.layers, "native_step", None)
    spoil(found)
    assert logprobs_of(found, PROMPTS, chunked(100)) == whole


@pytest.mark.parametrize(("family", "instruction_set"), every_pair(FAMILIES, FLOAT32))
def test_tokens_are_those_of_transformers(family: str, instruction_set: str) -> None:
    found = freeing(family, instruction_set)
    engine = GatheringEngine(found, engine_config(found, chunked(64)))
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, greedy(48))
    for name, generation in engine.run().items():
        reference(family).check_greedy(PROMPTS[name], generation.token_ids)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("family", ["gemma3", "mistral-window", "lfm2-biased"])
@pytest.mark.parametrize(("dtype", "instruction_set"), NATIVE[:1])
def test_preempted_requests_continue_with_the_same_bits(
    family: str, dtype: str, instruction_set: str, preemption: str
) -> None:
    found = freeing(family, instruction_set, dtype)
    prompts = {f"r{number}": prompt_of(40 + 13 * number, seed=number) for number in range(8)}
    config = engine_config(found, chunked(64, preemption))
    blocks = 8 * len(found.groups) + 4
    engine = GatheringEngine(
        found, config.with_(cache=replace(config.cache, num_blocks=blocks, watermark_blocks=0, admission="greedy"))
    )
    for name, prompt in prompts.items():
        engine.add(name, prompt, greedy(80, logprobs=4))
    results = engine.run()
    preempted = [event for event in engine.events if isinstance(event, RequestPreempted)]
    assert preempted and any(event.swapped for event in preempted) == (preemption == "swap")
    expected = logprobs_of(runner(family, instruction_set, dtype), prompts, chunked(2000), 80)
    for name in prompts:
        assert results[name].logprobs == expected[name][:80]


@pytest.mark.parametrize(("family", "dtype", "instruction_set"), every_pair(FAMILIES, NATIVE))
def test_a_prefix_that_is_found_gives_the_bits_of_one_that_is_computed(
    family: str, dtype: str, instruction_set: str
) -> None:
    found = freeing(family, instruction_set, dtype)
    spoil(found)
    engine = GatheringEngine(found, engine_config(found, chunked(70)))
    first = prompt_of(301)
    engine.add("first", first, greedy(40, logprobs=4))
    answer = engine.run()["first"]
    prompts = {"again": first, "next turn": [*first, *answer.token_ids, *prompt_of(20)]}
    results = {}
    for name, prompt in prompts.items():
        engine.add(name, prompt, greedy(40, logprobs=4))
        results |= engine.run()
    cached = {e.request_id: e.num_cached_tokens for e in engine.events if isinstance(e, RequestAdmitted)}
    assert cached == {"first": 0, "again": 288, "next turn": 320}
    assert results["again"].logprobs == answer.logprobs
    expected = logprobs_of(runner(family, instruction_set, dtype), {"r": prompts["next turn"]}, chunked(2000))
    assert results["next turn"].logprobs == expected["r"]


@pytest.mark.parametrize(
    ("family", "threads", "in_parts"),
    [("gemma3", 1, False), ("lfm2", 4, False), ("lfm2-biased", 4, False), ("lfm2-biased", 1, True)],
)
@pytest.mark.parametrize(("dtype", "instruction_set"), NATIVE[:1])
def test_guessed_tokens_change_nothing(
    family: str, threads: int, in_parts: bool, dtype: str, instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks expire by what is accepted: a wrong guess never needs one that is gone. Rows of one sequence see each
    other, whatever computes them and in which order."""
    found = freeing(family, instruction_set, dtype)
    torch.set_num_threads(threads)
    if in_parts:
        monkeypatch.setattr(found.model.layers, "native_step", None)
    prompts = {f"r{number}": prompt_of(9, seed=number) * 12 for number in range(4)}
    engine = Eager(found, DraftTokens(drafts=True), scheduler=chunked(64), enable_prefix_cache=False)
    for name, prompt in prompts.items():
        engine.add(name, prompt, greedy(120, logprobs=4))
    results = {name: generation.logprobs for name, generation in engine.run().items()}
    expected = logprobs_of(runner(family, instruction_set, dtype), prompts, chunked(2000), 130)
    assert results == {name: logprobs[:120] for name, logprobs in expected.items()}
    assert engine.core.stats().num_draft_tokens > 0


def test_a_long_sequence_takes_the_blocks_of_its_windows_and_no_more() -> None:
    found = freeing("mistral-window")
    config = engine_config(found, chunked(64))
    (group,) = found.groups
    peak = group.peak_pages(MAX_POSITIONS, config.cache.window_chunk)
    small = GatheringEngine(found, config.with_(cache=replace(config.cache, num_blocks=peak, watermark_blocks=0)))
    small.add("r", prompt_of(3000), greedy(20))
    held = []
    while small.step() is not None:
        held.append(small.core.kv.pool.num_used)
    assert max(held) <= peak < 3000 // BLOCK_SIZE
    assert min(filter(None, held)) <= group.peak_pages(MAX_POSITIONS, 1)


def test_a_warm_up_measures_it_as_any_other() -> None:
    assert len(warm_up(freeing("gemma3"))) > 4


def test_layers_of_several_groups_share_regions_and_not_blocks() -> None:
    layers = (LayerAttention(0.25, 64), LayerAttention(0.25), LayerAttention(0.25, 64), LayerAttention(0.25))
    config = AttentionConfig(4, 2, 16, layers)
    dealt = deal(layers, BLOCK_SIZE, 4096)
    backend = make_attention(config, BLOCK_SIZE, torch.bfloat16, torch.device("cpu"), layers=dealt)
    kv = KVTensors(backend, num_blocks=6, num_host_blocks=2)
    assert kv.groups == (1, 0, 1, 0) and len(kv.regions) == 2
    assert kv.layers[0] is kv.layers[1] is kv.regions[0] and kv.layers[2] is kv.layers[3] is kv.regions[1]
    assert sum(cache.nbytes for region in kv.regions for cache in region) == 6 * backend.geometry.block_bytes
    for region in kv.regions:
        for cache in region:
            cache.normal_()
    before = [[cache.clone() for cache in region] for region in kv.regions]
    kv.copy_to_host([(4, 1)])
    kv.copy_from_host([(1, 2)])
    for region, old in zip(kv.regions, before, strict=True):
        for cache, was in zip(region, old, strict=True):
            assert torch.equal(cache[[0, 1, 2, 3, 4, 5]], was[[0, 1, 4, 3, 4, 5]])
