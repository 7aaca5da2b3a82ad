"""Which charts a report has: latency distributions, what happened over time, and curves over a sweep.

Owns captions, legends and the choice of scales; plots.py draws.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diptych.control.slo import NS_PER_MS
from diptych.report.plots import (
    Layer,
    Line,
    Rule,
    Scale,
    legend_swatch,
    line_chart,
    linear_scale,
    log_scale,
    stacked_chart,
)
from diptych.report.statistics import cumulative, weighted_cumulative
from diptych.report.text import milliseconds, number, percent
from diptych.simulation.report.series import (
    LoggedEvent,
    in_system,
    phase_series,
    ttft_over_time,
)
from diptych.simulation.results import SimulationResult

SHARES = Scale(0.0, 1.0, "", as_percent=True, ticks=(0.0, 0.25, 0.5, 0.75, 0.9, 1.0))
STYLES = ("s-prefill", "s-decode", "s-mixed", "s-green", "s-whole", "s-down")


def latency_figures(result: SimulationResult, slo_ms: Mapping[str, float]) -> list[str]:
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
        _distribution(
            "Time to first token, and to the last",
            "Share of requests that had their first token (TTFT) and their whole answer (E2E) within a time.",
            waits,
            [Rule(slo_ms["ttft"], f"TTFT objective {slo_ms['ttft']:g} ms", "s-prefill")] if "ttft" in slo_ms else [],
        ),
        _distribution(
            "Pace of the answer",
            "Share of requests by their mean time per token (TPOT), and of all tokens by the gap before them (ITL).",
            paces,
            [Rule(slo_ms["tpot"], f"TPOT objective {slo_ms['tpot']:g} ms", "s-decode")] if "tpot" in slo_ms else [],
        ),
    ]


def time_figures(result: SimulationResult, events: Sequence[LoggedEvent], kv_capacity_tokens: int) -> list[str]:
    """Requests in the system; with an event log also phases and the context held."""
    table = result.requests
    points = in_system(table, result.duration_ns)
    most = max((count for _, count in points), default=0)
    x = Scale(0.0, max(points[-1][0], 1e-9), "seconds")
    line = Line("in the system", points, "s-whole-solid")
    figures = [
        _figure(
            "Requests in the system",
            "Arrived and not yet ended: waiting, in prefill or in decode.",
            line_chart("Requests in the system over time", f"At most {most:,}.", [line], x, linear_scale([most], "")),
        )
    ]
    figures.append(_waits(result, x))
    if not events:
        return figures
    series = phase_series(events, result.duration_ns, len(result.workers))
    layers = [
        Layer("prefill", series.prefill, "s-prefill"),
        Layer("mixed", series.mixed, "s-mixed"),
        Layer("decode", series.decode, "s-decode"),
    ]
    spent = ", ".join(f"{layer.name} {percent(sum(layer.values) / len(layer.values))}" for layer in layers)
    figures.append(
        _figure(
            "Phases",
            "Share of the fleet's time in steps of prompts alone, of both, of decodes alone; the rest is idle or down.",
            stacked_chart("Phases over time", f"On average {spent}.", series.edges_s, layers, "seconds"),
            [(layer.name, layer.style) for layer in layers],
            bands=True,
        )
    )
    figures.append(_held(series.edges_s, series.context_tokens, kv_capacity_tokens, x))
    return figures


def sweep_figures(names: Sequence[str], points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Curves over the first swept value, one per value of the second."""
    figures = []
    if any(point["summary"]["attainment"] is not None for point in points):
        figures.append(
            _swept("Attainment", "Share of requests that met their objectives.", names, points, ("attainment",), SHARES)
        )
        figures.append(
            _swept("Goodput", "Requests per second that met their objectives.", names, points, ("goodput_rps",))
        )
    else:
        figures.append(_swept("Throughput", "Requests answered per second.", names, points, ("throughput_rps",)))
    figures.append(_swept("TTFT p99, ms", "One in a hundred waits longer.", names, points, ("ttft_ms", "p99")))
    figures.append(_swept("TPOT p99, ms", "One in a hundred is slower.", names, points, ("tpot_ms", "p99")))
    return figures


def _distribution(title: str, caption: str, lines: Sequence[Line], rules: Sequence[Rule]) -> str:
    values = [value for line in lines for value, _ in line.points] + [rule.x for rule in rules]
    x = log_scale(values, "milliseconds, log scale")
    shown = [Line(one.name, [(max(value, x.low), share) for value, share in one.points], one.style) for one in lines]
    facts = "; ".join(
        f"{line.name} p50 {milliseconds(_quantile(line, 50))} ms, p99 {milliseconds(_quantile(line, 99))} ms"
        for line in lines
        if line.points
    )
    chart = line_chart(title, facts, shown, x, SHARES, rules)
    return _figure(title, caption, chart, [(line.name, line.style) for line in lines])


def _quantile(line: Line, percent_: float) -> float:
    return next((value for value, share in line.points if share >= percent_ / 100), 0.0)


def _waits(result: SimulationResult, x: Scale) -> str:
    bins = ttft_over_time(result.requests, result.duration_ns)
    lines = [
        Line("median", [(at, median) for at, median, _ in bins], "s-prefill"),
        Line("longest", [(at, longest) for at, _, longest in bins], "s-mixed"),
    ]
    most = max((longest for _, _, longest in bins), default=0.0)
    return _figure(
        "Time to first token",
        "By time of arrival: the median and the longest wait in each sixtieth of the run.",
        line_chart(
            "Time to first token over time",
            f"The longest is {milliseconds(most)} ms.",
            lines,
            x,
            linear_scale([most], "milliseconds"),
        ),
        [(line.name, line.style) for line in lines],
    )


def _held(edges: Sequence[float], tokens: Sequence[float], capacity: int, x: Scale) -> str:
    points = [(edge, value) for edge, value in zip(edges, [*tokens, tokens[-1]], strict=True)]
    most = max(tokens)
    note = f" The cache holds {capacity:,} tokens." if capacity else ""
    return _figure(
        "KV use",
        f"Tokens that running requests attend to; a shared beginning counts for each of them.{note}",
        line_chart(
            "KV use over time",
            f"At most {number(most, 0)} tokens on average over a bin.",
            [Line("tokens", points, "s-decode-solid")],
            x,
            linear_scale([most], "tokens"),
        ),
    )


def _swept(
    title: str,
    caption: str,
    names: Sequence[str],
    points: Sequence[Mapping[str, Any]],
    key: tuple[str, ...],
    y: Scale | None = None,
) -> str:
    x = _swept_scale(names[0], [point["values"][names[0]] for point in points])
    groups: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        value = point["summary"]
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
    chart = line_chart(f"{title} over {names[0]}", facts, lines, x, y)
    return _figure(title, caption, chart, [(line.name, line.style) for line in lines] if len(lines) > 1 else [])


def _swept_scale(name: str, values: Sequence[Any]) -> Scale:
    """Numbers by size; anything else side by side in the order of the sweep."""
    if all(isinstance(value, int | float) for value in values):
        return linear_scale(values, name, from_zero=min(values) < 0.35 * max(values))
    words = tuple(dict.fromkeys(map(str, values)))
    return Scale(-0.5, len(words) - 0.5, name, ticks=tuple(map(float, range(len(words)))), words=words)


def _figure(
    title: str, caption: str, chart: str, legend: Sequence[tuple[str, str]] = (), *, bands: bool = False
) -> str:
    entries = "".join(f"<li>{legend_swatch(style, band=bands)}{escape(name)}</li>" for name, style in legend)
    listed = f'<ul class="legend">{entries}</ul>' if entries else ""
    return f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(caption)}</p></figcaption>{listed}{chart}</figure>"
