"""A few measured steps before the first request: they prime allocators and kernel caches, and give the step-time
model its first fit. Must be called on an idle runner; leaves nothing behind but garbage in free KV blocks.

What else runs on the machine only ever makes a step longer, and a model of a few steps has nothing to outweigh one that
was: it would take prompts to cost nothing, or ten times too much. So all shapes are measured in rounds, each until its
two fastest steps agree, and these are what counts.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from diptych.control.request import BlockTables, SamplingParams
from diptych.control.step import ResumedDecode, ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.runtime.step.model_runner import ModelRunner

# Prompts as (tokens, context before them), decodes as (sequences, context of each), from cheap to dear
PREFILLS = ((16, 0), (64, 0), (128, 256), (256, 0), (64, 2048), (512, 512))
DECODES = ((1, 16), (4, 256), (16, 16), (8, 1024), (2, 2048), (32, 128))
COUNTED = 2  # steps of each shape, the fastest
AGREE = 1.1  # the slower of these takes at most this factor longer
MOST_ROUNDS = 8  # where they do not agree

Measurement = tuple[StepFeatures, int]


@dataclass(slots=True)
class _Shape:
    """A step to be measured: one chunk of a prompt, or one token of every sequence. times_ns: shortest first."""

    is_prefill: bool
    count: int  # tokens of the chunk, or sequences
    context: int
    times_ns: list[int] = field(default_factory=list)

    @property
    def features(self) -> StepFeatures:
        """What the step-time model sees of it."""
        if self.is_prefill:
            return StepFeatures(self.count, chunk_attention(self.context, self.count))
        return StepFeatures(decode_seqs=self.count, decode_context=self.count * (self.context + 2))

    @property
    def is_settled(self) -> bool:
        """Whether the steps that count agree."""
        return len(self.times_ns) >= COUNTED and self.times_ns[COUNTED - 1] <= AGREE * self.times_ns[0]


def warm_up(
    runner: ModelRunner, *, budget_s: float = 1.2, clock: Callable[[], int] = time.perf_counter_ns
) -> list[Measurement]:
    """Measured steps as (features, nanoseconds), for ``EngineCore.observe``. Shapes that would exceed the budget, the
    KV cache or the context are left out."""
    assert runner.num_requests == 0, "warm-up needs an idle runner"
    room = min(runner.max_model_len - 4, (runner.num_blocks - 1) * runner.block_size)
    deadline = clock() + int(budget_s * 1e9)
    shapes: list[_Shape] = []
    for (num_tokens, context), (num_seqs, decode_context) in zip(PREFILLS, DECODES, strict=True):
        if decode_context <= room:
            shapes.append(_Shape(False, min(num_seqs, runner.max_num_seqs), decode_context))
        if num_tokens + context <= room:
            shapes.append(_Shape(True, num_tokens, context))
    least = {True: 0.0, False: 0.0}  # nanoseconds of a token of a prompt, and of a sequence, in the cheapest shape
    for _ in range(MOST_ROUNDS):
        for shape in shapes:
            steps_left = max(1, COUNTED - len(shape.times_ns))
            if shape.is_settled or clock() + steps_left * shape.count * least[shape.is_prefill] >= deadline:
                continue
            duration_ns = _prefill(runner, shape, clock) if shape.is_prefill else _decode(runner, shape, clock)
            shape.times_ns = sorted([*shape.times_ns, duration_ns])
            least[shape.is_prefill] = min(least[shape.is_prefill] or math.inf, duration_ns / shape.count)
    # The model is not fitted anew after each: what every shape takes at least comes before what it takes again, and
    # dear shapes, which tell the most, before cheap ones.
    ranked = [(shape, number) for number in range(COUNTED) for shape in reversed(shapes)]
    return [(shape.features, shape.times_ns[number]) for shape, number in ranked if number < len(shape.times_ns)]


def _decode(runner: ModelRunner, shape: _Shape, clock: Callable[[], int]) -> int:
    """Nanoseconds of a step, after one that is not measured, because the sequences join in it. They all share the same
    blocks: only the cost matters."""
    blocks = _first_blocks(runner, shape.context + 3)
    ids = add_requests(runner, shape.count, shape.context + 1, "warm-up")
    resumed = tuple(ResumedDecode(request_id, shape.context, blocks) for request_id in ids)
    runner.execute(SchedulerOutput(0, num_decodes=shape.count, resumed=resumed))
    start = clock()
    runner.execute(SchedulerOutput(0, num_decodes=shape.count))
    duration_ns = clock() - start
    runner.execute(SchedulerOutput(0, finished=tuple(ids)))
    return duration_ns


def _prefill(runner: ModelRunner, shape: _Shape, clock: Callable[[], int]) -> int:
    """Nanoseconds of a step."""
    num_tokens = shape.context + shape.count
    (request_id,) = add_requests(runner, 1, num_tokens, "warm-up")
    blocks = _first_blocks(runner, num_tokens)
    chunk = ScheduledPrefill(request_id, shape.context, shape.count, blocks, is_last=True)
    start = clock()
    runner.execute(SchedulerOutput(0, prefills=(chunk,)))
    duration_ns = clock() - start
    runner.execute(SchedulerOutput(0, finished=(request_id,)))
    return duration_ns


def _first_blocks(runner: ModelRunner, num_tokens: int) -> BlockTables:
    """Blocks of this worker's own that hold ``num_tokens`` tokens, the same in all groups of layers."""
    count = -(-num_tokens // runner.block_size)
    return (tuple(range(runner.first_block, runner.first_block + count)),) * max(1, len(runner.groups))


def add_requests(runner: ModelRunner, count: int, num_tokens: int, prefix: str) -> list[str]:
    """Make known ``count`` requests of ``num_tokens`` made-up tokens each, without computing them: their ids."""
    ids = [f"{prefix}-{index}" for index in range(count)]
    vocab_size = runner.model_config.vocab_size
    for index, request_id in enumerate(ids):
        token_ids = [(7 * position + index) % vocab_size for position in range(num_tokens)]
        runner.add_request(request_id, token_ids, SamplingParams(temperature=0.0, ignore_eos=True))
    return ids
