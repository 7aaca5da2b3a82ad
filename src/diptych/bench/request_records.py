"""The client's record of a request, and its line in a file.

TTFT, TPOT, ITL and E2E are defined here as a client sees them: times count from when the request should have been sent,
so that a client that fell behind does not hide what its requests waited (coordinated omission).
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec

from diptych.bench.objectives import NO_ANSWER, LatencyObjectives
from diptych.bench.token_stream import TokenStream
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.report.statistics import percentile
from diptych.workload.spec import RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRecord:
    """Times in nanoseconds from the start of the run. stamps: one per event with tokens; sizes: tokens of each, where
    the server tells (else empty). outcome: completed, failed, aborted (the client's patience ended), or unfinished (the
    run ended first). missed: which objectives; None without any, or if the run ended before that was known."""

    number: int
    kind: str = ""
    session: int = -1
    intended_ns: int
    sent_ns: int
    end_ns: int
    outcome: str
    prompt_tokens: int
    cached_tokens: int | None = None
    output_tokens: int = 0
    stamps: "array[int]" = field(default_factory=lambda: array("q"))
    sizes: "array[int]" = field(default_factory=lambda: array("l"))
    error: str | None = None
    status: int = 0
    missed: tuple[str, ...] | None = None
    server_ms: dict[str, float] | None = None

    @property
    def is_completed(self) -> bool:
        """Whether the whole answer came."""
        return self.outcome == "completed"

    @property
    def ttft_ns(self) -> int | None:
        """Intended sending to first token."""
        return self.stamps[0] - self.intended_ns if self.stamps else None

    @property
    def tpot_ns(self) -> int | None:
        """Mean time per token after the first; None with fewer than two tokens."""
        if len(self.stamps) < 2 or self.output_tokens < 2:
            return None
        return (self.stamps[-1] - self.stamps[0]) // max(1, self.output_tokens - self.first_size)

    @property
    def first_size(self) -> int:
        """Tokens of the first event."""
        return self.sizes[0] if self.sizes else 1

    @property
    def e2e_ns(self) -> int:
        """Intended sending to last token (or to the end, without one)."""
        return (self.stamps[-1] if self.stamps else self.end_ns) - self.intended_ns

    @property
    def slo_met(self) -> bool | None:
        """Whether it met every objective; None without any, or if that is not known."""
        return None if self.missed is None else not self.missed

    @property
    def itl_p99_ns(self) -> float | None:
        """The 99th percentile of its own gaps; None without a gap."""
        return percentile(sorted(self.gaps_ns()), 99) if len(self.stamps) > 1 else None

    def gaps_ns(self) -> Iterator[int]:
        """Gaps between neighbouring events: what a reader of the stream waits for."""
        return (later - earlier for earlier, later in pairwise(self.stamps))


def verdicts(records: Iterable[ClientRecord]) -> tuple[int, int]:
    """(requests that met every objective, requests whose verdict is known)."""
    known = [record.slo_met for record in records if record.slo_met is not None]
    return sum(known), len(known)


def client_record(
    number: int, spec: RequestSpec, stream: TokenStream, objectives: LatencyObjectives, start_ns: int, outcome: str
) -> ClientRecord:
    """The record of a stream that is over; ``start_ns``: of the run, on the clock of the stream."""
    usage = stream.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else None
    made = ClientRecord(
        number=number,
        kind=spec.kind,
        session=spec.session,
        intended_ns=stream.intended_ns - start_ns,
        sent_ns=stream.sent_ns - start_ns,
        end_ns=stream.end_ns - start_ns,
        outcome=outcome,
        prompt_tokens=usage.prompt_tokens if usage and usage.prompt_tokens else spec.prompt_tokens,
        cached_tokens=cached,
        output_tokens=stream.output_tokens,
        stamps=array("q", [stamp - start_ns for stamp in stream.stamps]),
        sizes=stream.sizes if len(stream.sizes) == len(stream.stamps) else array("l"),
        error=None if outcome == "completed" else stream.error,
        status=stream.status,
        server_ms=usage.latency if usage else None,
    )
    if outcome == "unfinished":
        late = objectives.overdue(made.end_ns - made.intended_ns, has_token=bool(made.stamps))
        return replace(made, missed=late or None)
    return replace(made, missed=_missed(made, objectives)) if objectives.has_any else made


def _missed(made: ClientRecord, objectives: LatencyObjectives) -> tuple[str, ...]:
    """An answer that did not come whole met nothing."""
    if not made.is_completed or made.ttft_ns is None:
        return (NO_ANSWER,)
    times = {"ttft": made.ttft_ns, "tpot": made.tpot_ns, "itl": made.itl_p99_ns, "e2e": made.e2e_ns}
    return objectives.missed(times)


def lines(records: Iterable[ClientRecord], *, with_gaps: bool = False) -> Iterator[bytes]:
    """One JSON line per request, in order of number; the names are those of ``diptych simulate --records``."""
    encoder = msgspec.json.Encoder()
    for record in sorted(records, key=lambda record: record.number):
        row: dict[str, Any] = {
            "number": record.number,
            "kind": record.kind,
            "session": record.session,
            "outcome": record.outcome,
            "arrival_s": record.intended_ns / NS_PER_S,
            "sent_s": record.sent_ns / NS_PER_S,
            "ttft_s": _seconds(record.ttft_ns),
            "tpot_s": _seconds(record.tpot_ns),
            "e2e_s": record.e2e_ns / NS_PER_S,
            "longest_gap_s": max(record.gaps_ns(), default=0) / NS_PER_S,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
            "events": len(record.stamps),
            "slo_met": record.slo_met,
            "missed": record.missed,
            "status": record.status,
            "error": record.error,
        }
        if record.server_ms is not None:
            row["server_ms"] = record.server_ms
        if with_gaps:
            row["gaps_ms"] = [round(gap / NS_PER_MS, 3) for gap in record.gaps_ns()]
        yield encoder.encode(row) + b"\n"


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / NS_PER_S
