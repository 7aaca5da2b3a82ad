"""The figures of a run as plain data, with the names that ``diptych simulate --json`` uses.

Latencies are those of completed requests. Attainment counts every request with an objective, failed requests as missed.
Rates are per second from the start of the workload to its last event. Their confidence intervals are resampled with a
seed: equal measurements have equal intervals.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from diptych.bench.health import Health
from diptych.bench.load import LoadResult
from diptych.bench.request_records import ClientRecord, verdicts
from diptych.control.slo import NS_PER_S
from diptych.report.statistics import CONFIDENCE, Interval, distribution_ms, percentile, wilson
from diptych.workload.distributions import Stream


def summarize(result: LoadResult) -> dict[str, Any]:
    """Latencies in ms, rates per second, shares 0 to 1, intervals as [low, high]. What was not measured is None."""
    records = result.records
    done = [record for record in records if record.is_completed]
    seconds = result.duration_ns / NS_PER_S
    good = [record for record in records if record.slo_met]
    met, judged = verdicts(records)
    outputs, prompts = sum(record.output_tokens for record in done), sum(record.prompt_tokens for record in done)
    events = sum(len(record.stamps) for record in done)
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    return {
        "num_requests": len(records),
        "num_completed": len(done),
        "num_failed": sum(record.outcome == "failed" for record in records),
        "num_aborted": sum(record.outcome == "aborted" for record in records),
        "num_unfinished": sum(record.outcome == "unfinished" for record in records),
        "ended": result.ended,
        "duration_s": seconds,
        "sent_rps": _rate([record.intended_ns for record in records]),
        **latencies(done),
        "attainment": met / judged if judged else None,
        "attainment_interval": wilson(met, judged) if judged else None,
        "missed": missed(records),
        "goodput_rps": met / seconds if judged and seconds else None,
        "goodput_interval": _rate_interval(good, len(records), result.duration_ns) if judged else None,
        "throughput_rps": len(done) / seconds if seconds else None,
        "throughput_interval": _rate_interval(done, len(records), result.duration_ns),
        "output_tokens_per_s": outputs / seconds if seconds else None,
        "total_tokens_per_s": (outputs + prompts) / seconds if seconds else None,
        "tokens_per_event": outputs / events if events else None,
        "cached_token_share": sum(cached) / prompts if cached and prompts else None,
        "turns": None if result.turns is None else asdict(result.turns),
        "errors": dict(Counter(record.error for record in records if record.outcome == "failed").most_common(10)),
        "confidence": CONFIDENCE,
        "client": client(result.health),
    }


def client(health: Health) -> dict[str, Any]:
    """What the client itself took, and which of it was over its limit."""
    return {
        "cpu_share": health.cpu_share,
        "cpu_us_per_token": health.cpu_us_per_token,
        "wait_share": health.wait_share,
        "lag_ms": {"p50": health.lag_p50_ms, "p99": health.lag_p99_ms, "max": health.lag_max_ms},
        "late_ms": {"p99": health.late_p99_ms, "max": health.late_max_ms},
        "excesses": health.excesses,
    }


def latencies(done: Sequence[ClientRecord]) -> dict[str, dict[str, float | None]]:
    """Latencies of the completed requests. itl: gaps between events with tokens; normalized: end-to-end time per token
    of the answer (Orca, OSDI 2022)."""
    return {
        "ttft_ms": distribution_ms(ttft for record in done if (ttft := record.ttft_ns) is not None),
        "tpot_ms": distribution_ms(tpot for record in done if (tpot := record.tpot_ns) is not None),
        "itl_ms": distribution_ms(chain.from_iterable(record.gaps_ns() for record in done)),
        "e2e_ms": distribution_ms(record.e2e_ns for record in done),
        "normalized_ms": distribution_ms(record.e2e_ns // max(1, record.output_tokens) for record in done),
    }


def missed(records: Iterable[ClientRecord]) -> dict[str, int]:
    """How many requests missed which objective; a request may miss several, and counts for each."""
    return dict(Counter(name for record in records for name in record.missed or ()).most_common())


def classes(records: Sequence[ClientRecord]) -> dict[str, dict[str, Any]]:
    """Latencies and attainment of each class of requests, by name; {} when there is only a single class."""
    kinds = sorted({record.kind for record in records})
    if len(kinds) < 2:
        return {}
    found = {}
    for kind in kinds:
        rows = [record for record in records if record.kind == kind]
        met, judged = verdicts(rows)
        found[kind] = {
            "num_requests": len(rows),
            **latencies([record for record in rows if record.is_completed]),
            "attainment": met / judged if judged else None,
            "missed": missed(rows),
        }
    return found


def _rate(times_ns: Iterable[int]) -> float | None:
    times = sorted(times_ns)
    span = times[-1] - times[0] if times else 0
    return (len(times) - 1) * NS_PER_S / span if span else None


def _rate_interval(records: Sequence[ClientRecord], num_all: int, duration_ns: int) -> Interval | None:
    """Confidence interval of a rate by time of arrival, in bins in which some requests of all arrived."""
    bins = min(60, num_all // 2)
    if bins < 8:
        return None
    counts = binned([record.intended_ns for record in records], duration_ns, bins)
    return block_bootstrap(counts, duration_ns / NS_PER_S / bins)


RESAMPLES = 2000
BINS = 60


def block_bootstrap(counts: Sequence[int], seconds_per_bin: float, confidence: float = CONFIDENCE) -> Interval | None:
    """Confidence interval of a rate per second, from counts in equal neighbouring bins of time: the circular block
    bootstrap of Politis and Romano (1992), which keeps the correlation of neighbouring bins, with blocks of about
    n**(1/3) bins. None below 8 bins."""
    number = len(counts)
    if number < 8 or seconds_per_bin <= 0:
        return None
    width = max(1, round(number ** (1 / 3)))
    doubled = [*counts, *counts[: width - 1]]
    blocks = [sum(doubled[start : start + width]) for start in range(number)]
    uniform = Stream(0, "block bootstrap").uniform
    draws = -(-number // width)
    scale = 1 / (draws * width * seconds_per_bin)
    rates = sorted(sum(blocks[int(uniform() * number)] for _ in range(draws)) * scale for _ in range(RESAMPLES))
    tail = 50 * (1 - confidence)
    return Interval(percentile(rates, tail), percentile(rates, 100 - tail))


def binned(times_ns: Sequence[int], duration_ns: int, num_bins: int = BINS) -> list[int]:
    """Counts of [0, duration) in equal bins."""
    counts = [0] * num_bins
    for time in times_ns:
        counts[min(num_bins - 1, max(0, time * num_bins // max(1, duration_ns)))] += 1
    return counts
