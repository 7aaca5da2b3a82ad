"""The figures of a run as tables of words: what the terminal and the page both show.

Owns the choice of rows, their order and how a number is written. Must never compute a figure of its own (see
results.py and economy.py) and must never know how a table is drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LATENCIES = (
    ("ttft_ms", "TTFT"),
    ("tpot_ms", "TPOT"),
    ("itl_ms", "ITL"),
    ("e2e_ms", "E2E"),
    ("normalized_ms", "E2E per token"),
    ("queue_ms", "queue"),
    ("handoff_ms", "handoff"),
)
STATISTICS = ("p50", "p90", "p99", "mean", "max")
BY_CLASS = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p99"), ("itl_ms", "p99"), ("e2e_ms", "p99"))
PHASES = {
    "prefill": "time in prefill steps",
    "mixed": "time in mixed steps",
    "decode": "time in decode steps",
    "idle": "time idle",
    "down": "time down",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under column names; the first column is the name of the row, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number(value: float | None, digits: int = 1) -> str:
    """With thousands separated; what does not exist is a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """A share of 1 in percent, one digit."""
    return number(None if share is None else 100 * share) + ("" if share is None else " %")


def milliseconds(value: float) -> str:
    """Three digits that matter, never fewer than the whole milliseconds."""
    return number(value, 0 if value >= 100 else 1 if value >= 10 else 2)


def latency_table(summary: Mapping[str, Any], statistics: Sequence[str] = STATISTICS) -> Table:
    """One row per latency that the summary holds."""
    rows = tuple(
        (name, *(milliseconds(summary[key][statistic]) for statistic in statistics))
        for key, name in LATENCIES
        if key in summary
    )
    return Table("Latency, ms", ("", *statistics), rows)


def headline(summary: Mapping[str, Any], *latencies: str) -> list[tuple[str, str]]:
    """(name, value) of the figures to read first; of these latencies the 99th percentile."""
    names = dict(LATENCIES)
    figures = []
    if summary["attainment"] is not None:
        figures.append(("Attainment", percent(summary["attainment"])))
        figures.append(("Goodput, requests/s", number(summary["goodput_rps"], 2)))
    figures += [(f"{names[key]} p99, ms", milliseconds(summary[key]["p99"])) for key in latencies]
    return [*figures, ("Output, tokens/s", number(summary["output_tokens_per_s"], 0))]


def service_table(summary: Mapping[str, Any], economy: Mapping[str, float | None]) -> Table:
    """What the fleet gave, and what it cost."""
    failed = summary["num_failed"]
    rows = [
        ("requests", f"{summary['num_requests']:,}" + (f" ({failed:,} failed)" if failed else "")),
        ("time simulated", f"{number(summary['duration_s'])} s"),
        ("attainment", percent(summary["attainment"])),
        ("goodput", _with_unit(summary["goodput_rps"], 2, "requests/s")),
        ("throughput", _with_unit(summary["throughput_rps"], 2, "requests/s")),
        ("output", _with_unit(summary["output_tokens_per_s"], 0, "tokens/s")),
        ("prompt + output", _with_unit(summary["total_tokens_per_s"], 0, "tokens/s")),
    ]
    cost, energy = economy["usd_per_million_output_tokens"], economy["kwh_per_million_output_tokens"]
    if cost is not None:
        rows.append(("cost per million output tokens", f"${number(cost, 2)}"))
    if energy is not None:
        rows.append(("energy per million output tokens", f"{number(energy, 2)} kWh"))
    return Table("Service", ("", "value"), tuple(rows))


def resource_table(summary: Mapping[str, Any]) -> Table:
    """Where the workers' time and memory went."""
    shares = summary["utilization"]
    rows = [(PHASES[phase], percent(shares[phase])) for phase in PHASES if phase != "down" or shares[phase]]
    rows += [
        ("KV cache, mean", percent(shares["kv_mean"])),
        ("KV cache, peak", percent(shares["kv_peak"])),
        ("prompt tokens found in the cache", percent(summary["cached_token_share"])),
        ("preemptions", f"{summary['preemptions']:,}"),
    ]
    return Table("Time and memory", ("", "share"), tuple(rows))


def pool_table(pools: Sequence[Mapping[str, Any]]) -> Table:
    """One row per pool of the fleet: what it is, how busy it was, what it cost."""
    columns = ("pool", "role", "replicas", "devices", "busy", "KV mean", "KV peak", "$")
    rows = tuple(
        (
            pool["name"],
            pool["role"],
            f"{pool['replicas']:,}",
            f"{pool['num_gpus']:,} x {pool['hardware'] or 'this machine'} ({pool['parallelism']})",
            percent(pool["busy"]),
            percent(pool["utilization"]["kv_mean"]),
            percent(pool["utilization"]["kv_peak"]),
            number(pool["usd"], 2),
        )
        for pool in pools
    )
    return Table("Pools", columns, rows)


def class_table(classes: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per class of requests, with the latencies that each class has."""
    names = dict(LATENCIES)
    shown = [(key, which) for key, which in BY_CLASS if all(key in measured for measured in classes.values())]
    columns = ("class", "requests", *(f"{names[key]} {which}" for key, which in shown), "attainment")
    rows = tuple(
        (
            name or "(none)",
            f"{measured['num_requests']:,}",
            *(milliseconds(measured[key][which]) for key, which in shown),
            percent(measured["attainment"]),
        )
        for name, measured in classes.items()
    )
    return Table("By class, ms", columns, rows)


def sweep_table(names: Sequence[str], points: Sequence[Mapping[str, Any]]) -> Table:
    """One row per point of a sweep: the swept values, then what came of them."""
    columns = ("attainment", "goodput", "requests/s", "tokens/s", "TTFT p99", "TPOT p99", "$/M")
    rows = []
    for point in points:
        summary = point["summary"]
        cost = point["economy"]["usd_per_million_output_tokens"]
        rows.append(
            (
                *(str(point["values"][name]) for name in names),
                percent(summary["attainment"]),
                number(summary["goodput_rps"], 2),
                number(summary["throughput_rps"], 2),
                number(summary["output_tokens_per_s"], 0),
                *(milliseconds(summary[key]["p99"]) for key in ("ttft_ms", "tpot_ms")),
                number(cost, 2),
            )
        )
    title = "Points: ms, $ per million output tokens"
    return Table(title, (*names, *columns), tuple(rows))


def _with_unit(value: float | None, digits: int, unit: str) -> str:
    return number(value, digits) + ("" if value is None else f" {unit}")
