"""The runner computes the same tokens as Hugging Face transformers, however the scheduler cuts and moves the work."""

import copy
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diptych.control.config import BudgetConfig, PreemptionConfig, SchedulerConfig
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.errors import InvalidRequestError
from diptych.control.events import RequestAdmitted, RequestPreempted
from diptych.control.request import FinishReason, SamplingParams
from diptych.control.step import ScheduledPrefill, SchedulerOutput, TokenLogprobs
from diptych.runtime.kernels.instruction_set import TORCH
from diptych.runtime.local_engine import engine_config
from diptych.runtime.sampling.sampler import RowSampling, sample_row, uniforms
from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig, load_runner
from diptych.runtime.step.warm_up import warm_up
from tests.runtime.checkpoints import FAMILIES, MIXTURES, prompt_of, reference, runner
from tests.runtime.driving import chunks_of, generate, greedy
from tests.runtime.gathering_engine import GatheringEngine
from tests.runtime.kernel_sets import BFLOAT16, FASTEST, FLOAT32, NATIVE, every_pair, pairwise

# families that differ in what a step computes
KINDS = [
    *("qwen3", "gemma2", "gemma3", "ministral3", "smollm3", "phi3", "phi3-longrope", "granite", "olmo2", "olmo3"),
    *("seed-oss", "muse-glimmer", "qwen2-window", *MIXTURES),
]


@pytest.mark.parametrize(("family", "instruction_set"), every_pair(FAMILIES, FLOAT32))
def test_greedy_tokens_are_those_of_transformers(family: str, instruction_set: str) -> None:
    prompt = prompt_of(301)
    for chunk in (301, 37):
        tokens, _ = generate(runner(family, instruction_set), prompt, chunks_of(301, chunk), greedy(), block_seed=chunk)
        reference(family).check_greedy(prompt, tokens)


@pytest.mark.parametrize(
    ("family", "instruction_set"),
    every_pair(["qwen3", "llama-rope-yarn", "mistral-window", "gemma3", "ministral3", "olmo3"], FLOAT32),
)
def test_a_prompt_of_2000_tokens_gives_the_tokens_of_transformers(family: str, instruction_set: str) -> None:
    prompt = prompt_of(2000)
    tokens, _ = generate(runner(family, instruction_set), prompt, chunks_of(2000, 600), greedy())
    reference(family).check_greedy(prompt, tokens)


@pytest.mark.parametrize(
    ("size", "instruction_set"), pairwise([1, 2, 15, 16, 17, 31, 32, 33, 64, 100], FLOAT32, FASTEST, 2)
)
def test_chunk_size_does_not_change_the_tokens(size: int, instruction_set: str) -> None:
    for family, length in (("llama", 131), ("mistral-window", 150)):
        prompt = prompt_of(length)
        tokens, _ = generate(
            runner(family, instruction_set), prompt, chunks_of(length, size), greedy(), block_seed=size
        )
        reference(family).check_greedy(prompt, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", FLOAT32)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_chunk_size_gives_the_same_tokens(family: str, instruction_set: str) -> None:
    prompt = prompt_of(601)
    for size in [*range(1, 70), *range(70, 601, 7), 600]:
        tokens, _ = generate(runner(family, instruction_set), prompt, chunks_of(601, size), greedy(16), block_seed=size)
        reference(family).check_greedy(prompt, tokens)


def fixed_budget(tokens: int, preemption: str = "recompute", seqs: int = 64) -> SchedulerConfig:
    """Chunked prefill with a fixed number of tokens per step."""
    return SchedulerConfig(
        order="fcfs",
        budget=BudgetConfig(kind="fixed", max_batched_tokens=tokens, min_chunk_tokens=1),
        preemption=PreemptionConfig(kind=preemption),
        max_num_seqs=seqs,
    )


@pytest.mark.parametrize(
    ("family", "instruction_set"),
    pairwise([*KINDS, "llama-rope-llama3", "mistral-window", "qwen2"], FLOAT32, FASTEST),
)
def test_a_batch_of_32_in_mixed_phases_gives_each_request_its_own_tokens(family: str, instruction_set: str) -> None:
    shared = runner(family, instruction_set)
    engine = GatheringEngine(shared, engine_config(shared, fixed_budget(96)))
    prompts = {f"r{i}": prompt_of(3 + 11 * i % 200, seed=i) for i in range(32)}
    for index, (request_id, prompt) in enumerate(prompts.items()):
        engine.add(request_id, prompt, greedy(8 + 5 * index % 70))
        if index % 3 == 0:
            engine.step()
    for request_id, generation in engine.run().items():
        assert generation.finish_reason is FinishReason.LENGTH
        reference(family).check_greedy(prompts[request_id], generation.token_ids)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize(("family", "instruction_set"), every_pair(["llama", "qwen2-window"], FLOAT32))
def test_preempted_requests_continue_with_the_same_tokens(family: str, preemption: str, instruction_set: str) -> None:
    shared = runner(family, instruction_set)
    engine = crowded_engine(shared, preemption, num_blocks=16)
    prompts = {f"r{i}": prompt_of(40 + 13 * i, seed=i) for i in range(5)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, greedy(80))
    results = engine.run()
    preempted = [event for event in engine.events if isinstance(event, RequestPreempted)]
    assert preempted and all(event.swapped == (preemption == "swap") for event in preempted)
    for request_id, prompt in prompts.items():
        reference(family).check_greedy(prompt, results[request_id].token_ids)
    assert shared.num_requests == 0


def crowded_engine(shared: ModelRunner, preemption: str, num_blocks: int) -> GatheringEngine:
    """An engine with few blocks whose scheduler expects short answers, so that it admits too much."""
    config = engine_config(shared, fixed_budget(64, preemption))
    config = config.with_(cache=replace(config.cache, num_blocks=num_blocks, watermark_blocks=0))
    engine = GatheringEngine(shared, config)
    lengths = engine.core.scheduler.lengths
    for _ in range(200):
        lengths.observe(lengths.group("standard", 64), 2)
    return engine


@pytest.mark.parametrize("instruction_set", FLOAT32)
def test_a_cached_prefix_gives_the_same_tokens(instruction_set: str) -> None:
    family = "qwen3"
    shared = runner(family, instruction_set)
    engine = GatheringEngine(shared, engine_config(shared, fixed_budget(128)))
    prefix = prompt_of(100)
    prompts = {"first": prefix + prompt_of(9), "second": prefix + prompt_of(30)}
    results = {}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, greedy(40))
        results |= engine.run()
    # the second turn of a conversation: prompt and answer of the first are cached, output blocks included
    prompts["third"] = prompts["first"] + results["first"].token_ids + prompt_of(5)
    engine.add("third", prompts["third"], greedy(40))
    results |= engine.run()
    for request_id, prompt in prompts.items():
        reference(family).check_greedy(prompt, results[request_id].token_ids)
    cached = {e.request_id: e.num_cached_tokens for e in engine.events if isinstance(e, RequestAdmitted)}
    assert cached == {"first": 0, "second": 96, "third": 128}


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_full_blocks_are_the_hashes_of_blocks_that_hold_output(length: int) -> None:
    prompt = prompt_of(length)
    tokens, results = generate(runner("llama"), prompt, chunks_of(length, 40), greedy(66))
    expected = hash_blocks(prompt + tokens[:-1], 32)[length // 32 :]
    assert [entry for result in results for entry in result.full_blocks] == [("r", block) for block in expected]


def test_a_recomputed_request_reports_each_output_block_once() -> None:
    shared = runner("llama")
    engine = crowded_engine(shared, "recompute", num_blocks=9)
    reported = []
    execute = shared.execute

    def spy(output):
        result = execute(output)
        reported.extend(result.full_blocks)
        return result

    engine.runner.execute = spy  # type: ignore[method-assign]
    try:
        prompts = {f"r{i}": prompt_of(50, seed=i) for i in range(3)}
        for request_id, prompt in prompts.items():
            engine.add(request_id, prompt, greedy(100))
        results = engine.run()
    finally:
        del engine.runner.execute
    assert any(isinstance(event, RequestPreempted) for event in engine.events)
    for request_id, prompt in prompts.items():
        expected = hash_blocks(prompt + results[request_id].token_ids[:-1], 32)[1:]
        assert [block for owner, block in reported if owner == request_id] == list(expected)


@pytest.mark.parametrize(("family", "instruction_set"), every_pair([*KINDS, "llama", "qwen2"], BFLOAT16))
def test_bfloat16_is_as_close_to_fp32_as_that_of_transformers(family: str, instruction_set: str) -> None:
    """Error of a log probability against fp32 on the same (bf16) weights: within 1.5 times the error of transformers
    in bf16, on average over 200 positions."""
    prompt = prompt_of(200)
    exact = reference(family, "bfloat16").logits(prompt).log_softmax(-1)
    rounded = copy.deepcopy(reference(family, "bfloat16").model).to(torch.bfloat16)
    with torch.no_grad():
        theirs = rounded(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    _, results = generate(runner(family, instruction_set, "bfloat16"), prompt, [200], sampling)
    first, entries = results[0].payload.prompt_logprobs["r"]
    assert first == 1
    rows, targets = torch.arange(199), torch.tensor(prompt[1:])
    ours = torch.tensor([entry.logprob for entry in entries])
    our_error = float((ours - exact[rows, targets]).abs().mean())
    their_error = float((theirs[rows, targets] - exact[rows, targets]).abs().mean())
    assert our_error < 1.5 * their_error, (our_error, their_error)


def test_prompt_and_output_logprobs_are_those_of_transformers() -> None:
    prompt = prompt_of(90)
    sampling = greedy(20, logprobs=3, prompt_logprobs=2)
    engine = GatheringEngine(runner("qwen2"), engine_config(runner("qwen2"), fixed_budget(64)))
    engine.add("r", prompt, sampling)
    generation = engine.run()["r"]
    expected = reference("qwen2").logits(prompt + generation.token_ids).log_softmax(-1)
    assert generation.prompt_logprobs[0] is None and len(generation.prompt_logprobs) == 90
    for position, entry in enumerate([*generation.prompt_logprobs[1:], *generation.logprobs], start=1):
        row, count = expected[position - 1], 2 if position < 90 else 3
        assert entry is not None
        assert entry.token_id == (prompt + generation.token_ids)[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        best = row.topk(count)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-3)


def test_tokens_are_drawn_with_the_number_of_their_seed_and_position() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=11)
    prompt = prompt_of(30)
    tokens, _ = generate(runner("llama"), prompt, [30], params)
    logits = reference("llama").logits(prompt + tokens).numpy()
    for position in range(30, 50):
        uniform = float(uniforms(np.array([11]), np.array([position]))[0])
        history = np.array((prompt + tokens)[:position], dtype=np.int32)
        expected = sample_row(logits[position - 1].copy(), RowSampling(params, uniform, history, 30))
        assert tokens[position - 30] == expected


@pytest.mark.parametrize(("family", "dtype", "instruction_set"), every_pair(KINDS, NATIVE))
def test_native_kernels_give_the_same_bits_in_every_batch_and_chunk(
    family: str, dtype: str, instruction_set: str
) -> None:
    """Log probabilities of a request are equal to the last bit: alone, in chunks of any size, and in a batch."""
    shared = runner(family, instruction_set, dtype)
    prompt, sampling = prompt_of(150), greedy(30, logprobs=4)

    def results(engine: GatheringEngine) -> list[TokenLogprobs]:
        engine.add("r", prompt, sampling)
        return engine.run()["r"].logprobs

    alone = results(GatheringEngine(shared, engine_config(shared)))
    for chunk in (64, 70, 149):
        engine = GatheringEngine(shared, engine_config(shared, fixed_budget(chunk), enable_prefix_cache=False))
        assert results(engine) == alone
    crowd = GatheringEngine(shared, engine_config(shared, fixed_budget(96)))
    for index in range(10):
        crowd.add(f"other{index}", prompt_of(5 + 30 * index, seed=1), greedy(10 + 3 * index))
    assert results(crowd) == alone


@pytest.mark.parametrize(("family", "dtype", "instruction_set"), every_pair(KINDS, NATIVE))
def test_native_kernels_give_the_same_bits_after_a_prefix_hit(family: str, dtype: str, instruction_set: str) -> None:
    shared = runner(family, instruction_set, dtype)
    engine, prompt = GatheringEngine(shared, engine_config(shared)), prompt_of(150)
    results = []
    for request_id in ("computed", "found"):
        engine.add(request_id, prompt, greedy(30, logprobs=4))
        results.append(engine.run()[request_id].logprobs)
    assert engine.core.stats().prefix_hit_tokens == 128 and results[0] == results[1]


def preempted() -> list[Any]:
    """Family, dtype, set and kind of preemption: what is moved is the same for all families, so that each other one
    meets one kind, in turns."""
    found = []
    for number, pair in enumerate(every_pair(["qwen2-window", *KINDS[:-1]], NATIVE)):
        for kind, preemption in enumerate(("recompute", "swap")):
            is_quick = pair.values[0] == "qwen2-window" or number % 2 == kind
            found.append(pytest.param(*pair.values, preemption, marks=pair.marks if is_quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("family", "dtype", "instruction_set", "preemption"), preempted())
def test_native_kernels_give_the_same_bits_after_preemption(
    family: str, dtype: str, instruction_set: str, preemption: str
) -> None:
    shared = runner(family, instruction_set, dtype)
    crowded = crowded_engine(shared, preemption, num_blocks=16)
    prompts = {f"r{i}": prompt_of(40 + 13 * i, seed=i) for i in range(5)}
    roomy = GatheringEngine(shared, engine_config(shared))  # there a request has the bits that it has alone
    found = []
    for engine in (crowded, roomy):
        for request_id, prompt in prompts.items():
            engine.add(request_id, prompt, greedy(60, logprobs=4))
        found.append(engine.run())
    results, expected = found
    assert any(isinstance(event, RequestPreempted) for event in crowded.events)
    assert not any(isinstance(event, RequestPreempted) for event in roomy.events)
    for request_id in prompts:
        assert expected[request_id].logprobs == results[request_id].logprobs


def test_random_requests_get_the_same_tokens_alone_and_in_a_batch() -> None:
    shared = runner("llama")
    prompts = {f"r{i}": prompt_of(20 + i, seed=i) for i in range(8)}
    params = {
        name: SamplingParams(max_tokens=30, temperature=0.9, top_p=0.9, top_k=40, seed=index, frequency_penalty=0.3)
        for index, name in enumerate(prompts)
    }
    together = GatheringEngine(shared, engine_config(shared, fixed_budget(64)))
    for name, prompt in prompts.items():
        together.add(name, prompt, params[name])
    results = together.run()
    for name, prompt in prompts.items():
        alone = GatheringEngine(shared, engine_config(shared))
        alone.add(name, prompt, params[name])
        assert alone.run()[name].token_ids == results[name].token_ids


def test_a_request_that_moves_to_another_worker_continues_its_stream() -> None:
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=5, repetition_penalty=1.2, presence_penalty=0.5)
    prompt = prompt_of(33)
    shared = runner("qwen3")
    tokens, _ = generate(shared, prompt, [33], sampling)
    shared.add_request("moved", prompt, sampling, output_token_ids=tokens[:15])
    chunk = ScheduledPrefill("moved", 0, 48, ((4, 9),), True)
    moved = list(shared.execute(SchedulerOutput(0, prefills=(chunk,))).payload.token_ids)
    for step in range(1, 15):
        moved += shared.execute(SchedulerOutput(step, num_decodes=1)).payload.token_ids
    shared.execute(SchedulerOutput(99, finished=("moved",)))
    assert moved == tokens[15:30]


def test_a_stop_token_ends_a_request_and_min_tokens_delays_it() -> None:
    shared = runner("llama")
    prompt = prompt_of(12)
    tokens, _ = generate(shared, prompt, [12], greedy(30))
    stop = tokens[7]
    first = tokens.index(stop)

    def run(**changes: object):
        engine = GatheringEngine(shared, engine_config(shared))
        engine.add("r", prompt, greedy(30, **changes))
        return engine.run()["r"]

    stopped = run(stop_token_ids=(stop,))
    assert stopped.token_ids == tokens[: first + 1] and stopped.finish_reason is FinishReason.STOP
    delayed = run(stop_token_ids=(stop,), min_tokens=12)
    assert stop not in delayed.token_ids[:12] and len(delayed.token_ids) >= 12


def test_end_of_sequence_stops_unless_it_is_ignored(tmp_path: Path) -> None:
    prompt = prompt_of(12)
    tokens, _ = generate(runner("llama"), prompt, [12], greedy(20))
    directory = shutil.copytree(reference("llama").directory, tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens[5]}))
    ending = load_runner(RunnerConfig(directory, num_blocks=32))
    for ignore_eos in (False, True):
        engine = GatheringEngine(ending, engine_config(ending))
        engine.add("r", prompt, greedy(20, ignore_eos=ignore_eos))
        result = engine.run()["r"]
        assert result.token_ids == (tokens if ignore_eos else tokens[: tokens.index(tokens[5]) + 1])
        assert result.finish_reason is (FinishReason.LENGTH if ignore_eos else FinishReason.STOP)


def test_a_request_with_broken_logits_fails_alone() -> None:
    broken = load_runner(RunnerConfig(reference("llama").directory, num_blocks=32, instruction_set=TORCH))
    poisoned = prompt_of(5)[0]
    broken.model.embed_tokens.weight[poisoned] = math.nan
    engine = GatheringEngine(broken, engine_config(broken))
    healthy = [token for token in prompt_of(20) if token != poisoned]
    engine.add("good", healthy, greedy(10))
    engine.add("bad", [*healthy, poisoned], greedy(10))
    results = engine.run()
    assert results["bad"].finish_reason is FinishReason.ERROR and "not a number" in results["bad"].message
    assert results["good"].finish_reason is FinishReason.LENGTH
    reference("llama").check_greedy(healthy, results["good"].token_ids)


@pytest.mark.parametrize("instruction_set", FLOAT32)
def test_blocks_left_by_a_broken_request_do_no_harm(instruction_set: str) -> None:
    broken = load_runner(RunnerConfig(reference("qwen3").directory, num_blocks=12, instruction_set=instruction_set))
    for k_cache, v_cache in broken.kv.layers:
        k_cache.fill_(math.nan)
        v_cache.fill_(math.nan)
    engine = GatheringEngine(broken, engine_config(broken, fixed_budget(64)))
    prompts = {f"r{i}": prompt_of(37 + i, seed=i) for i in range(4)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, greedy(20))
    for request_id, generation in engine.run().items():
        reference("qwen3").check_greedy(prompts[request_id], generation.token_ids)


def test_token_ids_outside_of_the_vocabulary_are_refused() -> None:
    shared = runner("llama")
    with pytest.raises(InvalidRequestError, match="prompt holds token ids from 1 to 384; the vocabulary has 0 to 383"):
        shared.add_request("r", [1, 384], greedy())
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        shared.add_request("r", [1], greedy(logit_bias={999: 1.0}))
    assert shared.num_requests == 0


def test_warm_up_measures_and_leaves_nothing_behind() -> None:
    shared = runner("llama")
    measured = warm_up(shared, budget_s=0.5)
    assert measured and all(duration > 0 for _, duration in measured)
    assert any(features.prefill_tokens for features, _ in measured)
    assert any(features.decode_seqs for features, _ in measured)
    assert shared.num_requests == 0
