"""Costs fitted to measured steps of one machine and model: the law, its fit, and the file of ``diptych calibrate``.

Owns the format of that file. Must never measure anything. The law adds a decode part and a prompt part,

    t = seqs(num_seqs) + context(num_seqs) * decode context + tokens(prefill tokens) + pair * (query, key) pairs

where seqs, context and tokens are straight between their knots and beyond the last two. With two knots each it is the
five-term law of the scheduler's own step-time model; which of the two is used is decided by held-out measurements.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from diptych.control.config import CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.engine.scheduler.step_time import nonnegative_least_squares
from diptych.control.errors import ConfigError
from diptych.control.step import SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs.cost_model import FRACTION_BITS, DecodeLine
from diptych.simulation.serving_engine import FrontEnd

FORMAT, VERSION = "diptych calibration", 1
BELIEF, LIVE_BELIEF = 0.01, 8.0  # how many measured steps a belief counts for, in tables of single and live steps
OUTLIER = 6
FIRM = 8  # recorded steps whose mean is worth judging by
MOST_REPEATS = 64  # a point that is the mean of more steps weighs no more
MOST_ERROR = 0.2  # of the median held-out step; above, a calibration is refused unless forced
HELD_OUT = 4  # one point in HELD_OUT is kept out of the fit that is judged


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A kind of step and its mean duration on the machine. ``repeats``: how many steps the mean is of."""

    features: StepFeatures
    duration_ns: int
    repeats: int = 1

    @staticmethod
    def of(num_seqs: int, context: int, prompt: int) -> StepFeatures:
        """Features of a step with ``num_seqs`` decodes of ``context`` tokens each, and a whole prompt of ``prompt``
        tokens."""
        return StepFeatures(prompt, chunk_attention(0, prompt), num_seqs, num_seqs * context)


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A CostModel; see the module's docstring for the law. Knots ascend, two at least; durations in nanoseconds."""

    seq_knots: tuple[int, ...]
    seq_ns: tuple[float, ...]
    context_ns: tuple[float, ...]  # per token of context, at seq_knots
    token_knots: tuple[int, ...]
    token_ns: tuple[float, ...]
    pair_ns: float
    name: str = "fitted"

    def __post_init__(self) -> None:
        tables = ((self.seq_knots, self.seq_ns), (self.seq_knots, self.context_ns), (self.token_knots, self.token_ns))
        for knots, values in tables:
            if len(knots) < 2 or len(knots) != len(values) or list(knots) != sorted(set(knots)):
                raise ConfigError(
                    f"a fitted table has knots {knots} for {len(values)} values; at least 2, ascending, one value each",
                    param="knots",
                )

    def decode_line(self, num_seqs: int, context: int) -> DecodeLine:
        return DecodeLine.of(
            interpolate(self.seq_knots, self.seq_ns, num_seqs),
            max(0.0, interpolate(self.seq_knots, self.context_ns, num_seqs)),
        )

    def step_ns(self, output: SchedulerOutput) -> int:
        return self.features_ns(output.features)

    def features_ns(self, features: StepFeatures) -> int:
        """Duration of a step with these features."""
        line = self.decode_line(features.decode_seqs, features.decode_context)
        total = line.intercept + line.slope * features.decode_context
        if features.prefill_tokens:
            extra = interpolate(self.token_knots, self.token_ns, features.prefill_tokens)
            extra += self.pair_ns * features.prefill_attention
            total += max(0, round(extra * (1 << FRACTION_BITS)))
        return total >> FRACTION_BITS


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All that is known of "this machine" with one model.

    warm_up: the measurements that its server's step-time model began with. points: steps of the live server, which
    ``cost`` is fitted to; steps: single ones without it. errors: relative errors {"median", "p95"} of each law that
    was tried, on held-out points; ``cost.name`` says which was chosen. scheduler: the rules of an engine of others,
    which hold where the settings name no shape (None: an engine of ours, which may have any).
    """

    model: str
    cost: FittedCost
    cache: CacheConfig
    max_model_len: int
    front_end: FrontEnd = field(default_factory=FrontEnd)
    warm_up: tuple[tuple[StepFeatures, int], ...] = ()
    points: tuple[MeasuredPoint, ...] = ()
    steps: tuple[MeasuredPoint, ...] = ()
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    scheduler: SchedulerConfig | None = None

    @property
    def quantize(self) -> str:
        """What the measured engine's weights were quantised to; "none" in files from before there was a choice."""
        return self.settings.get("quantize") or "none"

    @property
    def held_out_error(self) -> dict[str, float] | None:
        """The errors of the chosen law on held-out steps; None where the file has none."""
        return self.errors.get(self.cost.name) or self.errors.get(f"single steps, {self.cost.name}")

    @property
    def is_accurate(self) -> bool:
        """Whether the median held-out step is predicted within MOST_ERROR; a file without errors is taken at its
        word."""
        error = self.held_out_error
        return error is None or error.get("median", 0.0) <= MOST_ERROR

    def error_words(self) -> str:
        """The error of the chosen law, for people; "" where the file has none."""
        error = self.held_out_error
        return "" if error is None else ", ".join(f"{name} {value:.1%}" for name, value in error.items())

    def worker(self, scheduler: SchedulerConfig) -> EngineConfig:
        """A worker of this machine with a scheduler of one's choice."""
        return EngineConfig(cache=self.cache, scheduler=scheduler, max_model_len=self.max_model_len)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write it as JSON that people can read. Raises ConfigError when the file cannot be written."""
    record = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(calibration)}
    lists = {name: record.pop(name) for name in ("warm_up", "points", "steps")}
    text = msgspec.json.format(msgspec.json.encode(record), indent=1).decode().rstrip().removesuffix("}").rstrip()
    for name, content in lists.items():  # one measurement a line
        lines = ",\n".join("  " + msgspec.json.encode(entry).decode() for entry in content)
        text += f',\n "{name}": [\n{lines}\n ]'
    try:
        path.write_text(text + "\n}\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", param="output") from None


def read_calibration(path: str | Path) -> Calibration:
    """The file of ``diptych calibrate``. Raises ConfigError when it is none, or of another version."""
    try:
        record = msgspec.json.decode(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="path") from None
    except msgspec.DecodeError:
        record = None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ConfigError(f"{path} is no file of diptych calibrate", param="path")
    if record.get("version") != VERSION:
        version = record.get("version")
        raise ConfigError(f"{path} is a calibration of version {version}; this reads {VERSION}", param="path")
    try:
        return msgspec.convert(record, Calibration)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is not as diptych calibrate writes it: {error}", param="path") from None


def interpolate(knots: Sequence[int], values: Sequence[float], at: int) -> float:
    """The broken line through (knot, value), continued beyond its ends."""
    index = min(max(bisect_right(knots, at), 1), len(knots) - 1)
    low, high = knots[index - 1], knots[index]
    share = (at - low) / (high - low)
    return values[index - 1] + share * (values[index] - values[index - 1])


def fit_linear(points: Sequence[MeasuredPoint]) -> FittedCost:
    """The five-term law with coefficients >= 0 and the least squared relative error."""
    rows = [
        (1.0, f.prefill_tokens, f.prefill_attention, f.decode_seqs, f.decode_context)
        for f in (point.features for point in points)
    ]
    base, token, pair, seq, context = _solve(rows, points, [0.0] * 5, 1e-9)
    return FittedCost((0, 1), (base, base + seq), (context, context), (0, 1), (0.0, token), pair, "linear")


def fit_table(
    points: Sequence[MeasuredPoint],
    belief: FittedCost | None = None,
    knots: tuple[Sequence[int], Sequence[int]] | None = None,
    weight: float = BELIEF,
) -> FittedCost:
    """The law with a knot at each batch size and prompt length that the points have (at most 12 each), or at the
    given ``knots`` of both; what the points do not say follows ``belief`` (none: the five-term law)."""
    belief = belief or fit_linear(points)
    if knots is None:
        tokens_seen = (point.features.prefill_tokens for point in points if point.features.prefill_tokens)
        knots = (_knots((point.features.decode_seqs for point in points), first=0), _knots(tokens_seen, first=1))
    seqs, tokens = knots
    start = [interpolate(belief.seq_knots, belief.seq_ns, knot) for knot in seqs]
    start += [interpolate(belief.seq_knots, belief.context_ns, knot) for knot in seqs]
    start += [interpolate(belief.token_knots, belief.token_ns, knot) for knot in tokens]
    start.append(belief.pair_ns)
    rows = []
    for point in points:
        features = point.features
        seq_shares = _shares(seqs, features.decode_seqs)
        token_shares = _shares(tokens, features.prefill_tokens) if features.prefill_tokens else [0.0] * len(tokens)
        context_shares = [share * features.decode_context for share in seq_shares]
        rows.append((*seq_shares, *context_shares, *token_shares, float(features.prefill_attention)))
    found = _solve(rows, points, start, weight)
    count = len(seqs)
    return FittedCost(
        tuple(seqs),
        tuple(found[:count]),
        tuple(found[count : 2 * count]),
        tuple(tokens),
        tuple(found[2 * count : -1]),
        found[-1],
        "table",
    )


def fit(points: Sequence[MeasuredPoint]) -> tuple[FittedCost, dict[str, dict[str, float]]]:
    """The law that predicts held-out points better, fitted to all, and the held-out errors of both."""
    kept, held = _split(points)
    laws = {"linear": fit_linear, "table": fit_table}
    errors = {name: relative_errors(law(kept), held) for name, law in laws.items()}
    best = min(errors, key=lambda name: errors[name]["median"] + errors[name]["p95"])
    return laws[best](points), errors


def fit_live(
    forward: FittedCost, steps: Iterable[tuple[StepFeatures, int]], single: Sequence[MeasuredPoint] = ()
) -> tuple[FittedCost, tuple[MeasuredPoint, ...], dict[str, dict[str, float]]]:
    """The cost of steps in a live server, from the law of single steps and a recording: (law, points, errors).

    First the single steps are scaled and a constant, a part per sequence and one per prompt step are added; then a
    table is fitted to the recorded steps with that as its belief. The one that predicts held-out points better wins.
    single: the points of single steps. A live server's chunks are short; longer ones stand for themselves.
    """
    points = gather(steps)
    firm = [point for point in points if point.repeats >= FIRM]
    kept, held = _split(firm or points)
    kept += [point for point in points if firm and point.repeats < FIRM]
    longest = max((point.features.prefill_tokens for point in points), default=0)
    beyond = [point for point in single if point.features.prefill_tokens > longest]
    laws = {"scaled": fit_scaled, "live table": fit_live_table}
    errors = {name: relative_errors(law(forward, kept + beyond), held) for name, law in laws.items()}
    best = min(errors, key=lambda name: errors[name]["median"])
    return laws[best](forward, points + beyond), tuple(points), errors


def fit_scaled(forward: FittedCost, points: Sequence[MeasuredPoint]) -> FittedCost:
    """scale * decode part + scale * prompt part of ``forward``, + a constant + a part per decode sequence + a part per
    step with prompt tokens. Two scales, because the live steps of prompts are short chunks and those of decodes are
    all that there are: one for both would make long prompts as much faster as the decodes happened to be."""
    rows = []
    for features in (point.features for point in points):
        decode = forward.features_ns(replace(features, prefill_tokens=0, prefill_attention=0))
        prompt = forward.features_ns(features) - decode
        rows.append((float(decode), float(prompt), 1.0, float(features.decode_seqs), float(prompt > 0)))
    decodes, prompts, base, per_seq, per_prompt = _solve(rows, points, [1.0, 1.0, 0.0, 0.0, 0.0], 1e-6)
    seqs = zip(forward.seq_knots, forward.seq_ns, strict=True)
    return FittedCost(
        forward.seq_knots,
        tuple(decodes * value + base + per_seq * knot for knot, value in seqs),
        tuple(decodes * value for value in forward.context_ns),
        forward.token_knots,
        tuple(prompts * value + per_prompt for value in forward.token_ns),
        prompts * forward.pair_ns,
        "scaled",
    )


def fit_live_table(forward: FittedCost, points: Sequence[MeasuredPoint]) -> FittedCost:
    """A table on the knots of ``forward``, fitted to the points and drawn to ``fit_scaled`` where they are few."""
    knots = (forward.seq_knots, forward.token_knots)
    return replace(fit_table(points, fit_scaled(forward, points), knots, LIVE_BELIEF), name="live table")


def gather(steps: Iterable[tuple[StepFeatures, int]]) -> list[MeasuredPoint]:
    """Recorded steps of about equal features as one point each: the mean of both, without the steps that took more
    than OUTLIER times the median (another program had the machine). The mean, because latencies are sums of steps."""
    cells: dict[tuple[int, int, int], list[tuple[StepFeatures, int]]] = {}
    for features, duration_ns in steps:
        context = features.decode_context.bit_length() if features.decode_seqs else 0
        cells.setdefault((features.decode_seqs, features.prefill_tokens, context), []).append((features, duration_ns))
    points = []
    for _, cell in sorted(cells.items()):
        limit = OUTLIER * sorted(ns for _, ns in cell)[len(cell) // 2]
        sound = [(features, ns) for features, ns in cell if ns <= limit]
        count = len(sound)
        mean = StepFeatures(
            sound[0][0].prefill_tokens,
            sum(features.prefill_attention for features, _ in sound) // count,
            sound[0][0].decode_seqs,
            sum(features.decode_context for features, _ in sound) // count,
        )
        points.append(MeasuredPoint(mean, sum(ns for _, ns in sound) // count, count))
    return points


def fit_front_end(samples: Iterable[tuple[int, int]]) -> FrontEnd:
    """Fit (prompt tokens, nanoseconds) of single requests: a line through the medians of each length."""
    by_length: dict[int, list[int]] = {}
    for prompt_tokens, delay_ns in samples:
        by_length.setdefault(prompt_tokens, []).append(max(1, delay_ns))
    medians = [(length, sorted(delays)[len(delays) // 2]) for length, delays in sorted(by_length.items())]
    points = [MeasuredPoint(StepFeatures(), delay_ns) for _, delay_ns in medians]
    request_ns, token_ns = _solve([(1.0, float(length)) for length, _ in medians], points, [0.0, 0.0], 1e-9)
    return FrontEnd(request_ns, token_ns)


def relative_errors(cost: FittedCost, points: Sequence[MeasuredPoint]) -> dict[str, float]:
    """Median and 95th percentile of |predicted - measured| / measured."""
    errors = sorted(abs(cost.features_ns(point.features) - point.duration_ns) / point.duration_ns for point in points)
    if not errors:
        return {"median": 0.0, "p95": 0.0}
    return {"median": errors[len(errors) // 2], "p95": errors[min(len(errors) - 1, int(0.95 * len(errors)))]}


def _split(points: Sequence[MeasuredPoint]) -> tuple[list[MeasuredPoint], list[MeasuredPoint]]:
    """(points to fit, points to judge by): one in HELD_OUT of them is judged by."""
    ordered = sorted(points, key=lambda point: (point.features.prefill_tokens, point.features.decode_seqs))
    kept = [point for index, point in enumerate(ordered) if index % HELD_OUT != HELD_OUT // 2]
    return kept, [point for index, point in enumerate(ordered) if index % HELD_OUT == HELD_OUT // 2]


def _knots(values: Iterable[int], first: int, most: int = 12) -> list[int]:
    """The distinct values, thinned out evenly, from ``first`` on; two at least."""
    found = sorted({first, *values})
    if len(found) > most:
        found = [found[round(index * (len(found) - 1) / (most - 1))] for index in range(most)]
    return found if len(found) > 1 else [first, first + 1]


def _shares(knots: Sequence[int], at: int) -> list[float]:
    """How much each knot's value counts at a place: ``interpolate`` as a row of weights."""
    shares = [0.0] * len(knots)
    index = min(max(bisect_right(knots, at), 1), len(knots) - 1)
    low, high = knots[index - 1], knots[index]
    shares[index - 1], shares[index] = (high - at) / (high - low), (at - low) / (high - low)
    return shares


def _solve(
    rows: Sequence[Sequence[float]], points: Sequence[MeasuredPoint], belief: Sequence[float], weight: float
) -> list[float]:
    """Coefficients >= 0 with the least squared relative error, each drawn to its ``belief`` as by ``weight`` measured
    steps in which it has its largest share."""
    size = len(belief)
    weights = [min(point.repeats, MOST_REPEATS) ** 0.5 for point in points]
    scaled = [
        [factor * value / point.duration_ns for value in row]
        for row, point, factor in zip(rows, points, weights, strict=True)
    ]
    scale = [sum(row[i] * row[i] for row in scaled) ** 0.5 or 1.0 for i in range(size)]
    unit = [[value / scale[i] for i, value in enumerate(row)] for row in scaled]
    matrix = [[sum(row[i] * row[j] for row in unit) for j in range(size)] for i in range(size)]
    target = [sum(row[i] * factor for row, factor in zip(unit, weights, strict=True)) for i in range(size)]
    for i in range(size):
        largest = max(row[i] / point.duration_ns for row, point in zip(rows, points, strict=True))
        drawn = weight * (largest / scale[i]) ** 2 or 1.0  # what no point says stays as believed
        matrix[i][i] += drawn
        target[i] += drawn * belief[i] * scale[i]
    solution = nonnegative_least_squares(matrix, target)
    return [value / scale[i] for i, value in enumerate(solution)]
