"""Charts that the pages of measurements and of simulations have in common; plots.py draws them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from diptych.control.slo import NS_PER_S
from diptych.report.plots import SHARES, Line, LineChart, Rule, Scale, linear_scale, log_scale
from diptych.report.statistics import median_and_longest
from diptych.report.text import milliseconds


def distribution_chart(title: str, caption: str, lines: Sequence[Line], rules: Sequence[Rule] = ()) -> LineChart:
    """Cumulative distributions of milliseconds, as ``report.statistics.cumulative`` gives them."""
    values = [value for line in lines for value, _ in line.points] + [rule.x for rule in rules]
    x = log_scale(values, "milliseconds, log scale")
    facts = "; ".join(
        f"{line.name} p50 {milliseconds(_reached(line, 0.5))} ms, p99 {milliseconds(_reached(line, 0.99))} ms"
        for line in lines
        if line.points
    )
    shown = [replace(line, points=[(max(value, x.low), share) for value, share in line.points]) for line in lines]
    return LineChart(title, caption, facts, shown, x, SHARES, rules)


def waits_chart(
    title: str, caption: str, values: Iterable[tuple[int, int]], duration_ns: int, num_bins: int
) -> LineChart:
    """The median and the longest of (when, how long), in nanoseconds, in each bin of a run."""
    middle, longest = median_and_longest(values, duration_ns, num_bins)
    most = max((height for _, height in longest), default=0.0)
    return LineChart(
        title,
        caption,
        f"The longest is {milliseconds(most)} ms.",
        [Line("median", middle, "s-prefill"), Line("longest", longest, "s-mixed")],
        time_scale(duration_ns),
        linear_scale([most], "milliseconds"),
    )


def in_system_chart(caption: str, points: Sequence[tuple[float, int]], duration_ns: int) -> LineChart:
    """How many requests were there, as ``report.statistics.count_over_time`` gives it."""
    most = max(count for _, count in points)
    return LineChart(
        "Requests in the system",
        caption,
        f"At most {most:,}.",
        [Line("requests", points, "s-whole-solid")],
        time_scale(duration_ns),
        linear_scale([most], ""),
    )


def time_scale(duration_ns: int) -> Scale:
    """The time of a run."""
    return Scale(0.0, max(duration_ns / NS_PER_S, 1e-9), "seconds")


def _reached(line: Line, wanted: float) -> float:
    return next((value for value, share in line.points if share >= wanted), 0.0)
