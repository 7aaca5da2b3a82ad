"""What one worker did with its time, summed up so that any interval of it can be split in a few additions.

Every nanosecond of a worker belongs to one Use. The sums are exact: those of [a, b) and of [b, c) add up to those of
[a, c), and all uses of an interval to its length. What prompts took in a step, and what a stream alone would have
taken, comes from the step-time model, cut to the length of the step; what is left is SLOW.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from diptych.control.step import chunk_attention
from diptych.timeline.records import StepRecord

Terms = tuple[float, float, float, float, float]  # of the step-time model, in ns (see EngineStats)


class Use(IntEnum):
    """What a nanosecond of a worker was used for. PURE: in steps of streams only. MIXED: in steps of streams and
    prompts. FLOOR: one stream alone; BATCH: the others. PROMPTS: steps of prompts only, STALLING while streams had to
    wait for them. FULL: steps of streams only, with no place free (its floor and batch are in PURE)."""

    PURE_FLOOR = 0
    PURE_BATCH = 1
    MIXED_FLOOR = 2
    MIXED_BATCH = 3
    MIXED_PREFILL = 4
    PROMPTS = 5
    SLOW = 6
    IDLE = 7
    # not part of the whole: parts of the above, counted once more
    FULL = 8
    MARKED_PREFILL = 9


NUM_USES = 8  # that make up the whole
Sums = tuple[int, ...]  # one a Use


@dataclass(frozen=True, slots=True)
class StepShares:
    """One step, split. sums: by Use."""

    start_ns: int
    end_ns: int
    sums: Sums


def split_step(step: StepRecord, terms: Terms, max_num_seqs: int, marked: Callable[[str], bool]) -> StepShares:
    """Split the time of a step. marked: requests whose prompts are counted as MARKED_PREFILL."""
    duration = step.end_ns - step.start_ns
    sums = [0] * len(Use)
    rest = duration
    tokens = sum(count for _, _, count in step.prefills)
    step_ns, token_ns, pair_ns, stream_ns, context_ns = terms
    pairs = sum(chunk_attention(start, count) for _, start, count in step.prefills)
    prompts_ns = token_ns * tokens + pair_ns * pairs
    if step.num_decodes:
        mean = step.decode_context / step.num_decodes
        alone_ns = step_ns + stream_ns + context_ns * mean
        others_ns = stream_ns * (step.num_decodes - 1) + context_ns * (step.decode_context - mean)
        expected = [(Use.PURE_FLOOR, alone_ns), (Use.PURE_BATCH, others_ns)]
        if tokens:
            expected = [(Use.MIXED_FLOOR, alone_ns), (Use.MIXED_BATCH, others_ns), (Use.MIXED_PREFILL, prompts_ns)]
    else:
        expected = [(Use.PROMPTS, step_ns + prompts_ns)]
    for use, expected_ns in expected:
        sums[use] += (part := min(rest, int(expected_ns)))
        rest -= part
    sums[Use.SLOW] = rest
    if not tokens and step.num_decodes >= max_num_seqs:
        sums[Use.FULL] = duration
    if tokens and (named := sum(count for request_id, _, count in step.prefills if marked(request_id))):
        sums[Use.MARKED_PREFILL] = (sums[Use.MIXED_PREFILL] + sums[Use.PROMPTS]) * named // tokens
    return StepShares(step.start_ns, step.end_ns, tuple(sums))


class StepSums:
    """The steps of one worker in order of time."""

    def __init__(self, steps: Sequence[StepShares]) -> None:
        self._steps = steps
        self._starts = [step.start_ns for step in steps]
        self._begins = {step.end_ns: step.start_ns for step in steps}
        self._before: list[Sums] = []  # of all time before step n, idle time included; the origin is its start
        total = [0] * len(Use)
        end_ns = steps[0].start_ns if steps else 0
        for step in steps:
            total[Use.IDLE] += step.start_ns - end_ns
            self._before.append(tuple(total))
            for use, value in enumerate(step.sums):
                total[use] += value
            end_ns = step.end_ns

    def __len__(self) -> int:
        return len(self._steps)

    def between(self, start_ns: int, end_ns: int) -> Sums:
        """The uses of the time from ``start_ns`` to ``end_ns``. Time without steps is IDLE."""
        if not self._steps:
            return tuple(end_ns - start_ns if use is Use.IDLE else 0 for use in Use)
        return tuple(late - early for early, late in zip(self._at(start_ns), self._at(end_ns), strict=True))

    def begin_of(self, end_ns: int) -> int:
        """When the step began that ended at this time."""
        return self._begins[end_ns]

    def _at(self, now: int) -> Sums:
        """The sums from the first step's start to ``now`` (before it: negative idle time)."""
        index = bisect_right(self._starts, now) - 1
        if index < 0:
            return tuple(now - self._starts[0] if use is Use.IDLE else 0 for use in Use)
        step, before = self._steps[index], self._before[index]
        if now >= step.end_ns:
            sums = [early + part for early, part in zip(before, step.sums, strict=True)]
            sums[Use.IDLE] += now - step.end_ns
            return tuple(sums)
        return tuple(early + part for early, part in zip(before, _first(step, now - step.start_ns), strict=True))


def _first(step: StepShares, passed_ns: int) -> list[int]:
    """The first ``passed_ns`` nanoseconds of a step: its uses one after the other."""
    rest, parts = passed_ns, []
    for value in step.sums[:NUM_USES]:
        parts.append(part := min(rest, value))
        rest -= part
    duration = max(1, step.end_ns - step.start_ns)
    return parts + [value * passed_ns // duration for value in step.sums[NUM_USES:]]
