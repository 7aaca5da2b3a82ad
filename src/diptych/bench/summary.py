"""The figures of a run as plain data, with the names that ``diptych simulate --json`` uses.

Owns definitions: latencies are those of completed requests; attainment counts every request with an objective, failed
ones as missed; rates are per second from the start of the workload to its last event.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from diptych.bench.health import Health
from diptych.bench.intervals import CONFIDENCE, Interval, binned, block_bootstrap, wilson
from diptych.bench.load import LoadResult
from diptych.bench.request_records import RequestRecord
from diptych.control.slo import NS_PER_S
from diptych.report.statistics import distribution_ms


def summarize(result: LoadResult) -> dict[str, Any]:
    """Latencies in ms, rates per second, shares 0 to 1, intervals as [low, high]."""
    records = result.records
    done = [one for one in records if one.is_completed]
    seconds = result.duration_ns / NS_PER_S
    met = [one for one in records if one.slo_met]
    judged = sum(one.slo_met is not None for one in records)
    outputs, prompts = sum(one.output_tokens for one in done), sum(one.prompt_tokens for one in done)
    events = sum(len(one.stamps) for one in done)
    cached = [one.cached_tokens for one in done if one.cached_tokens is not None]
    return {
        "num_requests": len(records),
        "num_completed": len(done),
        "num_failed": sum(one.outcome == "failed" for one in records),
        "num_aborted": sum(one.outcome == "aborted" for one in records),
        "num_unfinished": sum(one.outcome == "unfinished" for one in records),
        "ended": result.ended,
        "duration_s": seconds,
        "sent_rps": _rate([one.intended_ns for one in records]),
        **latencies(done),
        "attainment": len(met) / judged if judged else None,
        "attainment_interval": _pair(wilson(len(met), judged)) if judged else None,
        "missed": missed(records),
        "goodput_rps": len(met) / seconds if judged and seconds else None,
        "goodput_interval": _rate_interval(met, len(records), result.duration_ns) if judged else None,
        "throughput_rps": len(done) / seconds if seconds else 0.0,
        "throughput_interval": _rate_interval(done, len(records), result.duration_ns),
        "output_tokens_per_s": outputs / seconds if seconds else 0.0,
        "total_tokens_per_s": (outputs + prompts) / seconds if seconds else 0.0,
        "tokens_per_event": outputs / events if events else None,
        "cached_token_share": sum(cached) / prompts if cached and prompts else None,
        "turns": None if result.turns is None else asdict(result.turns),
        "errors": dict(Counter(one.error for one in records if one.outcome == "failed").most_common(10)),
        "confidence": CONFIDENCE,
        "client": client(result.health),
    }


def client(health: Health) -> dict[str, Any]:
    """Whether the client was in the way."""
    return {
        "cpu_share": health.cpu_share,
        "cpu_us_per_token": health.cpu_us_per_token,
        "wait_share": health.wait_share,
        "lag_ms": {"p50": health.lag_p50_ms, "p99": health.lag_p99_ms, "max": health.lag_max_ms},
        "late_ms": {"p99": health.late_p99_ms, "max": health.late_max_ms},
        "excesses": health.excesses,
    }


def latencies(done: Sequence[RequestRecord]) -> dict[str, dict[str, float]]:
    """Of completed requests. itl: gaps between events with tokens; normalized: end-to-end time per token of the answer
    (Orca, OSDI 2022)."""
    return {
        "ttft_ms": distribution_ms(ttft for one in done if (ttft := one.ttft_ns) is not None),
        "tpot_ms": distribution_ms(tpot for one in done if (tpot := one.tpot_ns) is not None),
        "itl_ms": distribution_ms(chain.from_iterable(one.gaps_ns() for one in done)),
        "e2e_ms": distribution_ms(one.e2e_ns for one in done),
        "normalized_ms": distribution_ms(one.e2e_ns // max(1, one.output_tokens) for one in done),
    }


def missed(records: Iterable[RequestRecord]) -> dict[str, int]:
    """How many requests missed which objective; a request may miss several, and counts for each."""
    return dict(Counter(name for one in records for name in one.missed or ()).most_common())


def classes(records: Sequence[RequestRecord]) -> dict[str, dict[str, Any]]:
    """Latencies and attainment of each class of requests, by name; {} when all are of one."""
    kinds = sorted({one.kind for one in records})
    if len(kinds) < 2:
        return {}
    found = {}
    for kind in kinds:
        rows = [one for one in records if one.kind == kind]
        judged = [one.slo_met for one in rows if one.slo_met is not None]
        found[kind] = {
            "num_requests": len(rows),
            **latencies([one for one in rows if one.is_completed]),
            "attainment": sum(judged) / len(judged) if judged else None,
            "missed": missed(rows),
        }
    return found


def _rate(times_ns: Iterable[int]) -> float | None:
    times = sorted(times_ns)
    span = times[-1] - times[0] if times else 0
    return (len(times) - 1) * NS_PER_S / span if span else None


def _rate_interval(records: Sequence[RequestRecord], num_all: int, duration_ns: int) -> list[float] | None:
    """By time of arrival, in bins in which some requests of all arrived."""
    bins = min(60, num_all // 2)
    if bins < 8:
        return None
    counts = binned([one.intended_ns for one in records], duration_ns, bins)
    interval = block_bootstrap(counts, duration_ns / NS_PER_S / bins)
    return None if interval is None else _pair(interval)


def _pair(interval: Interval) -> list[float]:
    return [interval.low, interval.high]
