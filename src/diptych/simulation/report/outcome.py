"""One simulated point as plain data: what --json prints, what crosses process borders, what tables and pages read.

Owns the shape of that record: what the workload was, what the fleet did, and what the simulated time costs in money and
energy. Holds nothing that a second run would not give again (no wall-clock times).

Every GPU of the fleet is paid for from the first arrival to the last token, busy or not. Each price divides the whole
of that: by the requests that were answered, by their prompt tokens, by their output tokens, or by both kinds of tokens
together. Energy: the rated board power while a worker is in a step, the idle power otherwise.
"""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec

from diptych.control.config import EngineConfig
from diptych.control.misses.miss_summary import MissSummary
from diptych.control.slo import NS_PER_S
from diptych.report.statistics import distribution
from diptych.simulation.prepare import PreparedPool
from diptych.simulation.results import REASONS, RequestTable, SimulationResult, failure_messages, summarize, utilization
from diptych.workload.spec import RequestSpec


def workload_figures(requests: Iterable[RequestSpec]) -> dict[str, Any]:
    """Figures of requests in the order of their arrival; see ``figures_of``."""
    arrivals, prompts, outputs = array("q"), array("q"), array("q")
    known: set[int] = set()
    shared = 0
    for request in requests:
        arrivals.append(request.arrival_ns)
        prompts.append(request.prompt_tokens)
        outputs.append(request.output_tokens)
        if request.hash_ids:
            shared += _known_tokens(request, known)
            known.update(request.hash_ids)
    return figures_of(arrivals, prompts, outputs, shared)


def measured_figures(table: RequestTable) -> dict[str, Any]:
    """Figures of the requests that ran, where the workload cannot be generated again, as that of a closed loop: answers
    are those that were given, and what is shared is not known."""
    outputs = [table.output_tokens[row] for row in table.completed_rows()]
    return figures_of(sorted(table.arrival_ns), table.prompt_tokens, outputs, None)


def figures_of(
    arrivals_ns: Sequence[int], prompts: Sequence[int], outputs: Sequence[int], shared_tokens: int | None
) -> dict[str, Any]:
    """rate_rps: between the first and the last arrival. gap_cv: the coefficient of variation of the gaps between
    arrivals: 0 at even distances, 1 of a Poisson process, more where requests come in bursts. Lengths in tokens.
    shared_token_share: of the prompt tokens, those that came earlier at the same place of a prompt or an answer: what
    an unbounded prefix cache could hit (None: not known). None, too, where there are too few requests to say."""
    span = arrivals_ns[-1] - arrivals_ns[0] if arrivals_ns else 0
    return {
        "num_requests": len(arrivals_ns),
        "rate_rps": (len(arrivals_ns) - 1) * NS_PER_S / span if span else None,
        "gap_cv": _variation([later - earlier for earlier, later in pairwise(arrivals_ns)]),
        "prompt_tokens": distribution(prompts),
        "output_tokens": distribution(outputs),
        "shared_token_share": None if shared_tokens is None or not prompts else shared_tokens / sum(prompts),
    }


def _known_tokens(request: RequestSpec, known: set[int]) -> int:
    """Leading prompt tokens whose content came before; the last token of a prompt is computed in any case."""
    count = 0
    for identity in request.hash_ids:
        if identity not in known:
            break
        count += request.hash_block_tokens
    return min(count, request.prompt_tokens - 1)


def _variation(gaps: Sequence[int]) -> float | None:
    """Standard deviation over mean; None of fewer than two gaps, or where all is at once."""
    total = sum(gaps)
    if len(gaps) < 2 or not total:
        return None
    mean = total / len(gaps)
    return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean


def pool_rows(result: SimulationResult, pools: Sequence[PreparedPool]) -> list[dict[str, Any]]:
    """One row of plain figures for each pool, whose workers are numbered in this order: what it is, what its workers
    did (``utilization``: see results.py; ``busy``: the share of their time in steps), what it cost (None: unknown)."""
    rows = []
    first = 0
    for pool in pools:
        shares = utilization(replace(result, workers=result.workers[first : first + pool.num_workers]))
        first += pool.num_workers
        busy = _sum(shares[phase] for phase in ("prefill", "mixed", "decode"))
        usd, kwh = _spent(pool, result.duration_ns / 3.6e12, busy or 0.0)
        rows.append(
            {
                "name": pool.name,
                "role": pool.role,
                "replicas": pool.replicas,
                "parallelism": str(pool.parallelism),
                "hardware": pool.hardware.name if pool.hardware else None,
                "num_gpus": pool.num_devices,
                "cost_model": pool.choice.words,
                "kv_tokens": pool.num_workers * kv_tokens(pool.engine),
                "utilization": shares,
                "busy": busy,
                "usd": usd,
                "kwh": kwh,
            }
        )
    return rows


def kv_tokens(engine: EngineConfig) -> int:
    """Tokens that the KV cache of a worker holds: with windows, in sequences of the greatest length."""
    return engine.cache.layout.tokens_within(engine.cache.num_blocks, engine.max_model_len)


def _spent(pool: PreparedPool, hours: float, busy: float) -> tuple[float | None, float | None]:
    """(USD, kWh) of a pool."""
    hardware = pool.hardware
    if hardware is None:
        return None, None
    gpu_hours = pool.num_devices * hours
    watts = hardware.idle_power_w + (hardware.power_w - hardware.idle_power_w) * busy
    price = hardware.price_per_hour if pool.price_per_hour is None else pool.price_per_hour
    return price * gpu_hours if price else None, watts / 1000 * gpu_hours


def economy(summary: Mapping[str, Any], pools: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Plain figures of the fleet, the sums over its ``pool_rows``; None where that of a pool is not known, or nothing
    was answered."""
    num_gpus = sum(pool["num_gpus"] for pool in pools)
    usd, kwh = (_sum(pool[figure] for pool in pools) for figure in ("usd", "kwh"))
    return {
        "num_gpus": num_gpus,
        "gpu_hours": num_gpus * summary["duration_s"] / 3600,
        "usd": usd,
        **prices(usd, summary),
        "kwh": kwh,
        "kwh_per_million_output_tokens": _each(kwh, summary["output_tokens"] / 1e6),
    }


def prices(usd: float | None, summary: Mapping[str, Any]) -> dict[str, float | None]:
    """The whole of what was spent, by answered request and by million tokens of each kind."""
    prompts, outputs = summary["prompt_tokens"] / 1e6, summary["output_tokens"] / 1e6
    return {
        "usd_per_request": _each(usd, summary["num_completed"]),
        "usd_per_million_tokens": _each(usd, prompts + outputs),
        "usd_per_million_prompt_tokens": _each(usd, prompts),
        "usd_per_million_output_tokens": _each(usd, outputs),
    }


def _each(whole: float | None, count: float) -> float | None:
    return whole / count if whole is not None and count else None


def _sum(figures: Iterable[float | None]) -> float | None:
    known = list(figures)
    return None if None in known else sum(figure for figure in known if figure is not None)


FLEET_WIDE = (
    "itl_ms",
    "utilization",
    "preemptions",
    "tier_token_share",
    "disk_token_share",
    "peer_token_share",
)  # of the whole fleet, so no class has its own


def outcome(
    result: SimulationResult,
    *,
    settings: Mapping[str, Any],
    cost_model: str,
    pools: Sequence[PreparedPool],
    assumptions: Sequence[str] = (),
    workload: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The record. pools: of the fleet, in the order of their workers. assumptions: what of the cost models was not
    measured, in sentences. workload: see figures_of (None: of the requests that ran). values: the swept
    settings and what they are at this point."""
    summary = summarize(result)
    rows = pool_rows(result, pools)
    return {
        "settings": dict(settings),
        "values": dict(values or {}),
        "cost_model": cost_model,
        "assumptions": list(assumptions),
        "workload": dict(measured_figures(result.requests) if workload is None else workload),
        "fleet": {
            "replicas": sum(pool["replicas"] for pool in rows),
            "devices": sum(pool["num_gpus"] for pool in rows),
            "hardware": list(dict.fromkeys(pool["hardware"] for pool in rows if pool["hardware"])),
            "kv_cache_tokens": sum(pool["kv_tokens"] for pool in rows),
        },
        "summary": summary,
        "failure_messages": failure_messages(result.requests),
        "classes": classes(result),
        "pools": rows,
        "economy": economy(summary, rows),
        "num_events": result.num_events,
        **({"misses": misses(result.misses)} if result.misses else {}),
    }


def misses(summary: MissSummary) -> dict[str, Any]:
    """Prompts by why they left what was cached, and the prompt tokens that were computed by what for."""
    return {
        "prompt_tokens": summary.num_prompt_tokens,
        "cached_tokens": summary.num_cached_tokens,
        "requests": {str(reason): count for reason, count in summary.requests.most_common()},
        "computed": dict(summary.tokens.most_common()),
    }


def classes(result: SimulationResult) -> dict[str, dict[str, Any]]:
    """The summary of each class of requests, by name; {} when all are of one."""
    rows: dict[str, list[int]] = {}
    for row, kind in enumerate(result.requests.kind):
        rows.setdefault(kind, []).append(row)
    if len(rows) < 2:
        return {}
    summaries = {kind: summarize(result, rows[kind]) for kind in sorted(rows)}
    return {
        kind: {key: value for key, value in summary.items() if key not in FLEET_WIDE}
        for kind, summary in summaries.items()
    }


def records(table: RequestTable) -> Iterable[bytes]:
    """One JSON line per request, in the order in which they ended; times in seconds."""
    encoder = msgspec.json.Encoder()
    for row in range(len(table)):
        has_token = table.output_tokens[row] > 0
        tpot_ns = table.tpot_ns(row) if table.is_completed(row) else None
        record = {
            "number": table.number[row],
            "kind": table.kind[row],
            "replica": table.worker[row],
            "reason": REASONS[table.reason[row]],
            "failure": table.failure(row),
            "arrival_s": table.arrival_ns[row] / NS_PER_S,
            "queue_s": table.queue_ns[row] / NS_PER_S,
            "ttft_s": table.ttft_ns(row) / NS_PER_S if has_token else None,
            "tpot_s": None if tpot_ns is None else tpot_ns / NS_PER_S,
            "e2e_s": table.e2e_ns(row) / NS_PER_S,
            "prompt_tokens": table.prompt_tokens[row],
            "cached_tokens": table.cached_tokens[row],
            "output_tokens": table.output_tokens[row],
            "preemptions": table.preemptions[row],
            "slo_met": {1: True, 0: False}.get(table.slo_met[row]),
        }
        yield encoder.encode(record) + b"\n"
