"""Which charts a page of measurements has: distributions, what happened over time, and curves over the rate.

Owns captions and the choice of scales; simulation/report/plots.py draws.
"""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from diptych.bench.records import RequestRecord
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.simulation.report.plots import (
    Line,
    Rule,
    Scale,
    legend_swatch,
    line_chart,
    linear_scale,
    log_scale,
)
from diptych.simulation.report.series import cumulative
from diptych.simulation.report.text import milliseconds, percent
from diptych.simulation.results import percentile

SHARES = Scale(0.0, 1.0, "", as_percent=True, ticks=(0.0, 0.25, 0.5, 0.75, 0.9, 1.0))
NUM_BINS = 80


def latency_figures(records: Sequence[RequestRecord], slo_ms: Mapping[str, float]) -> list[str]:
    """Cumulative distributions per request and per token. slo_ms: ttft and tpot, where there are any."""
    done = [one for one in records if one.is_completed]
    waits = [
        Line("TTFT", cumulative([ttft / NS_PER_MS for one in done if (ttft := one.ttft_ns) is not None]), "s-prefill"),
        Line("E2E", cumulative([one.e2e_ns / NS_PER_MS for one in done]), "s-whole"),
    ]
    paces = [
        Line("TPOT", cumulative([tpot / NS_PER_MS for one in done if (tpot := one.tpot_ns) is not None]), "s-decode"),
        Line("ITL", cumulative([gap / NS_PER_MS for one in done for gap in one.gaps_ns()]), "s-mixed"),
    ]
    return [
        _distribution(
            "Time to first token, and to the last",
            "Share of requests that had their first token (TTFT) and their whole answer (E2E) within a time, counted "
            "from when they should have been sent.",
            waits,
            [Rule(slo_ms["ttft"], f"TTFT objective {slo_ms['ttft']:g} ms", "s-prefill")] if "ttft" in slo_ms else [],
        ),
        _distribution(
            "Pace of the answer",
            "Share of requests by their mean time per token (TPOT), and of all gaps between events of a stream (ITL).",
            paces,
            [Rule(slo_ms["tpot"], f"TPOT objective {slo_ms['tpot']:g} ms", "s-decode")] if "tpot" in slo_ms else [],
        ),
    ]


def time_figures(records: Sequence[RequestRecord], duration_ns: int) -> list[str]:
    """Gaps and waits by the time at which they happened, and how many requests were there."""
    x = Scale(0.0, max(duration_ns / NS_PER_S, 1e-9), "seconds")
    gaps: list[tuple[int, int]] = []
    for one in records:
        gaps += [(later, later - earlier) for earlier, later in pairwise(one.stamps)]
    waits = [(one.intended_ns, ttft) for one in records if (ttft := one.ttft_ns) is not None]
    return [
        _over_time("Gaps between tokens", "By the time at which a gap ended.", gaps, duration_ns, x),
        _over_time("Time to first token", "By the time at which the request should have left.", waits, duration_ns, x),
        _in_system(records, duration_ns, x),
    ]


def rate_figures(points: Sequence[Mapping[str, Any]], target: float | None, found: float | None) -> list[str]:
    """Attainment and tails over the rate; target: the share that was asked for, found: the answer of a search."""
    ordered = sorted(points, key=lambda point: float(point["rate"]))
    rates = [point["rate"] for point in ordered]
    x = log_scale(rates, "requests per second, log scale")
    rules = [Rule(found, f"goodput {found:.3g}/s", "s-green")] if found else []
    judged = [point for point in ordered if point["attainment"] is not None]
    figures = []
    if judged:
        spots = [(point["rate"], point["attainment"]) for point in judged]
        bounds = [[(point["rate"], point["attainment_interval"][end]) for point in judged] for end in (0, 1)]
        lines = [
            Line("attainment", spots, "s-decode-solid", markers=True),
            Line("95 % interval", bounds[0], "s-mixed"),
            Line("", bounds[1], "s-mixed"),
        ]
        if target is not None:
            lines.append(Line(f"asked for: {percent(target)}", [(x.low, target), (x.high, target)], "s-green"))
        facts = "; ".join(f"{rate:.3g}/s: {percent(share)}" for rate, share in spots)
        chart = line_chart("Attainment over the rate", facts, lines, x, SHARES, rules)
        legend = [(line.name, line.style) for line in lines if line.name]
        figures.append(_figure("Attainment", "Share of requests that met their objectives.", chart, legend))
    for key, name, style in (("ttft_ms", "TTFT", "s-prefill"), ("tpot_ms", "TPOT", "s-decode")):
        lines = [
            Line(
                which,
                [(point["rate"], max(1e-3, point["summary"][key][which])) for point in ordered],
                one,
                markers=True,
            )
            for which, one in (("p50", style), ("p99", "s-mixed"))
        ]
        y = log_scale([height for line in lines for _, height in line.points], "milliseconds, log scale")
        facts = "; ".join(f"{rate:.3g}/s: {milliseconds(height)} ms" for rate, height in lines[1].points)
        chart = line_chart(f"{name} over the rate", f"p99: {facts}", lines, x, y, rules)
        figures.append(_figure(name, "Median and 99th percentile.", chart, [(one.name, one.style) for one in lines]))
    return figures


def _distribution(title: str, caption: str, lines: Sequence[Line], rules: Sequence[Rule]) -> str:
    values = [value for line in lines for value, _ in line.points] + [rule.x for rule in rules]
    x = log_scale(values, "milliseconds, log scale")
    shown = [Line(one.name, [(max(value, x.low), share) for value, share in one.points], one.style) for one in lines]
    facts = "; ".join(f"{line.name}: half within {milliseconds(_middle(line))} ms" for line in lines if line.points)
    chart = line_chart(title, facts, shown, x, SHARES, rules)
    return _figure(title, caption, chart, [(line.name, line.style) for line in lines])


def _middle(line: Line) -> float:
    return next((value for value, share in line.points if share >= 0.5), 0.0)


def _over_time(title: str, caption: str, values: Sequence[tuple[int, int]], duration_ns: int, x: Scale) -> str:
    width = max(1, -(-duration_ns // NUM_BINS))
    bins: dict[int, list[int]] = {}
    for at, value in values:
        bins.setdefault(at // width, []).append(value)
    middles, longest = [], []
    for index, found in sorted(bins.items()):
        at_s = (index + 0.5) * width / NS_PER_S
        middles.append((at_s, percentile(sorted(found), 50) / NS_PER_MS))
        longest.append((at_s, max(found) / NS_PER_MS))
    lines = [Line("median", middles, "s-prefill"), Line("longest", longest, "s-mixed")]
    most = max((height for _, height in longest), default=0.0)
    chart = line_chart(
        f"{title} over time", f"The longest is {milliseconds(most)} ms.", lines, x, linear_scale([most], "milliseconds")
    )
    return _figure(title, f"{caption} Median and longest of each {NUM_BINS}th of the run.", chart, _legend(lines))


def _in_system(records: Sequence[RequestRecord], duration_ns: int, x: Scale) -> str:
    changes = sorted([(one.intended_ns, 1) for one in records] + [(one.end_ns, -1) for one in records])
    points, count, index = [], 0, 0
    for step in range(241):
        now = duration_ns * step // 240
        while index < len(changes) and changes[index][0] <= now:
            count += changes[index][1]
            index += 1
        points.append((now / NS_PER_S, count))
    most = max(count for _, count in points)
    line = Line("in the system", points, "s-whole-solid")
    chart = line_chart("Requests in the system over time", f"At most {most:,}.", [line], x, linear_scale([most], ""))
    return _figure("Requests in the system", "Due and not yet answered.", chart, [])


def _legend(lines: Sequence[Line]) -> list[tuple[str, str]]:
    return [(line.name, line.style) for line in lines]


def _figure(title: str, caption: str, chart: str, legend: Sequence[tuple[str, str]]) -> str:
    entries = "".join(f"<li>{legend_swatch(style)}{escape(name)}</li>" for name, style in legend)
    listed = f'<ul class="legend">{entries}</ul>' if entries else ""
    return f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(caption)}</p></figcaption>{listed}{chart}</figure>"
