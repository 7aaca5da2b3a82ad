"""The figures of a run as tables of words: what the terminal and the page both show.

Owns the choice of rows, their order and how a number is written. Must never compute a figure of its own (see
simulation/results.py and its report/outcome.py) and must never know how a table is drawn.
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

PRICES = (
    ("usd_per_request", "request"),
    ("usd_per_million_tokens", "million tokens"),
    ("usd_per_million_prompt_tokens", "million prompt tokens"),
    ("usd_per_million_output_tokens", "million output tokens"),
)
FAILURES = {  # codes of errors as the server answers them
    "abort": "the client went away",
    "overloaded": "the wait would be too long",
    "queue_full": "the queue is full",
    "tenant_queue_full": "the queue of the key is full",
    "displaced": "made room for a more important one",
    "queue_timeout": "waited too long",
    "deadline": "its deadline cannot be met",
    "context_length_exceeded": "too long for the context or the KV cache",
    "no_worker": "no worker is up",
    "worker_failed": "its worker was lost",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under column names; the first column is the name of the row, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number(value: float | None, digits: int = 1) -> str:
    """A number with thousands separated; what does not exist is a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """A share of 1 in percent, one digit."""
    return number(None if share is None else 100 * share) + ("" if share is None else " %")


def milliseconds(value: float | None) -> str:
    """Three digits that matter, never fewer than the whole milliseconds; what was not measured is a dash."""
    if value is None:
        return "-"
    return number(value, 0 if value >= 100 else 1 if value >= 10 else 2)


def rate(per_second: float | None) -> str:
    """A rate of requests, with as many digits as tell rates of a search apart; a dash where there is none."""
    return number(per_second, 3 if per_second is not None and per_second < 10 else 2)


def dollars(value: float | None) -> str:
    """A price with cents, or with three significant digits where it is less than one dollar; a dash where it is
    unknown."""
    if value is None:
        return "-"
    zeros = 0  # between the point and the first digit that matters
    while zeros < 12 and 0 < value < 0.1 ** (zeros + 1):
        zeros += 1
    return f"${value:,.{2 if value >= 1 or not value else zeros + 3}f}"


def failure(reason: str) -> str:
    """The reason of a failed request in words; of an unknown one its code."""
    return FAILURES.get(reason, reason.replace("_", " "))


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
    rows = [
        ("requests", f"{summary['num_requests']:,}"),
        *((f"failed: {failure(reason)}", f"{count:,}") for reason, count in summary["failures"].items()),
        ("time simulated", f"{number(summary['duration_s'])} s"),
        ("attainment", percent(summary["attainment"])),
        ("goodput", with_unit(summary["goodput_rps"], 2, "requests/s")),
        ("throughput", with_unit(summary["throughput_rps"], 2, "requests/s")),
        ("output", with_unit(summary["output_tokens_per_s"], 0, "tokens/s")),
        ("prompt + output", with_unit(summary["total_tokens_per_s"], 0, "tokens/s")),
    ]
    if economy["usd"] is not None:
        rows += [(f"cost per {unit}", dollars(economy[key])) for key, unit in PRICES]
    if (energy := economy["kwh_per_million_output_tokens"]) is not None:
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


def runs_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """The runs of a series of rates or of a search for goodput; one that was cut short has at most that share."""
    rows = [
        (
            rate(point["rate"]),
            f"{point['judged']:,}",
            ("<= " if point["summary"].get("ended") == "given up" else "") + percent(point["attainment"]),
            number(point["summary"]["goodput_rps"], 2),
            number(point["summary"]["output_tokens_per_s"], 0),
            *(milliseconds(point["summary"][key]["p99"]) for key in ("ttft_ms", "tpot_ms", "itl_ms")),
        )
        for point in points
    ]
    columns = ("rate/s", "requests", "in time", "good/s", "tokens/s", "TTFT p99", "TPOT p99", "ITL p99")
    return Table("Runs, ms", columns, tuple(rows))


def goodput_table(found: Mapping[str, Any]) -> Table:
    """The answer of a search: the fields of a GoodputResult, and the share that was asked for in its ``config``."""
    if found["rate"] is None:
        answer = "no rate was found"
    else:
        answer = f"{'' if found['is_bracketed'] else 'at least '}{rate(found['estimate'] or found['rate'])} requests/s"
    rows = [
        (f"goodput, {percent(found['config']['attainment'])} in time", answer),
        ("highest rate that held", rate(found["rate"])),
        ("surely above", rate(found["low"])),
        ("surely below", rate(found["high"])),
        ("runs", f"{found['num_probes']:,}"),
    ]
    return Table("Goodput", ("", "value"), tuple(rows))


def with_unit(value: float | None, digits: int, unit: str) -> str:
    """A number with its unit; a dash alone where there is none."""
    return number(value, digits) + ("" if value is None else f" {unit}")
