"""Charts that the pages of measurements and of simulations have in common; plots.py draws them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diptych.control.slo import NS_PER_S
from diptych.report.plots import SHARES, Chart, Line, LineChart, Point, Rule, Scale, linear_scale, log_scale
from diptych.report.statistics import median_and_longest, wilson
from diptych.report.text import milliseconds, percent


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


def latency_charts(
    captions: tuple[str, str], lines: Mapping[str, Sequence[Point]], rules: tuple[Sequence[Rule], Sequence[Rule]]
) -> list[Chart]:
    """The waits of requests, and the pace of their answers: a chart of TTFT and E2E, and one of TPOT and ITL. lines:
    by these names, as ``report.statistics.cumulative`` gives them."""
    titles = "Time to first token, and to the last", "Pace of the answer"
    styles = {"TTFT": "s-prefill", "E2E": "s-whole"}, {"TPOT": "s-decode", "ITL": "s-mixed"}
    return [
        distribution_chart(title, caption, [Line(name, lines[name], style) for name, style in names.items()], marks)
        for title, caption, names, marks in zip(titles, captions, styles, rules, strict=True)
    ]


def waits_chart(
    title: str,
    caption: str,
    values: Iterable[tuple[int, int]],
    duration_ns: int,
    num_bins: int,
    styles: tuple[str, str] = ("s-prefill", "s-mixed"),
) -> LineChart:
    """The median and the longest of (when, how long), in nanoseconds, in each bin of a run. styles: of the two."""
    middle, longest = median_and_longest(values, duration_ns, num_bins)
    most = max((height for _, height in longest), default=0.0)
    return LineChart(
        title,
        caption,
        f"The longest is {milliseconds(most)} ms.",
        [Line("median", middle, styles[0]), Line("longest", longest, styles[1])],
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


def rate_charts(points: Sequence[Mapping[str, Any]], target: float | None, found: float | None) -> list[Chart]:
    """Attainment and tails over the rate, of runs that a search or a series made; target: the share that was asked
    for, found: the answer of a search."""
    ordered = _by_rate(points)
    x = log_scale([point["rate"] for point in ordered], "requests per second, log scale")
    rules = [Rule(found, f"goodput {found:.3g}/s", "s-target")] if found and len(ordered) > 1 else []
    judged = [point for point in ordered if point["attainment"] is not None]
    charts: list[Chart] = [_attainment(judged, target, x, rules)] if judged else []
    for key, name, style in (
        ("ttft_ms", "TTFT", "s-prefill"),
        ("tpot_ms", "TPOT", "s-decode"),
        ("itl_ms", "ITL", "s-whole"),
    ):
        measured = [point for point in ordered if point["summary"][key]["p50"] is not None]
        if not measured:
            continue
        tails = {
            which: [(point["rate"], max(1e-3, point["summary"][key][which])) for point in measured]
            for which in ("p50", "p99")
        }
        facts = "; ".join(f"{rate:.3g}/s: {milliseconds(height)} ms" for rate, height in tails["p99"])
        lines = [Line("p50", tails["p50"], style, markers=True), Line("p99", tails["p99"], "s-mixed", markers=True)]
        y = log_scale([height for line in lines for _, height in line.points], "milliseconds, log scale")
        charts.append(LineChart(name, "Median and 99th percentile.", f"p99: {facts}", lines, x, y, rules))
    return charts


def _attainment(
    judged: Sequence[Mapping[str, Any]], target: float | None, x: Scale, rules: Sequence[Rule]
) -> LineChart:
    spots = [(point["rate"], point["attainment"]) for point in judged]
    low, high = ([(point["rate"], point["attainment_interval"][end]) for point in judged] for end in (0, 1))
    lines = [
        Line("attainment", spots, "s-decode-solid", markers=True),
        Line("95 % interval", low, "s-mixed"),
        Line("", high, "s-mixed"),
    ]
    if target is not None:
        lines.append(Line(f"asked for: {percent(target)}", [(x.low, target), (x.high, target)], "s-target"))
    facts = "; ".join(f"{rate:.3g}/s: {percent(share)}" for rate, share in spots)
    caption = "Share of requests that met their objectives."
    return LineChart("Attainment", caption, facts, lines, x, SHARES, rules)


def _by_rate(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One point for each rate, in order: the shares of all its runs together, the mean of their latencies."""
    runs: dict[float, list[Mapping[str, Any]]] = {}
    for point in sorted(points, key=lambda point: float(point["rate"])):
        runs.setdefault(point["rate"], []).append(point)
    return [same[0] if len(same) == 1 else _together(same) for same in runs.values()]


def _together(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    met, judged = sum(run["met"] for run in runs), sum(run["judged"] for run in runs)
    tails: dict[str, dict[str, float | None]] = {}
    for key in ("ttft_ms", "tpot_ms", "itl_ms"):
        measured = [run["summary"][key] for run in runs if run["summary"][key]["p50"] is not None]
        tails[key] = {
            which: sum(latency[which] for latency in measured) / len(measured) if measured else None
            for which in ("p50", "p99")
        }
    return {
        "rate": runs[0]["rate"],
        "attainment": met / judged if judged else None,
        "attainment_interval": wilson(met, judged) if judged else None,
        "summary": tails,
    }


def time_scale(duration_ns: int) -> Scale:
    """The time of a run."""
    return Scale(0.0, max(duration_ns / NS_PER_S, 1e-9), "seconds")


def _reached(line: Line, wanted: float) -> float:
    return next((value for value, share in line.points if share >= wanted), 0.0)
