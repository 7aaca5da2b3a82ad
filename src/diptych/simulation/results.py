"""What a simulation gives: one row per request in compact columns, and sums per worker.

Times are integer nanoseconds of the simulation's clock.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from diptych.control.errors import ErrorRecord
from diptych.control.events import RequestFinished
from diptych.control.misses.miss_summary import MissSummary
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.report.statistics import PERCENTILES, distribution_ms

REASONS = tuple(FinishReason)
_REASON_INDEX = {reason: index for index, reason in enumerate(REASONS)}


@dataclass(slots=True)
class RequestTable:
    """Columns; row i is the i-th request that ended. -1 stands for "never" in the time columns."""

    number: "array[int]" = field(default_factory=lambda: array("q"))  # place in the workload
    arrival_ns: "array[int]" = field(default_factory=lambda: array("q"))
    queue_ns: "array[int]" = field(default_factory=lambda: array("q"))
    prefill_ns: "array[int]" = field(default_factory=lambda: array("q"))
    handoff_ns: "array[int]" = field(default_factory=lambda: array("q"))
    decode_ns: "array[int]" = field(default_factory=lambda: array("q"))
    prompt_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    cached_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    output_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    preemptions: "array[int]" = field(default_factory=lambda: array("H"))
    reason: "array[int]" = field(default_factory=lambda: array("B"))  # index into REASONS
    slo_met: "array[int]" = field(default_factory=lambda: array("b"))  # 1, 0, or -1: it had no objective
    worker: "array[int]" = field(default_factory=lambda: array("i"))  # -1: refused before any
    kind: list[str] = field(default_factory=list)  # interned class names
    errors: dict[int, ErrorRecord] = field(default_factory=dict)  # by row, of requests that ended in an error

    def __len__(self) -> int:
        return len(self.number)

    def add(self, event: RequestFinished, number: int, arrival_ns: int, *, worker: int = 0, kind: str = "") -> None:
        """The one terminal event of a request, as a row."""
        latency = event.latency
        self.number.append(number)
        self.arrival_ns.append(arrival_ns)
        self.queue_ns.append(latency.queue_ns)
        self.prefill_ns.append(latency.prefill_ns)
        self.handoff_ns.append(latency.handoff_ns)
        self.decode_ns.append(latency.decode_ns)
        self.prompt_tokens.append(event.num_prompt_tokens)
        self.cached_tokens.append(event.num_cached_tokens)
        self.output_tokens.append(latency.num_output_tokens)
        self.preemptions.append(event.num_preemptions)
        self.reason.append(_REASON_INDEX[event.reason])
        self.slo_met.append(-1 if event.slo_met is None else int(event.slo_met))
        self.worker.append(worker)
        self.kind.append(kind)
        if event.error is not None:
            self.errors[len(self.kind) - 1] = event.error

    def is_completed(self, row: int) -> bool:
        """Whether the request got its whole answer."""
        return REASONS[self.reason[row]] in (FinishReason.STOP, FinishReason.LENGTH)

    def completed_rows(self) -> list[int]:
        """Rows of requests that got their whole answer."""
        return [row for row in range(len(self)) if self.is_completed(row)]

    def failure(self, row: int) -> str | None:
        """Why the request did not get its whole answer: the code of its error (as the server answers it), or
        ``abort`` where its client went away; None where it did."""
        if self.is_completed(row):
            return None
        error = self.errors.get(row)
        return REASONS[self.reason[row]].value if error is None else error.code or error.kind

    def ttft_ns(self, row: int) -> int:
        """Arrival to first token."""
        return self.queue_ns[row] + self.prefill_ns[row]

    def tpot_ns(self, row: int) -> int | None:
        """Mean time per token after the first; None with fewer than two tokens."""
        later = self.output_tokens[row] - 1
        return (self.handoff_ns[row] + self.decode_ns[row]) // later if later > 0 else None

    def e2e_ns(self, row: int) -> int:
        """Arrival to last token."""
        return self.queue_ns[row] + self.prefill_ns[row] + self.handoff_ns[row] + self.decode_ns[row]


@dataclass(slots=True)
class WorkerUsage:
    """What one worker did. busy_*_ns: time in steps of that kind; the rest of ``SimulationResult.duration_ns`` it
    idled. kv_block_ns / kv_peak_blocks: used blocks, integrated over time and at most."""

    num_blocks: int
    busy_prefill_ns: int = 0  # steps with prefills only
    busy_decode_ns: int = 0
    busy_mixed_ns: int = 0
    num_steps: int = 0
    decode_tokens: int = 0
    kv_block_ns: int = 0
    kv_peak_blocks: int = 0
    num_preemptions: int = 0
    down_ns: int = 0  # crashed or hung
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    peer_hit_tokens: int = 0
    disk_stored_blocks: int = 0

    def add_step(
        self, prefill_tokens: int, num_decodes: int, num_steps: int, duration_ns: int, num_extra_tokens: int = 0
    ) -> None:
        """Steps of one kind in a row; a step without prompt tokens counts as decode. num_extra_tokens: that streams got
        beside one each."""
        self.num_steps += num_steps
        self.decode_tokens += num_decodes * num_steps + num_extra_tokens
        if not prefill_tokens:
            self.busy_decode_ns += duration_ns
        elif num_decodes:
            self.busy_mixed_ns += duration_ns
        else:
            self.busy_prefill_ns += duration_ns

    def add_blocks(self, mean: int, most: int, duration_ns: int) -> None:
        """Blocks that were in use for a while."""
        self.kv_block_ns += mean * duration_ns
        self.kv_peak_blocks = max(self.kv_peak_blocks, min(most, self.num_blocks))


@dataclass(slots=True)
class GapHistogram:
    """Gaps between the tokens of a stream (ITL), weighted by how many streams saw them; exact up to merging equal
    gaps of one run of decode steps into their mean."""

    weights: dict[int, int] = field(default_factory=dict)  # gap in microseconds -> number of tokens

    def add(self, gap_ns: int, count: int) -> None:
        """``count`` tokens came ``gap_ns`` after the ones before them."""
        key = (gap_ns + 500) // 1000
        self.weights[key] = self.weights.get(key, 0) + count

    def percentiles(self, wanted: Sequence[float]) -> list[float]:
        """Percentiles in nanoseconds; 0 when there are none."""
        total = sum(self.weights.values())
        if not total:
            return [0.0] * len(wanted)
        gaps = sorted(self.weights)
        reached = list(accumulate(self.weights[gap] for gap in gaps))
        return [gaps[bisect_left(reached, max(1.0, percent / 100 * total))] * 1000.0 for percent in wanted]

    def mean_ns(self) -> float:
        """0 when there are none."""
        total = sum(self.weights.values())
        return 1000.0 * sum(gap * count for gap, count in self.weights.items()) / total if total else 0.0

    def distribution_ms(self) -> dict[str, float | None]:
        """The figures that report.statistics computes of values: None for each when there are no gaps."""
        if not self.weights:
            return distribution_ms(())
        spread = zip(PERCENTILES, self.percentiles(PERCENTILES), strict=True)
        return {
            "mean": self.mean_ns() / NS_PER_MS,
            **{f"p{percent:g}": value / NS_PER_MS for percent, value in spread},
            "max": max(self.weights) / 1000,
        }


@dataclass(slots=True)
class SimulationResult:
    """Everything that a report needs."""

    requests: RequestTable
    gaps: GapHistogram
    workers: list[WorkerUsage]
    duration_ns: int  # from 0 to the last event
    num_events: int = 0  # events handled by the environment
    wall_s: float = 0.0  # what the simulation itself took
    misses: MissSummary | None = None  # what prefills were spent on; where misses were explained
    is_cut: bool = False  # ended before its last request
    hit_error: float | None = None  # of routing kv_aware: |predicted - actual| cached share of the prompt tokens


def summarize(result: SimulationResult, rows: Sequence[int] | None = None) -> dict[str, Any]:
    """The report as plain data: latencies in ms, rates per second, shares 0 to 1. What was not measured is None.
    ``rows``: only these requests. failures: how many requests failed, by reason."""
    table = result.requests
    every = range(len(table)) if rows is None else rows
    done = [row for row in every if table.is_completed(row)]
    seconds = result.duration_ns / NS_PER_S
    judged = [row for row in every if table.slo_met[row] >= 0]
    met = sum(table.slo_met[row] == 1 for row in judged)
    tpots = [tpot for row in done if (tpot := table.tpot_ns(row)) is not None]
    outputs = sum(table.output_tokens[row] for row in done)
    prompts = sum(table.prompt_tokens[row] for row in done)
    handoffs = {"handoff_ms": distribution_ms(table.handoff_ns[row] for row in done)} if any(table.handoff_ns) else {}
    return {
        "num_requests": len(every),
        "num_completed": len(done),
        "num_failed": len(every) - len(done),
        "failures": failures(table, every),
        "duration_s": seconds,
        "ttft_ms": distribution_ms(table.ttft_ns(row) for row in done),
        "tpot_ms": distribution_ms(tpots),
        "itl_ms": result.gaps.distribution_ms(),
        "e2e_ms": distribution_ms(table.e2e_ns(row) for row in done),
        "queue_ms": distribution_ms(table.queue_ns[row] for row in done),
        **handoffs,
        "attainment": met / len(judged) if judged else None,
        "goodput_rps": met / seconds if judged and seconds else None,
        "throughput_rps": len(done) / seconds if seconds else None,
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "output_tokens_per_s": outputs / seconds if seconds else None,
        "total_tokens_per_s": (outputs + prompts) / seconds if seconds else None,
        "cached_token_share": sum(table.cached_tokens[row] for row in done) / prompts if prompts else None,
        "preemptions": sum(table.preemptions[row] for row in every),
        **_tiers(result.workers, prompts),
        "utilization": utilization(result),
    }


def _tiers(workers: Sequence[WorkerUsage], prompt_tokens: int) -> dict[str, float]:
    """Tokens that came from below the caches, as shares of the prompt tokens (those from disk or from host
    blocks of other workers are in both); nothing without tiers."""
    names = ("host_hit_tokens", "disk_hit_tokens", "peer_hit_tokens")
    host, disk, peer = (sum(getattr(usage, name) for usage in workers) for name in names)
    if not prompt_tokens or not (host or disk or peer):
        return {}
    shares = {"tier_token_share": host / prompt_tokens, "disk_token_share": disk / prompt_tokens}
    return {**shares, "peer_token_share": peer / prompt_tokens} if peer else shares


def failures(table: RequestTable, rows: Iterable[int]) -> dict[str, int]:
    """How many of these requests failed, by reason, the most frequent first (the table's order between equals)."""
    return dict(Counter(why for row in rows if (why := table.failure(row)) is not None).most_common())


def failure_messages(table: RequestTable) -> dict[str, str]:
    """The first error message of each reason, in the order of the rows."""
    messages: dict[str, str] = {}
    for error in table.errors.values():
        messages.setdefault(error.code or error.kind, error.message)
    return messages


def utilization(result: SimulationResult) -> dict[str, float | None]:
    """Shares of the fleet's time by phase, and of its KV blocks; None when no time passed."""
    usage = result.workers
    span = result.duration_ns * len(usage)
    if not span:
        return dict.fromkeys(("prefill", "decode", "mixed", "down", "idle", "kv_mean", "kv_peak"))
    busy = {
        "prefill": sum(worker.busy_prefill_ns for worker in usage) / span,
        "decode": sum(worker.busy_decode_ns for worker in usage) / span,
        "mixed": sum(worker.busy_mixed_ns for worker in usage) / span,
        "down": sum(worker.down_ns for worker in usage) / span,
    }
    blocks = sum(worker.num_blocks for worker in usage) * result.duration_ns
    return {
        **busy,
        "idle": max(0.0, 1.0 - sum(busy.values())),
        "kv_mean": sum(worker.kv_block_ns for worker in usage) / max(1, blocks),
        "kv_peak": max((worker.kv_peak_blocks / worker.num_blocks for worker in usage), default=0.0),
    }
