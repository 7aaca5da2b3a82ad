"""One simulated point as plain data: what --json prints, what crosses process borders, what tables and pages read.

Owns the shape of that record. Holds nothing that a second run would not give again (no wall-clock times).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from diptych.control.misses.miss_summary import MissSummary
from diptych.control.slo import NS_PER_S
from diptych.simulation.prepare import PreparedPool
from diptych.simulation.report.economy import economy, pool_rows
from diptych.simulation.report.workload_figures import measured_figures
from diptych.simulation.results import REASONS, RequestTable, SimulationResult, failure_messages, summarize

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
    measured, in sentences. workload: see workload_figures.py (None: of the requests that ran). values: the swept
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
