"""Durations of single steps, measured through a ModelRunner in a process of its own: the first half of a calibration.

Owns the design points: which kinds of steps are measured. The process reads EngineOptions as JSON from standard input
and prints JSON lines, ["progress", share], then ["points", [[four step features], nanoseconds], ...]. Must never know
sockets or fitting. ``python -m diptych.calibration.calibration_steps`` is started by calibrate.py.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from diptych.control.errors import DiptychError, ErrorRecord
from diptych.control.request import BlockTables
from diptych.control.step import ResumedDecode, ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.serving.link.engine_options import EngineOptions

if TYPE_CHECKING:
    from diptych.runtime.step.model_runner import ModelRunner

CHUNKS = (1, 16, 32, 48, 80, 144, 272, 528, 1040, 2064)  # from 48 on between the tiles of kernels (32 or 64 rows)
CHUNK_CONTEXTS = (0, 512, 2048, 6144)
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
DECODE_CONTEXTS = (32, 256, 1024, 4096)
MIXED_BATCHES, MIXED_CHUNKS = (1, 4, 16), (32, 128, 512)
LONGEST_STEP_S = 2.0
ROUNDS = (2, 9)  # at least, at most
DECODE_STEPS = 3  # measured one after another in each round

Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class DesignPoint:
    """A step: a chunk of a prompt (0: none) after so much context, and decodes with so much context each."""

    chunk: int
    start: int
    num_seqs: int
    context: int

    @property
    def features(self) -> StepFeatures:
        """What its duration depends on."""
        pairs = chunk_attention(self.start, self.chunk) if self.chunk else 0
        return StepFeatures(self.chunk, pairs, self.num_seqs, self.num_seqs * (self.context + 1))


def design(max_num_seqs: int, room_tokens: int, max_model_len: int) -> list[DesignPoint]:
    """The points that fit in the KV cache and the context, from cheap to dear."""
    chunks = [DesignPoint(chunk, start, 0, 0) for chunk in CHUNKS for start in CHUNK_CONTEXTS]
    decodes = [DesignPoint(0, 0, count, context) for count in BATCHES for context in DECODE_CONTEXTS]
    mixed = [DesignPoint(chunk, 256, count, 256) for count in MIXED_BATCHES for chunk in MIXED_CHUNKS]
    points = [*chunks, *decodes, *mixed]
    return [
        point
        for point in sorted(points, key=lambda point: (point.chunk + 4 * point.num_seqs, point.start, point.context))
        if point.num_seqs <= max_num_seqs
        and point.start + point.chunk + point.num_seqs * (point.context + DECODE_STEPS + 2) <= room_tokens
        and max(point.start + point.chunk, point.context) < max_model_len - DECODE_STEPS - 2
    ]


def measure(
    runner: "ModelRunner", budget_s: float, progress: Callable[[float], None], clock: Clock = time.perf_counter_ns
) -> list[tuple[StepFeatures, int]]:
    """The median duration of each point. The rounds go through all points in another order each, so that a slow spell
    of the machine touches many points a little instead of a few a lot."""
    room = (runner.num_blocks // max(1, len(runner.groups)) - 1) * runner.block_size
    points = design(runner.max_num_seqs, room, runner.max_model_len)
    durations: dict[DesignPoint, list[int]] = {}
    begun, rng = clock(), random.Random(0)
    per_token = 0.0
    for number in range(ROUNDS[1]):
        order = points if number == 0 else rng.sample(points, len(points))
        for point in order:
            if number and point not in durations:
                continue
            if not number and (per_token * point.chunk > LONGEST_STEP_S * 1e9 or clock() - begun > budget_s * 5e8):
                continue  # on a slow machine the dearest points are left out
            measured = measure_point(runner, point, clock)
            durations.setdefault(point, []).extend(measured)
            per_token = max(per_token, measured[-1] / point.chunk) if point.chunk >= 64 else per_token
            progress(min(1.0, (clock() - begun) / (budget_s * 1e9)))
        elapsed_s = (clock() - begun) / 1e9
        if number + 1 >= ROUNDS[0] and elapsed_s * (number + 2) / (number + 1) > budget_s:
            break
    return [(point.features, round(statistics.median(times))) for point, times in durations.items()]


def measure_point(runner: "ModelRunner", point: DesignPoint, clock: Clock) -> list[int]:
    """Durations of the point's step, in nanoseconds: one with a chunk, DECODE_STEPS without."""
    from diptych.runtime.step.warm_up import add_requests

    blocks = iter(range(runner.num_blocks))
    ids = add_requests(runner, point.num_seqs, point.context + 1, "decode")
    most = point.context + DECODE_STEPS + 2
    resumed = tuple(ResumedDecode(name, point.context, *_tables(runner, blocks, point.context, most)) for name in ids)
    durations = []
    if ids:
        runner.execute(SchedulerOutput(0, num_decodes=len(ids), resumed=resumed))
    if point.chunk:
        (name,) = add_requests(runner, 1, point.start + point.chunk, "prompt")
        tables, firsts = _tables(runner, blocks, point.start, point.start + point.chunk)
        chunk = ScheduledPrefill(name, point.start, point.chunk, tables, True, firsts)
        plans = [SchedulerOutput(0, prefills=(chunk,), num_decodes=len(ids))]
        ids = [*ids, name]
    else:
        plans = [SchedulerOutput(0, num_decodes=len(ids))] * DECODE_STEPS
    for plan in plans:
        begin = clock()
        runner.execute(plan)
        durations.append(clock() - begin)
    runner.execute(SchedulerOutput(0, finished=tuple(ids)))
    return durations


def _tables(
    runner: "ModelRunner", blocks: Iterator[int], num_committed: int, num_tokens: int
) -> tuple[BlockTables, tuple[int, ...]]:
    """Block tables for ``num_tokens`` tokens, and the indices of their first blocks: as a sequence has them of which
    ``num_committed`` tokens are computed."""
    last = -(-num_tokens // runner.block_size)
    firsts = tuple([group.first_live(num_committed) for group in runner.groups])
    return tuple([tuple(islice(blocks, last - first)) for first in firsts or (0,)]), firsts


def main() -> int:
    """Measure what standard input asks for: [EngineOptions, seconds]."""

    def say(*line: Any) -> None:
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()

    options, budget_s = msgspec.json.decode(sys.stdin.read(), type=tuple[EngineOptions, float])
    try:
        from diptych.serving.worker.load_engine import load_engine

        loaded = load_engine(options, lambda stage, fraction=None: None)
        points: Iterable[tuple[StepFeatures, int]] = measure(
            loaded.runner, budget_s, lambda share: say("progress", share)
        )
    except DiptychError as error:
        say("failed", ErrorRecord.of(error))
        return 1
    say("points", list(points))
    return 0


if __name__ == "__main__":
    sys.exit(main())
