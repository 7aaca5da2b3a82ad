"""Drives a ModelRunner with plans made by hand: one request, any chunks, any blocks."""

import random
from collections.abc import Sequence

from diptych.control.request import SamplingParams
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepResult
from diptych.runtime.model_runner import ModelRunner


def greedy(max_tokens: int = 64, **changes: object) -> SamplingParams:
    """Greedy sampling."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)


def chunks_of(length: int, size: int) -> list[int]:
    """A prompt's chunks of at most this size."""
    return [min(size, length - start) for start in range(0, length, size)]


def generate(
    runner: ModelRunner,
    prompt: Sequence[int],
    chunks: Sequence[int],
    sampling: SamplingParams,
    *,
    block_seed: int = 0,
    request_id: str = "r",
) -> tuple[list[int], list[StepResult]]:
    """Prefill in these chunks, then decode to max_tokens, in blocks scattered over the whole cache."""
    size = runner.block_size
    needed = -(-(len(prompt) + sampling.max_tokens) // size)
    blocks = random.Random(block_seed).sample(range(runner.first_block, runner.first_block + runner.num_blocks), needed)
    runner.add_request(request_id, prompt, sampling)
    held = -(-len(prompt) // size)
    results, tokens, start = [], [], 0
    for number in chunks:
        is_last = start + number == len(prompt)
        chunk = ScheduledPrefill(request_id, start, number, tuple(blocks[:held]), is_last)
        results.append(runner.execute(SchedulerOutput(len(results), prefills=(chunk,))))
        start += number
    tokens += results[-1].payload.token_ids
    while len(tokens) < sampling.max_tokens:
        new_blocks = []
        if len(prompt) + len(tokens) > held * size:
            new_blocks = [(request_id, blocks[held])]
            held += 1
        results.append(runner.execute(SchedulerOutput(len(results), num_decodes=1, new_blocks=tuple(new_blocks))))
        tokens += results[-1].payload.token_ids
    runner.execute(SchedulerOutput(len(results), finished=(request_id,)))
    assert runner.num_requests == 0
    return tokens, results
