"""Which charts a page of measurements has: distributions, what happened over time, and curves over the rate.

Owns captions and the choice of scales; report/plots.py draws.
"""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from diptych.bench.option_grammar import time as in_words
from diptych.bench.request_records import ClientRecord
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.report.plots import (
    Line,
    Rule,
    Scale,
    legend_swatch,
    line_chart,
    linear_scale,
    log_scale,
)
from diptych.report.text import milliseconds, percent
from diptych.simulation.report.series import cumulative
from diptych.simulation.results import percentile

SHARES = Scale(0.0, 1.0, "", as_percent=True, ticks=(0.0, 0.25, 0.5, 0.75, 0.9, 1.0))
NUM_BINS = 80


def latency_figures(records: Sequence[ClientRecord], slo_ms: Mapping[str, float]) -> list[str]:
    """Cumulative distributions per request and per token. slo_ms: objectives by name, where there are any."""
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
            "from when they should have been sent. Upright lines: objectives.",
            waits,
            _rules(slo_ms, {"ttft": "s-prefill", "e2e": "s-whole"}),
        ),
        _distribution(
            "Pace of the answer",
            "Share of requests by their mean time per token (TPOT), and of all gaps between events of a stream (ITL).",
            paces,
            _rules(slo_ms, {"tpot": "s-decode", "itl": "s-mixed"}),
        ),
    ]


def time_figures(records: Sequence[ClientRecord], duration_ns: int) -> list[str]:
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
        _output(records, duration_ns, x),
    ]


def gap_figures(found: Mapping[str, Any]) -> list[str]:
    """Gaps of streams without and with a long prompt beside them. found: see interference.py."""
    long_tokens, gaps_ms = found["config"]["long_tokens"], found["gaps_ms"]
    names = {"before": "before", "control": "as long, without that prompt", "during": f"beside {long_tokens:,} tokens"}
    styles = dict(zip(names, ("s-decode", "s-whole", "s-prefill"), strict=True))
    lines = [Line(name, cumulative(gaps_ms[key]), styles[key]) for key, name in names.items()]
    return [
        _distribution(
            "Gaps of the streams",
            "Share of the gaps between tokens that were at most so long: before the long prompt, in as long a time "
            "without it, and while it was prefilled.",
            lines,
            [],
        ),
        _around(found["around"], long_tokens),
    ]


def _around(around: Mapping[str, Any], long_tokens: int) -> str:
    """Every gap of the streams by when it ended, before and after the long prompt was sent."""
    spots = sorted((at, gap) for at, gap in around["gaps"])
    first_token = around["long_ttft_s"]
    x = Scale(min((at for at, _ in spots), default=-1.0), max([1.3 * first_token, *(at for at, _ in spots)]), "seconds")
    most = max((gap for _, gap in spots), default=0.0)
    rules = [Rule(0.0, "sent", "s-prefill"), Rule(first_token, "first token", "s-prefill")]
    y = linear_scale([most], "milliseconds")
    chart = line_chart(
        "Gaps around the long prompt", f"The longest is {milliseconds(most)} ms.", [Line("gaps", spots, "s-mixed")], x,
        y, rules,
    )  # fmt: skip
    caption = f"Every gap of the streams by when it ended; 0: {long_tokens:,} tokens are sent. First repetition."
    return _figure("Gaps around the long prompt", caption, chart, [])


def rate_figures(points: Sequence[Mapping[str, Any]], target: float | None, found: float | None) -> list[str]:
    """Attainment and tails over the rate; target: the share that was asked for, found: the answer of a search."""
    ordered = sorted(points, key=lambda point: float(point["rate"]))
    rates = [point["rate"] for point in ordered]
    x = log_scale(rates, "requests per second, log scale")
    rules = [Rule(found, f"goodput {found:.3g}/s", "s-green")] if found and len(ordered) > 1 else []
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
    for key, name, style in (
        ("ttft_ms", "TTFT", "s-prefill"),
        ("tpot_ms", "TPOT", "s-decode"),
        ("itl_ms", "ITL", "s-whole"),
    ):
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


def _rules(slo_ms: Mapping[str, float], styles: Mapping[str, str]) -> list[Rule]:
    """A mark per objective; those of nearly the same place share one."""
    rules: list[Rule] = []
    for name, style in styles.items():
        if name not in slo_ms:
            continue
        label = f"{name.upper()} <= {in_words(slo_ms[name])}"
        if rules and max(rules[0].x, slo_ms[name]) < 1.1 * min(rules[0].x, slo_ms[name]):
            rules[0] = Rule(rules[0].x, f"{rules[0].label}, {label}", rules[0].style)
        else:
            rules.append(Rule(slo_ms[name], label, style))
    return rules


def _distribution(title: str, caption: str, lines: Sequence[Line], rules: Sequence[Rule]) -> str:
    values = [value for line in lines for value, _ in line.points] + [4 * rule.x for rule in rules]
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


def _in_system(records: Sequence[ClientRecord], duration_ns: int, x: Scale) -> str:
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


def _output(records: Sequence[ClientRecord], duration_ns: int, x: Scale) -> str:
    width = max(1, -(-duration_ns // NUM_BINS))
    counts = [0] * NUM_BINS
    for one in records:
        sizes = one.sizes if len(one.sizes) == len(one.stamps) else None
        for place, stamp in enumerate(one.stamps):
            counts[min(NUM_BINS - 1, max(0, stamp // width))] += sizes[place] if sizes else 1
    points = [((index + 0.5) * width / NS_PER_S, count * NS_PER_S / width) for index, count in enumerate(counts)]
    most = max(height for _, height in points)
    line = Line("tokens", points, "s-decode-solid")
    chart = line_chart("Output over time", f"At most {most:,.0f} a second.", [line], x, linear_scale([most], ""))
    return _figure("Output", f"Tokens received per second, in each {NUM_BINS}th of the run.", chart, [])


def _legend(lines: Sequence[Line]) -> list[tuple[str, str]]:
    return [(line.name, line.style) for line in lines]


def _figure(title: str, caption: str, chart: str, legend: Sequence[tuple[str, str]]) -> str:
    entries = "".join(f"<li>{legend_swatch(style)}{escape(name)}</li>" for name, style in legend)
    listed = f'<ul class="legend">{entries}</ul>' if entries else ""
    return f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(caption)}</p></figcaption>{listed}{chart}</figure>"
