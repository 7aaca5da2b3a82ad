"""A few measured steps before the first request: they prime allocators and kernel caches, and give the step-time
model its first fit. Must be called on an idle runner; leaves nothing behind but garbage in free KV blocks.
"""

import time
from collections.abc import Callable

from diptych.control.request import SamplingParams
from diptych.control.step import ResumedDecode, ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.runtime.model_runner import ModelRunner

# (prompt tokens, context before them) and (decode sequences, context of each), from cheap to dear
PREFILLS = ((16, 0), (64, 0), (128, 256), (256, 0), (64, 2048), (512, 512))
DECODES = ((1, 16), (4, 256), (16, 16), (8, 1024), (2, 2048), (32, 128))
REPEATS = 2  # measured steps of each decode shape

Measurement = tuple[StepFeatures, int]


def warm_up(
    runner: ModelRunner, *, budget_s: float = 1.2, clock: Callable[[], int] = time.perf_counter_ns
) -> list[Measurement]:
    """Measured steps as (features, nanoseconds), for ``EngineCore.observe``. Shapes that would exceed the budget, the
    KV cache or the context are left out."""
    assert runner.num_requests == 0, "warm-up needs an idle runner"
    room = min(runner.max_model_len - 4, (runner.num_blocks - 1) * runner.block_size)
    deadline = clock() + int(budget_s * 1e9)
    measured: list[Measurement] = []
    per_token = per_sequence = 0.0  # nanoseconds, of the latest shape
    for (num_tokens, context), (num_seqs, decode_context) in zip(PREFILLS, DECODES, strict=True):
        num_seqs = min(num_seqs, runner.max_num_seqs)
        if decode_context <= room and clock() + (REPEATS + 1) * num_seqs * per_sequence < deadline:
            steps = _decode(runner, num_seqs, decode_context, clock)
            per_sequence = steps[-1][1] / num_seqs
            measured += steps
        if num_tokens + context <= room and clock() + 2 * num_tokens * per_token < deadline:
            features, duration_ns = _prefill(runner, num_tokens, context, clock)
            per_token = duration_ns / num_tokens
            measured.append((features, duration_ns))
    return measured


def _decode(runner: ModelRunner, num_seqs: int, context: int, clock: Callable[[], int]) -> list[Measurement]:
    """One unmeasured step and REPEATS measured ones. All sequences share the same blocks: only the cost matters."""
    blocks = _first_blocks(runner, context + REPEATS + 2)
    ids = add_requests(runner, num_seqs, context + 1, "warm-up")
    resumed = tuple(ResumedDecode(request_id, context, blocks) for request_id in ids)
    runner.execute(SchedulerOutput(0, num_decodes=num_seqs, resumed=resumed))
    measured = []
    for repeat in range(1, REPEATS + 1):
        features = StepFeatures(decode_seqs=num_seqs, decode_context=num_seqs * (context + 1 + repeat))
        start = clock()
        runner.execute(SchedulerOutput(0, num_decodes=num_seqs))
        measured.append((features, clock() - start))
    runner.execute(SchedulerOutput(0, finished=tuple(ids)))
    return measured


def _prefill(runner: ModelRunner, num_tokens: int, context: int, clock: Callable[[], int]) -> Measurement:
    """One chunk, once unmeasured and once measured."""
    blocks = _first_blocks(runner, context + num_tokens)
    features = StepFeatures(prefill_tokens=num_tokens, prefill_attention=chunk_attention(context, num_tokens))
    duration_ns = 0
    for _ in range(2):
        (request_id,) = add_requests(runner, 1, context + num_tokens, "warm-up")
        chunk = ScheduledPrefill(request_id, context, num_tokens, blocks, is_last=True)
        start = clock()
        runner.execute(SchedulerOutput(0, prefills=(chunk,)))
        duration_ns = clock() - start
        runner.execute(SchedulerOutput(0, finished=(request_id,)))
    return features, duration_ns


def _first_blocks(runner: ModelRunner, num_tokens: int) -> tuple[int, ...]:
    """Blocks of this worker's own that hold so many tokens."""
    count = -(-num_tokens // runner.block_size)
    return tuple(range(runner.first_block, runner.first_block + count))


def add_requests(runner: ModelRunner, count: int, num_tokens: int, prefix: str) -> list[str]:
    """Make known ``count`` requests of ``num_tokens`` made-up tokens each, without computing them: their ids."""
    ids = [f"{prefix}-{index}" for index in range(count)]
    vocab_size = runner.model_config.vocab_size
    for index, request_id in enumerate(ids):
        token_ids = [(7 * position + index) % vocab_size for position in range(num_tokens)]
        runner.add_request(request_id, token_ids, SamplingParams(temperature=0.0, ignore_eos=True))
    return ids
