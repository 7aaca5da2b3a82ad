"""The figures of measurements (summary.py) as tables of text, for the terminal and for the page."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from diptych.bench.health import worst_problems
from diptych.bench.objectives import NO_ANSWER
from diptych.bench.session import Probe
from diptych.bench.stalls import Stall
from diptych.report import text
from diptych.report.text import Table, milliseconds, number, percent, rate, runs_table, with_unit
from diptych.search.goodput_search import GoodputSearch

STATISTICS = ("p50", "p90", "p95", "p99", "max", "mean")


def class_table(classes: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per class of requests, with the objectives that it missed."""
    table = text.class_table(classes)
    missed = [missed_words(figures["missed"]) for figures in classes.values()]
    rows = tuple((*row, words) for row, words in zip(table.rows, missed, strict=True))
    return replace(table, columns=(*table.columns, "missed"), rows=rows)


def service_table(summary: Mapping[str, Any]) -> Table:
    """Requests and tokens per second, attainment and goodput, with 95 % intervals where there are any."""
    lost = {name: summary[f"num_{name}"] for name in ("failed", "aborted", "unfinished") if summary[f"num_{name}"]}
    note = f" ({', '.join(f'{count:,} {name}' for name, count in lost.items())})" if lost else ""
    rows = [
        ("requests", f"{summary['num_requests']:,}{note}", ""),
        ("time", f"{number(summary['duration_s'])} s", ""),
        ("sent", with_unit(summary["sent_rps"], 2, "requests/s"), ""),
        ("throughput", with_unit(summary["throughput_rps"], 2, "requests/s"), _spread(summary, "throughput")),
        ("output", with_unit(summary["output_tokens_per_s"], 0, "tokens/s"), ""),
        ("prompt + output", with_unit(summary["total_tokens_per_s"], 0, "tokens/s"), ""),
    ]
    if summary["attainment"] is not None:
        low, high = summary["attainment_interval"]
        rows.insert(0, ("goodput", with_unit(summary["goodput_rps"], 2, "requests/s"), _spread(summary, "goodput")))
        rows.insert(0, ("attainment", percent(summary["attainment"]), f"{percent(low)} to {percent(high)}"))
        rows[2:2] = [(_missed_name(name), f"{count:,} requests", "") for name, count in summary["missed"].items()]
    if summary["cached_token_share"] is not None:
        rows.append(("prompt tokens found in the cache", percent(summary["cached_token_share"]), ""))
    if (turns := summary["turns"]) is not None:
        count = turns["real"] + turns["made_up"]
        share = percent(turns["real"] / count if count else None)
        rows.append(("later turns with the server's own answer", f"{share} of {count:,} ({turns['kind']})", ""))
    if summary["tokens_per_event"] and abs(summary["tokens_per_event"] - 1) > 0.005:
        rows.append(("tokens per event of a stream", number(summary["tokens_per_event"], 2), ""))
    return Table("Service", ("", "value", "95 % interval"), tuple(rows))


def client_table(summary: Mapping[str, Any]) -> Table:
    """What the client itself took."""
    client = summary["client"]
    cost = client["cpu_us_per_token"]
    rows = (
        ("CPU of one core", percent(client["cpu_share"])),
        ("CPU per received token", "-" if cost is None else f"{number(cost)} us"),
        ("time it waited for a core", percent(client["wait_share"])),
        ("event loop's lag, p99", f"{milliseconds(client['lag_ms']['p99'])} ms"),
        ("sent late, p99", f"{milliseconds(client['late_ms']['p99'])} ms"),
    )
    return Table("Client", ("", "value"), rows)


def problems(data: Mapping[str, Any]) -> list[str]:
    """Why a measurement (measurement.py) is not reliable; empty when it is."""
    measured = [point["summary"] for point in data.get("points", ())]
    measured += [data[name] for name in ("summary", "interference") if name in data]
    return worst_problems([figures["client"]["excesses"] for figures in measured])


def verdict(data: Mapping[str, Any]) -> list[str]:
    """The measurement in a sentence; none where it is only a table of runs."""
    if "goodput" in data:
        found = data["goodput"]
        share = percent(found["config"]["attainment"])
        if found["rate"] is None:
            return [f"No rate was found at which {share} of the requests meet {_wanted(data)}."]
        most = f"{'' if found['is_bracketed'] else 'at least '}{rate(found['estimate'] or found['rate'])}"
        return [f"Goodput: {most} requests/s with {share} of them within {_wanted(data)}."]
    if "interference" in data:
        return [_interference_words(data["interference"])]
    summary = data.get("summary")
    if summary is None or not summary["num_completed"]:
        return []
    parts = [f"{summary['num_completed']:,} of {summary['num_requests']:,} requests answered"]
    for key, name in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT")):
        parts.append(f"{name} {milliseconds(summary[key]['p50'])} ms (p99 {milliseconds(summary[key]['p99'])})")
    if summary["attainment"] is not None:
        parts.append(f"{percent(summary['attainment'])} within {_wanted(data)}")
    return [f"{', '.join(parts)}."]


def _interference_words(found: Mapping[str, Any]) -> str:
    config, count = found["config"], found["repetitions"]
    before, during = (milliseconds(found[key]["p99"]) for key in ("before_ms", "during_ms"))
    times = f"{number(found['factor'], 2)} times{f' (median of {count} repetitions)' if count > 1 else ''}"
    return (
        f"The p99 gap of {config['streams']} streams is {before} ms before and {during} ms during a prompt of "
        f"{config['long_tokens']:,} tokens: {times}."
    )


def _wanted(data: Mapping[str, Any]) -> str:
    return str(data["settings"].get("slo") or "their objectives")


def failures(data: Mapping[str, Any]) -> list[str]:
    """How many requests failed, and why, the most frequent reason first."""
    summary = data.get("summary")
    if summary is None or not summary["errors"]:
        return []
    first = f"{summary['num_failed']:,} of {summary['num_requests']:,} requests failed:"
    return [first, *(f"  {count:,} x {error}" for error, count in summary["errors"].items())]


def stall_table(stalls: Sequence[Stall]) -> Table:
    """The longest gaps of streams."""
    rows = [
        (
            f"{stall.gap_ms:,.1f}",
            f"{stall.at_s:,.2f}",
            str(stall.number),
            f"{stall.token:,}",
            str(stall.decoding),
            str(len(stall.prefilling)),
            f"{sum(stall.prefilling.values()):,}",
        )
        for stall in stalls
    ]
    columns = ("ms", "at s", "request", "after token", "streams", "prompts waiting", "their tokens")
    return Table("Longest gaps of streams, and what else was running", columns, tuple(rows))


def error_table(errors: Mapping[str, int]) -> Table:
    """Errors of requests, the most frequent first."""
    return Table("Errors", ("", "requests"), tuple((error, f"{count:,}") for error, count in errors.items()))


def probe_tables(points: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Tables of a series or a search: its runs, and the objectives that were missed, if any."""
    names = list(dict.fromkeys(name for point in points for name in point["summary"]["missed"]))
    if not names:
        return [runs_table(points)]
    rows = [
        (rate(point["rate"]), *(f"{point['summary']['missed'].get(name, 0):,}" for name in names)) for point in points
    ]
    missed = Table("Objectives missed, requests", ("rate/s", *map(_objective, names)), tuple(rows))
    return [runs_table(points), missed]


def probe_line(probe: Probe, search: GoodputSearch | None = None) -> str:
    """A run of a series or search, as it ends."""
    given_up = probe.result.ended == "given up"
    line = f"{rate(probe.rate)} requests/s: {'at most ' if given_up else ''}{percent(probe.share)} in time"
    line += f" ({probe.judged:,} requests{', cut short' if given_up else ''})"
    if search is not None and probe.known is not None:
        interval = search.interval(probe.known)
        runs = f", {probe.known.runs} runs" if probe.known.runs > 1 else ""
        line += f", {percent(interval.low)} to {percent(interval.high)}{runs}: {search.verdict(probe.known)}"
    return line


def missed_words(missed: Mapping[str, int]) -> str:
    """``ITL 12, TTFT 3``: requests by the objective that they missed; empty when none did."""
    return ", ".join(f"{_objective(name)} {count:,}" for name, count in missed.items())


def _objective(name: str) -> str:
    return name if name == NO_ANSWER else name.upper()


def _missed_name(name: str) -> str:
    return name if name == NO_ANSWER else f"missed {name.upper()}"


def _spread(summary: Mapping[str, Any], name: str) -> str:
    interval = summary[f"{name}_interval"]
    return "" if interval is None else f"{number(interval[0], 2)} to {number(interval[1], 2)}"
