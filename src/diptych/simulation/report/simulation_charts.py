"""Which charts a report has: latency distributions, what happened over time, and curves over a sweep.

Owns captions and the choice of scales; report/plots.py draws.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diptych.control.slo import NS_PER_MS
from diptych.report.charts import distribution_chart, in_system_chart, time_scale, waits_chart
from diptych.report.plots import (
    SHARES,
    Chart,
    Layer,
    Line,
    LineChart,
    Rule,
    Scale,
    StackedChart,
    linear_scale,
)
from diptych.report.statistics import cumulative, weighted_cumulative
from diptych.report.text import number, percent
from diptych.simulation.report.series import LoggedEvent, in_system, phase_series
from diptych.simulation.results import SimulationResult

STYLES = ("s-prefill", "s-decode", "s-mixed", "s-target", "s-whole", "s-down")


def latency_charts(result: SimulationResult, slo_ms: Mapping[str, float]) -> list[Chart]:
    """Two charts of cumulative distributions: per token, and per request."""
    table = result.requests
    done = table.completed_rows()
    ttft = [table.ttft_ns(row) / NS_PER_MS for row in done]
    tpot = [value / NS_PER_MS for row in done if (value := table.tpot_ns(row)) is not None]
    e2e = [table.e2e_ns(row) / NS_PER_MS for row in done]
    waits = [Line("TTFT", cumulative(ttft), "s-prefill"), Line("E2E", cumulative(e2e), "s-whole")]
    paces = [
        Line("TPOT", cumulative(tpot), "s-decode"),
        Line("ITL", weighted_cumulative(result.gaps.weights, 1e-3), "s-mixed"),
    ]
    return [
        distribution_chart(
            "Time to first token, and to the last",
            "Share of requests that had their first token (TTFT) and their whole answer (E2E) within a time.",
            waits,
            [Rule(slo_ms["ttft"], f"TTFT objective {slo_ms['ttft']:g} ms", "s-prefill")] if "ttft" in slo_ms else [],
        ),
        distribution_chart(
            "Pace of the answer",
            "Share of requests by their mean time per token (TPOT), and of all tokens by the gap before them (ITL).",
            paces,
            [Rule(slo_ms["tpot"], f"TPOT objective {slo_ms['tpot']:g} ms", "s-decode")] if "tpot" in slo_ms else [],
        ),
    ]


def time_charts(result: SimulationResult, events: Sequence[LoggedEvent], kv_capacity_tokens: int) -> list[Chart]:
    """Requests in the system; with an event log also phases and the context held."""
    table, duration_ns = result.requests, result.duration_ns
    waits = ((table.arrival_ns[row], table.ttft_ns(row)) for row in table.completed_rows())
    charts: list[Chart] = [
        in_system_chart(
            "Arrived and not yet ended: waiting, in prefill or in decode.", in_system(table, duration_ns), duration_ns
        ),
        waits_chart(
            "Time to first token",
            "By time of arrival: the median and the longest wait in each sixtieth of the run.",
            waits,
            duration_ns,
            num_bins=60,
        ),
    ]
    if not events:
        return charts
    series = phase_series(events, duration_ns, len(result.workers))
    layers = [
        Layer("prefill", series.prefill, "s-prefill"),
        Layer("mixed", series.mixed, "s-mixed"),
        Layer("decode", series.decode, "s-decode"),
    ]
    spent = ", ".join(f"{layer.name} {percent(sum(layer.values) / len(layer.values))}" for layer in layers)
    phases = StackedChart(
        "Phases",
        "Share of the fleet's time in steps of prompts alone, of both, of decodes alone; the rest is idle or down.",
        f"On average {spent}.",
        layers,
        series.edges_s,
        "seconds",
    )
    return [*charts, phases, _held(series.edges_s, series.context_tokens, kv_capacity_tokens, time_scale(duration_ns))]


def sweep_charts(names: Sequence[str], points: Sequence[Mapping[str, Any]], asked: str | None = None) -> list[Chart]:
    """Curves over the first swept value, one per value of the second. asked: what was searched at each point."""
    if asked is not None:
        chart = {
            "goodput": ("Goodput", "Highest rate that keeps the objectives, requests per second.", "estimate"),
            "devices": ("Fewest devices", "Devices of the smallest fleet that keeps the objectives.", "devices"),
        }[asked]
        caption = "$ per million output tokens, at the answer."
        return [
            _swept(chart[0], chart[1], names, points, (asked, chart[2])),
            _swept("Price", caption, names, points, ("economy", "usd_per_million_output_tokens")),
        ]
    if any(point["summary"]["attainment"] is not None for point in points):
        met = "that met their objectives."
        charts = [
            _swept("Attainment", f"Share of requests {met}", names, points, ("summary", "attainment"), SHARES),
            _swept("Goodput", f"Requests per second {met}", names, points, ("summary", "goodput_rps")),
        ]
    else:
        charts = [_swept("Throughput", "Requests answered per second.", names, points, ("summary", "throughput_rps"))]
    return [
        *charts,
        _swept("TTFT p99, ms", "One in a hundred waits longer.", names, points, ("summary", "ttft_ms", "p99")),
        _swept("TPOT p99, ms", "One in a hundred is slower.", names, points, ("summary", "tpot_ms", "p99")),
    ]


def _held(edges: Sequence[float], tokens: Sequence[float], capacity: int, x: Scale) -> LineChart:
    most = max(tokens)
    note = f" The cache holds {capacity:,} tokens." if capacity else ""
    return LineChart(
        "KV use",
        f"Tokens that running requests attend to; a shared beginning counts for each of them.{note}",
        f"At most {number(most, 0)} tokens on average over a bin.",
        [Line("tokens", list(zip(edges, [*tokens, tokens[-1]], strict=True)), "s-decode-solid")],
        x,
        linear_scale([most], "tokens"),
    )


def _swept(
    title: str,
    caption: str,
    names: Sequence[str],
    points: Sequence[Mapping[str, Any]],
    key: tuple[str, ...],
    y: Scale | None = None,
) -> LineChart:
    x = _swept_scale(names[0], [point["values"][names[0]] for point in points])
    groups: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        value: Any = point
        for part in key:
            value = value[part]
        if value is None:
            continue
        others = ", ".join(f"{name} {point['values'][name]}" for name in names[1:])
        where = point["values"][names[0]]
        at = float(x.words.index(str(where))) if x.words else float(where)
        groups.setdefault(others or title, []).append((at, float(value)))
    lines = [
        Line(name, sorted(spots), style, markers=True)
        for (name, spots), style in zip(groups.items(), STYLES, strict=False)
    ]
    if len(groups) > len(lines):
        caption += f" The first {len(lines)} of {len(groups)} curves are drawn; all are in the table."
    y = y or linear_scale([height for line in lines for _, height in line.points], "")
    facts = "; ".join(f"{names[0]} {x.write(px)}: {py:.3g}" for px, py in (lines[0].points if lines else ()))
    return LineChart(title, caption, facts, lines, x, y)


def _swept_scale(name: str, values: Sequence[Any]) -> Scale:
    """Numbers by size; anything else side by side in the order of the sweep."""
    if all(isinstance(value, int | float) for value in values):
        return linear_scale(values, name, from_zero=min(values) < 0.35 * max(values))
    words = tuple(dict.fromkeys(map(str, values)))
    return Scale(-0.5, len(words) - 0.5, name, ticks=tuple(map(float, range(len(words)))), words=words)
