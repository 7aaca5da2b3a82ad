"""Which charts a page of measurements has: distributions and what happened over time.

Owns captions and the choice of scales; report/plots.py draws.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise, repeat
from typing import Any

from diptych.bench.option_grammar import time as in_words
from diptych.bench.request_records import ClientRecord
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.report import charts
from diptych.report.charts import distribution_chart, in_system_chart, time_scale, waits_chart
from diptych.report.plots import Chart, Line, LineChart, Rule, Scale, linear_scale
from diptych.report.statistics import count_over_time, cumulative
from diptych.report.text import milliseconds

NUM_BINS = 80


def latency_charts(records: Sequence[ClientRecord], slo_ms: Mapping[str, float]) -> list[Chart]:
    """Cumulative distributions per request and per token. slo_ms: objectives by name, where there are any."""
    done = [record for record in records if record.is_completed]
    ttfts = [ttft / NS_PER_MS for record in done if (ttft := record.ttft_ns) is not None]
    tpots = [tpot / NS_PER_MS for record in done if (tpot := record.tpot_ns) is not None]
    gaps = [gap / NS_PER_MS for record in done for gap in record.gaps_ns()]
    lines = {
        "TTFT": cumulative(ttfts),
        "E2E": cumulative([record.e2e_ns / NS_PER_MS for record in done]),
        "TPOT": cumulative(tpots),
        "ITL": cumulative(gaps),
    }
    captions = (
        "Share of requests that had their first token (TTFT) and their whole answer (E2E) within a time, counted "
        "from when they should have been sent. Upright lines: objectives.",
        "Share of requests by their mean time per token (TPOT), and of all gaps between events of a stream (ITL).",
    )
    waits, paces = {"ttft": "s-prefill", "e2e": "s-whole"}, {"tpot": "s-decode", "itl": "s-mixed"}
    return charts.latency_charts(captions, lines, (_rules(slo_ms, waits), _rules(slo_ms, paces)))


def time_charts(records: Sequence[ClientRecord], duration_ns: int) -> list[Chart]:
    """Gaps and waits by the time at which they happened, and how many requests were there."""
    gaps: list[tuple[int, int]] = []
    for record in records:
        gaps += [(later, later - earlier) for earlier, later in pairwise(record.stamps)]
    waits = [(record.intended_ns, ttft) for record in records if (ttft := record.ttft_ns) is not None]
    starts, ends = [record.intended_ns for record in records], [record.end_ns for record in records]
    each = f"Median and longest of each {NUM_BINS}th of the run."
    gap_caption = f"By the time at which a gap ended. {each}"
    wait_caption = f"By the time at which the request should have left. {each}"
    return [
        waits_chart("Gaps between tokens", gap_caption, gaps, duration_ns, NUM_BINS, ("s-decode-solid", "s-stall")),
        waits_chart("Time to first token", wait_caption, waits, duration_ns, NUM_BINS),
        in_system_chart("Due and not yet answered.", count_over_time(starts, ends, duration_ns), duration_ns),
        _output(records, duration_ns),
    ]


def gap_charts(found: Mapping[str, Any]) -> list[Chart]:
    """Gaps of streams without and with a long prompt beside them. found: see interference.py."""
    long_tokens, gaps_ms = found["config"]["long_tokens"], found["gaps_ms"]
    names = {"before": "before", "control": "as long, without that prompt", "during": f"beside {long_tokens:,} tokens"}
    styles = dict(zip(names, ("s-decode", "s-whole", "s-stall"), strict=True))
    return [
        distribution_chart(
            "Gaps of the streams",
            "Share of the gaps between tokens that were at most so long: before the long prompt, in as long a time "
            "without it, and while it was prefilled.",
            [Line(name, cumulative(gaps_ms[key]), styles[key]) for key, name in names.items()],
        ),
        _around(found["around"], long_tokens),
    ]


def _around(around: Mapping[str, Any], long_tokens: int) -> LineChart:
    """Every gap of the streams by when it ended, before and after the long prompt was sent."""
    spots = sorted((at, gap) for at, gap in around["gaps"])
    first_token = around["long_ttft_s"]
    x = Scale(min((at for at, _ in spots), default=-1.0), max([1.3 * first_token, *(at for at, _ in spots)]), "seconds")
    most = max((gap for _, gap in spots), default=0.0)
    return LineChart(
        "Gaps around the long prompt",
        f"Every gap of the streams by when it ended; 0: {long_tokens:,} tokens are sent. First repetition.",
        f"The longest is {milliseconds(most)} ms.",
        [Line("gaps", spots, "s-mixed", is_joined=False)],
        x,
        linear_scale([most], "milliseconds"),
        [Rule(0.0, "sent", "s-prefill"), Rule(first_token, "first token", "s-prefill")],
    )


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


def _output(records: Sequence[ClientRecord], duration_ns: int) -> LineChart:
    width = max(1, -(-duration_ns // NUM_BINS))
    counts = [0] * NUM_BINS
    for record in records:
        for stamp, size in zip(record.stamps, record.sizes or repeat(1), strict=False):
            counts[min(NUM_BINS - 1, max(0, stamp // width))] += size
    points = [((index + 0.5) * width / NS_PER_S, count * NS_PER_S / width) for index, count in enumerate(counts)]
    most = max(height for _, height in points)
    lines = [Line("tokens", points, "s-decode-solid")]
    caption, facts = f"Tokens received per second, in each {NUM_BINS}th of the run.", f"At most {most:,.0f} a second."
    return LineChart("Output", caption, facts, lines, time_scale(duration_ns), linear_scale([most], ""))
