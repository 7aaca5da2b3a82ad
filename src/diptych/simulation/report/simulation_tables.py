"""What was simulated, and the points of a sweep, as tables of words for the terminal and the page.

Every row says of what it is: the workload, the fleet, where the durations come from and what of them was assumed. The
figures are those of outcome.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diptych.report.text import PRICES, Table, dollars, milliseconds, number, percent, rate, with_unit


def sweep_tables(names: Sequence[str], points: Sequence[Mapping[str, Any]], asked: str | None = None) -> list[Table]:
    """Of the points of a sweep: what came of them (asked: what was searched at each), what they cost, and what they
    were."""
    first = sweep_table(names, points) if asked is None else answer_table(asked, names, points)
    prices = price_table(names, points)
    return [first, *([] if prices is None else [prices]), subject_table(names, points)]


def sweep_table(names: Sequence[str], points: Sequence[Mapping[str, Any]]) -> Table:
    """One row per point of a sweep: the swept values, then what came of them."""
    columns = ("attainment", "goodput", "requests/s", "tokens/s", "TTFT p99", "TPOT p99", "failed", "$/M")
    rows = []
    for point in points:
        summary = point["summary"]
        rows.append(
            (
                *_values(names, point),
                percent(summary["attainment"]),
                number(summary["goodput_rps"], 2),
                number(summary["throughput_rps"], 2),
                number(summary["output_tokens_per_s"], 0),
                *(milliseconds(summary[key]["p99"]) for key in ("ttft_ms", "tpot_ms")),
                f"{summary['num_failed']:,}",
                number(point["economy"]["usd_per_million_output_tokens"], 2),
            )
        )
    title = "Points: ms, $ per million output tokens"
    return Table(title, (*names, *columns), tuple(rows))


def answer_table(asked: str, names: Sequence[str], points: Sequence[Mapping[str, Any]]) -> Table:
    """The answer of a search at every point of a sweep, and what came of the run there."""
    columns = {"goodput": ("goodput", "per device", "held"), "devices": ("fewest devices", "workers")}[asked]
    rows = []
    for point in points:
        found, summary = point[asked], point["summary"]
        if asked == "goodput":
            most = found["estimate"] or found["rate"]
            each = None if most is None else most / point["fleet"]["devices"]
            at_least = ">= " if most is not None and not found["is_bracketed"] else ""
            answers = [at_least + rate(most), rate(each), rate(found["rate"])]
        else:
            answers = [number(found["devices"], 0), workers_in_words(found["workers"])]
        rows.append(
            (
                *_values(names, point),
                *answers,
                percent(summary["attainment"]),
                *(milliseconds(summary[key]["p99"]) for key in ("ttft_ms", "tpot_ms")),
                number(summary["output_tokens_per_s"], 0),
                number(point["economy"]["usd_per_million_output_tokens"], 2),
                f"{found['num_probes']:,}",
            )
        )
    share = percent(points[0][asked]["config"]["attainment"])
    title = f"Answers: {share} in time; ms, $ per million output tokens, tokens/s of the run at the answer"
    return Table(title, (*names, *columns, "in time", "TTFT p99", "TPOT p99", "tokens/s", "$/M", "runs"), tuple(rows))


def fleet_search_tables(found: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The runs of a search for the fewest devices, and its answer."""
    rows = [
        (
            f"{run['devices']:,}",
            workers_in_words(run["workers"]),
            f"{run['judged']:,}",
            percent(run["attainment"]),
            *(milliseconds(run["summary"][key]["p99"]) for key in ("ttft_ms", "tpot_ms")),
            percent(run["summary"]["utilization"]["idle"]),
        )
        for run in runs
    ]
    columns = ("devices", "workers", "requests", "in time", "TTFT p99", "TPOT p99", "idle")
    share = percent(found["config"]["attainment"])
    answers = (
        (f"fewest devices, {share} in time", number(found["devices"], 0) if found["devices"] else "no fleet was found"),
        ("workers", workers_in_words(found["workers"])),
        ("in time", percent(found["attainment"])),
        ("runs", f"{found['num_probes']:,}"),
    )
    return [Table("Runs, ms", columns, tuple(rows)), Table("Fewest devices", ("", "value"), answers)]


def workers_in_words(workers: Mapping[str, int] | None) -> str:
    """``3``, or ``2 prefill, 4 decode`` of pools; a dash where there are none."""
    if workers is None:
        return "-"
    if "replicas" in workers:
        return f"{workers['replicas']:,}"
    return ", ".join(f"{count:,} {role}" for role, count in workers.items())


def price_table(names: Sequence[str], points: Sequence[Mapping[str, Any]]) -> Table | None:
    """What every point of a sweep costs; None where no price is known."""
    if all(point["economy"]["usd"] is None for point in points):
        return None
    columns = ("devices", "device hours", "per request", "per M tokens", "per M prompt", "per M output")
    rows = [
        (
            *_values(names, point),
            f"{point['fleet']['devices']:,}",
            number(point["economy"]["gpu_hours"], 3),
            *(dollars(point["economy"][key]) for key, _ in PRICES),
        )
        for point in points
    ]
    return Table("Price: M are millions of tokens", (*names, *columns), tuple(rows))


def subject_table(names: Sequence[str], points: Sequence[Mapping[str, Any]]) -> Table:
    """What every point of a sweep simulated. The last column is the number of its cost model (``cost_notes``)."""
    columns = ("devices", "KV tokens", "rate/s", "gaps cv", "prompt", "output", "shared", "durations")
    models = _cost_models(points)
    rows = []
    for point in points:
        fleet, workload = point["fleet"], point["workload"]
        rows.append(
            (
                *_values(names, point),
                f"{fleet['devices']:,}",
                number(fleet["kv_cache_tokens"], 0),
                rate(workload["rate_rps"]),
                number(workload["gap_cv"], 2),
                *(lengths(workload[f"{kind}_tokens"]) for kind in ("prompt", "output")),
                percent(workload["shared_token_share"]),
                f"[{models.index(_cost_model(point)) + 1}]",
            )
        )
    title = "Simulated: KV tokens of all devices; lengths mean/p50/p99; share of prompt tokens that came before"
    return Table(title, (*names, *columns), tuple(rows))


def simulated_table(point: Mapping[str, Any]) -> Table:
    """What a single run simulated: the workload and the fleet."""
    workload, fleet = point["workload"], point["fleet"]
    replicas = fleet["replicas"]
    device = f" x {' and '.join(fleet['hardware'])}" if fleet["hardware"] else ""
    rows = [
        ("arrivals", with_unit(workload["rate_rps"], 2, "requests/s")),
        ("variation of the gaps between them", number(workload["gap_cv"], 2)),
        ("prompt tokens, mean/p50/p99", lengths(workload["prompt_tokens"])),
        ("output tokens, mean/p50/p99", lengths(workload["output_tokens"])),
        ("prompt tokens that came before", percent(workload["shared_token_share"])),
        ("devices", f"{fleet['devices']:,}{device} ({replicas:,} replica{'s' if replicas != 1 else ''})"),
        ("KV cache", with_unit(fleet["kv_cache_tokens"], 0, "tokens")),
    ]
    return Table("Simulated", ("", "value"), tuple(rows))


MISS_CAUSES = {
    "new": "text that was not sent before",
    "differs": "text behind a change, sent before",
    "repeated": "text of other prompts",
    "block_rounding": "rest of a block, or the last token",
    "evicted": "was cached, and evicted",
    "worker_lost": "was cached on a worker that was lost",
    "routed_elsewhere": "is cached on another worker",
    "other_salt": "was sent under another salt",
    "being_computed": "was being computed by another request",
    "not_kept": "was sent before, and not cached",
    "cache_not_read": "is cached, and was not read",
}


def misses_table(misses: Mapping[str, Any]) -> Table:
    """What the prefills of a run were spent on."""
    computed = misses["computed"]
    total = sum(computed.values())
    rows = [("found in a cache", f"{misses['cached_tokens']:,}", "")]
    rows += [(MISS_CAUSES[cause], f"{tokens:,}", percent(tokens / total)) for cause, tokens in computed.items()]
    return Table("What prefills were spent on", ("", "tokens", "share"), tuple(rows))


def cost_notes(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences: what the durations of steps come from, and what of it was assumed; numbered for the points of a
    sweep."""
    models = _cost_models(points)
    if len(points) == 1:
        words, assumptions = models[0]
        return [f"Step durations: {words}", *(f"Assumed: {sentence}" for sentence in assumptions)]
    notes = [f"Step durations [{index}]: {words}" for index, (words, _) in enumerate(models, 1)]
    for sentence in dict.fromkeys(sentence for _, assumptions in models for sentence in assumptions):
        numbers = [str(index) for index, (_, assumptions) in enumerate(models, 1) if sentence in assumptions]
        notes.append(f"Assumed [{', '.join(numbers)}]: {sentence}")
    return notes


def lengths(tokens: Mapping[str, float | None]) -> str:
    """Mean, median and 99th percentile of a distribution of tokens."""
    return "/".join(number(tokens[name], 0) for name in ("mean", "p50", "p99"))


def _values(names: Sequence[str], point: Mapping[str, Any]) -> list[str]:
    return [str(point["values"][name]) for name in names]


def _cost_model(point: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    return point["cost_model"], tuple(point["assumptions"])


def _cost_models(points: Sequence[Mapping[str, Any]]) -> list[tuple[str, tuple[str, ...]]]:
    """Different ones, in the order in which they come."""
    return list(dict.fromkeys(map(_cost_model, points)))
