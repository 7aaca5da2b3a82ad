"""Steps of an engine that says how many there were and how many tokens they had: what a gap between tokens is made of,
and how long a request that comes waits for the step that runs.

A step with ``batch`` streams and ``prompt`` prompt tokens takes floor + per_stream * (batch - 1) + per_prompt_token *
prompt. What the engine exports are means of it: the gap between tokens, in each interval between two pages and in its
life before them, and the prefill time of a request, whose prompt shares its steps with those that are computed at the
same time. The three unknowns are fitted to these by least squares of the relative errors, none below 0. Where the batch
never changes, nothing tells its cost from the floor: then a stream costs a small share of it, as where a step's time is
that of reading the weights.

A mean gap tells little of a few long prompts: most of their steps run while hardly a stream is there to feel them, and
attention makes their tokens dearer. Where the longest prompts are much longer than the mean one, a prompt token costs
at least what the longest prefill times say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from diptych.control.engine.scheduler.step_time import nonnegative_least_squares
from diptych.diagnosis.adapters.exposition import Growth, MetricsPage

STREAM_OF_FLOOR, BELIEF = 0.04, 0.1  # a further stream over the floor, and how much that weighs against what was seen
PREFILL_WEIGHT = 0.5  # of a mean prefill time; all gaps of the window weigh 1, and those before it
FEWEST_STEPS = 5.0  # in an interval that is used
MUCH_LONGER = 3.0  # the longest prompts than the mean one
MS = 1e-3

Row = tuple[float, float, tuple[float, float, float]]  # weight, milliseconds, (1, further streams, prompt tokens)


@dataclass(frozen=True, slots=True)
class StepNames:
    """Base names: histograms of the gaps, of the tokens per step, of a request's prefill time and computed prompt
    tokens; the counter of generated tokens."""

    gap: str
    tokens: str
    prefill: str
    computed: str
    generated: str


@dataclass(frozen=True, slots=True)
class StepMeans:
    """An interval. gap_s: mean gap between tokens, of ``num_gaps``. batch: tokens generated per step. prompt: prompt
    tokens per step."""

    gap_s: float
    num_gaps: float
    batch: float
    prompt: float

    @classmethod
    def of(cls, names: StepNames, growth: Growth) -> "StepMeans | None":
        """None: the engine does not count steps, or hardly any ran."""
        gap, tokens = growth.mean(names.gap), growth.mean(names.tokens)
        generated = growth.count(names.generated)
        if gap is None or tokens is None or generated is None or tokens[1] < FEWEST_STEPS:
            return None
        per_step, num_steps = tokens
        batch = generated / num_steps
        return cls(gap[0], gap[1], max(1.0, batch), max(0.0, per_step - batch))

    def row(self, weight: float) -> Row:
        """The means as a row for the fit."""
        return weight, self.gap_s / MS, (1.0, self.batch - 1, self.prompt)


@dataclass(frozen=True, slots=True)
class GapModel:
    """Seconds: of a step with one stream, of each further stream, and of each prompt token."""

    floor_s: float
    per_stream_s: float
    per_prompt_token_s: float

    def parts(self, means: StepMeans) -> dict[str, float]:
        """The mean gap by account; they sum to it. What the model lacks or has too much is shared out beyond the
        floor."""
        batch, prompts = self.per_stream_s * (means.batch - 1), self.per_prompt_token_s * means.prompt
        beyond = batch + prompts
        floor = min(self.floor_s, means.gap_s) if beyond > 0 else means.gap_s
        scale = (means.gap_s - floor) / beyond if beyond > 0 else 0.0
        return {"decode_floor": floor, "stalls": prompts * scale, "rest": batch * scale}

    def wait_for_step_s(self, names: StepNames, growth: Growth, batch: float, window_s: float) -> float:
        """Mean time to the end of the step that runs when a request comes, which may come at any time: the sum of the
        squared durations over twice the window (the inspection paradox)."""
        squares = total = 0.0
        for tokens, count in growth.distribution(names.tokens).means():
            duration = self.floor_s + self.per_prompt_token_s * max(0.0, tokens - batch)
            squares, total = squares + count * duration**2, total + count * duration
        return squares / 2 / max(window_s, total) if total else 0.0

    def gain_of_places(self, means: StepMeans) -> float:
        """How many times as many requests a second steps with twice the streams would serve: what a stream's token
        takes with its share of the step and the prompt tokens that come with it, now and then."""
        prompts = self.per_prompt_token_s * means.prompt / means.batch
        now = (self.floor_s + self.per_stream_s * (means.batch - 1)) / means.batch + prompts
        then = (self.floor_s + self.per_stream_s * (2 * means.batch - 1)) / (2 * means.batch) + prompts
        return now / then if then > 0 else 1.0


def fit_gaps(names: StepNames, pages: Sequence[tuple[float, MetricsPage]]) -> GapModel | None:
    """The model of the window of these pages, with their seconds, in order. None: see ``StepMeans.of``."""
    (begin_s, first), (end_s, last) = pages[0], pages[-1]
    growths = [Growth(before, after) for (_, before), (_, after) in pairwise(pages)]
    intervals = [means for growth in growths if (means := StepMeans.of(names, growth))]
    num_gaps = sum(means.num_gaps for means in intervals)
    rows = [means.row(means.num_gaps / num_gaps) for means in intervals if means.num_gaps]
    for growth, seconds in ((Growth(first, last), end_s - begin_s), (Growth(MetricsPage(), first), 0.0)):
        if means := StepMeans.of(names, growth):
            rows += [means.row(1.0)] if not seconds else []
            rows += _prefill_row(names, growth, means.batch, seconds)
    if not rows:
        return None
    model = _fit(rows)
    by_longest = _longest_s(names, Growth(MetricsPage(), last), model.floor_s)
    by_longest /= _together(names, Growth(first, last), end_s - begin_s)
    return replace(model, per_prompt_token_s=max(model.per_prompt_token_s, by_longest))


def _longest_s(names: StepNames, growth: Growth, floor_s: float) -> float:
    """Prefill time of a token of the longest prompts, by the last buckets that hold any; 0 where they are not long."""
    mean = growth.mean(names.computed) if names.computed else None
    if mean is None or not names.prefill:
        return 0.0
    tokens, seconds = (
        max((at for at, _ in growth.distribution(name).means()), default=0.0)
        for name in (names.computed, names.prefill)
    )
    return max(0.0, seconds - floor_s) / tokens if tokens > MUCH_LONGER * mean[0] > 0 else 0.0


def _together(names: StepNames, growth: Growth, seconds: float) -> float:
    """Mean number of prompts that are computed at the same time over ``seconds``, by Little's law (0: not known)."""
    prefill = growth.mean(names.prefill) if names.prefill else None
    return max(1.0, prefill[0] * prefill[1] / seconds) if prefill is not None and seconds else 1.0


def _prefill_row(names: StepNames, growth: Growth, batch: float, seconds: float) -> list[Row]:
    """The mean prefill time of a request as that of a step. In it are the tokens of all prompts that are computed at
    the same time (see ``_together``)."""
    prefill = growth.mean(names.prefill) if names.prefill else None
    computed = growth.mean(names.computed) if names.computed else None
    if prefill is None or computed is None or prefill[0] <= 0:
        return []
    together = _together(names, growth, seconds)
    return [(PREFILL_WEIGHT, prefill[0] / MS, (1.0, batch - 1, computed[0] * together))]


def _fit(rows: Sequence[Row]) -> GapModel:
    weighted = [(weight / value**2, value, columns) for weight, value, columns in rows if value > 0]
    matrix = [[sum(w * x[i] * x[j] for w, _, x in weighted) for j in range(3)] for i in range(3)]
    target = [sum(w * x[i] * value for w, value, x in weighted) for i in range(3)]
    belief = BELIEF * matrix[1][1]
    matrix[1][1] += belief
    matrix[0][1] -= belief * STREAM_OF_FLOOR
    matrix[1][0] -= belief * STREAM_OF_FLOOR
    matrix[0][0] += belief * STREAM_OF_FLOOR**2
    scale = [max(matrix[i][i], 1e-12) ** 0.5 for i in range(3)]
    scaled = [[matrix[i][j] / scale[i] / scale[j] + (1e-6 if i == j else 0.0) for j in range(3)] for i in range(3)]
    found = nonnegative_least_squares(scaled, [target[i] / scale[i] for i in range(3)])
    floor, stream, prompt = (value / by * MS for value, by in zip(found, scale, strict=True))
    return GapModel(floor, stream, prompt)
