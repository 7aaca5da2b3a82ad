"""The figures of measurements as tables of words: what the terminal and the page both show.

Owns rows and their order. Must never compute a figure of its own (summary.py) and must never know how a table is drawn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diptych.bench.goodput import Found, GoodputSearch
from diptych.bench.session import Probe
from diptych.bench.stalls import Stall
from diptych.simulation.report.text import Table, milliseconds, number, percent

LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E", "normalized_ms": "E2E per token"}
STATISTICS = ("p50", "p90", "p95", "p99", "max", "mean")


def latency_table(summary: Mapping[str, Any], title: str = "Latency, ms") -> Table:
    """One row per latency."""
    rows = [(name, *(milliseconds(summary[key][one]) for one in STATISTICS)) for key, name in LATENCIES.items()]
    return Table(title, ("", *STATISTICS), tuple(rows))


def class_table(classes: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per class of requests."""
    shown = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p99"), ("e2e_ms", "p99"))
    rows = [
        (
            name or "(none)",
            f"{one['num_requests']:,}",
            *(milliseconds(one[key][which]) for key, which in shown),
            percent(one["attainment"]),
        )
        for name, one in classes.items()
    ]
    columns = ("class", "requests", "TTFT p50", "TTFT p99", "TPOT p99", "E2E p99", "attainment")
    return Table("By class, ms", columns, tuple(rows))


def service_table(summary: Mapping[str, Any]) -> Table:
    """What the server gave, with 95 % intervals where there are any."""
    lost = {name: summary[f"num_{name}"] for name in ("failed", "aborted", "unfinished") if summary[f"num_{name}"]}
    note = f" ({', '.join(f'{count:,} {name}' for name, count in lost.items())})" if lost else ""
    rows = [
        ("requests", f"{summary['num_requests']:,}{note}", ""),
        ("time", f"{number(summary['duration_s'])} s", ""),
        ("sent", f"{number(summary['sent_rps'], 2)} requests/s", ""),
        ("throughput", f"{number(summary['throughput_rps'], 2)} requests/s", _spread(summary, "throughput")),
        ("output", f"{number(summary['output_tokens_per_s'], 0)} tokens/s", ""),
        ("prompt + output", f"{number(summary['total_tokens_per_s'], 0)} tokens/s", ""),
    ]
    if summary["attainment"] is not None:
        low, high = summary["attainment_interval"]
        rows.insert(0, ("goodput", f"{number(summary['goodput_rps'], 2)} requests/s", _spread(summary, "goodput")))
        rows.insert(0, ("attainment", percent(summary["attainment"]), f"{percent(low)} to {percent(high)}"))
    if summary["cached_token_share"] is not None:
        rows.append(("prompt tokens found in the cache", percent(summary["cached_token_share"]), ""))
    if summary["tokens_per_event"] and abs(summary["tokens_per_event"] - 1) > 0.005:
        rows.append(("tokens per event of a stream", number(summary["tokens_per_event"], 2), ""))
    return Table("Service", ("", "value", "95 % interval"), tuple(rows))


def client_table(summary: Mapping[str, Any]) -> Table:
    """Whether the client was in the way."""
    client = summary["client"]
    cost = client["cpu_us_per_token"]
    rows = (
        ("CPU of one core", percent(client["cpu_share"])),
        ("CPU per received token", "-" if cost is None else f"{number(cost)} us"),
        ("event loop's lag, p99", f"{milliseconds(client['lag_ms']['p99'])} ms"),
        ("sent late, p99", f"{milliseconds(client['late_ms']['p99'])} ms"),
    )
    return Table("Client", ("", "value"), rows)


def stall_table(stalls: Sequence[Stall]) -> Table:
    """The longest gaps of streams."""
    rows = [
        (
            f"{one.gap_ms:,.1f}",
            f"{one.at_s:,.2f}",
            str(one.number),
            f"{one.token:,}",
            str(one.decoding),
            str(len(one.prefilling)),
            f"{sum(one.prefilling.values()):,}",
        )
        for one in stalls
    ]
    columns = ("ms", "at s", "request", "after token", "streams", "prompts waiting", "their tokens")
    return Table("Longest gaps of streams, and what else was running", columns, tuple(rows))


def probe_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """One row per run of a series or search."""
    rows = [
        (
            number(point["rate"], 3),
            f"{point['judged']:,}",
            ("<= " if point["summary"]["ended"] == "given up" else "") + percent(point["attainment"]),
            number(point["summary"]["goodput_rps"], 2),
            number(point["summary"]["output_tokens_per_s"], 0),
            *(milliseconds(point["summary"][key]["p99"]) for key in ("ttft_ms", "tpot_ms")),
        )
        for point in points
    ]
    columns = ("requests/s", "requests", "attainment", "goodput", "tokens/s", "TTFT p99", "TPOT p99")
    return Table("Runs, ms", columns, tuple(rows))


def probe_line(probe: Probe, search: GoodputSearch | None = None) -> str:
    """One run of a series or search, as it ends."""
    given_up = probe.result.ended == "given up"
    share = probe.met / probe.judged if probe.judged else None
    line = f"{number(probe.rate, 3)} requests/s: {'at most ' if given_up else ''}{percent(share)} in time"
    line += f" ({probe.judged:,} requests{', cut short' if given_up else ''})"
    if search is not None and probe.known is not None:
        interval = search.interval(probe.known)
        runs = f", {probe.known.runs} runs" if probe.known.runs > 1 else ""
        line += f", {percent(interval.low)} to {percent(interval.high)}{runs}: {search.verdict(probe.known)}"
    return line


def goodput_sentence(found: Found, share: float) -> str:
    """The answer of a search."""
    if found.rate is None:
        return f"No rate was found at which {percent(share)} of the requests met their objectives."
    ends = [number(end, 3) if end is not None else "?" for end in (found.low, found.high)]
    tail = "" if found.is_bracketed else " No rate was too high: this is a lower bound."
    return (
        f"Goodput: {number(found.estimate, 3)} requests/s with {percent(share)} within their objectives (highest rate "
        f"that held: {number(found.rate, 3)}; surely between {ends[0]} and {ends[1]}; {found.num_probes} runs).{tail}"
    )


def _spread(summary: Mapping[str, Any], name: str) -> str:
    interval = summary[f"{name}_interval"]
    return "" if interval is None else f"{number(interval[0], 2)} to {number(interval[1], 2)}"
