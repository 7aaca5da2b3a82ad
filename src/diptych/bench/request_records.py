"""What became of one request, and its line in a file.

Owns the definitions of TTFT, TPOT and ITL as a client sees them: times are counted from when the request should have
been sent, so that a client that fell behind does not hide what its requests waited (coordinated omission).
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec

from diptych.bench.client_stream import TokenStream
from diptych.bench.objectives import NO_ANSWER, Objectives
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.report.statistics import percentile
from diptych.workload.spec import RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Times in nanoseconds from the start of the run. stamps: one per event with tokens; sizes: tokens of each, where
    the server tells (else empty). outcome: completed, failed, aborted (the client's patience ended), or unfinished (the
    run ended first). missed: which objectives; None without any, or when the run ended before that was known."""

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
        """Whether it met every objective; None without any, or when nobody knows."""
        return None if self.missed is None else not self.missed

    @property
    def itl_p99_ns(self) -> float | None:
        """The 99th percentile of its own gaps; None without a gap."""
        return percentile(sorted(self.gaps_ns()), 99) if len(self.stamps) > 1 else None

    def gaps_ns(self) -> Iterator[int]:
        """Between neighbouring events: what somebody who watches the stream waits for."""
        stamps = self.stamps
        return (later - earlier for earlier, later in pairwise(stamps))


def record(
    number: int, spec: RequestSpec, stream: TokenStream, objectives: Objectives, start_ns: int, outcome: str
) -> RequestRecord:
    """The record of a stream that is over; ``start_ns``: of the run, on the clock of the stream."""
    stream.settle()
    usage = stream.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else None
    made = RequestRecord(
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


def _missed(made: RequestRecord, objectives: Objectives) -> tuple[str, ...]:
    """An answer that did not come whole met nothing."""
    if not made.is_completed or made.ttft_ns is None:
        return (NO_ANSWER,)
    times = {"ttft": made.ttft_ns, "tpot": made.tpot_ns, "itl": made.itl_p99_ns, "e2e": made.e2e_ns}
    return objectives.missed(times)


def lines(records: Iterable[RequestRecord], *, with_gaps: bool = False) -> Iterator[bytes]:
    """One JSON line per request, in order of number; the names are those of ``diptych simulate --records``."""
    encoder = msgspec.json.Encoder()
    for one in sorted(records, key=lambda each: each.number):
        row: dict[str, Any] = {
            "number": one.number,
            "kind": one.kind,
            "session": one.session,
            "outcome": one.outcome,
            "arrival_s": one.intended_ns / NS_PER_S,
            "sent_s": one.sent_ns / NS_PER_S,
            "ttft_s": None if one.ttft_ns is None else one.ttft_ns / NS_PER_S,
            "tpot_s": None if one.tpot_ns is None else one.tpot_ns / NS_PER_S,
            "e2e_s": one.e2e_ns / NS_PER_S,
            "longest_gap_s": max(one.gaps_ns(), default=0) / NS_PER_S,
            "prompt_tokens": one.prompt_tokens,
            "cached_tokens": one.cached_tokens,
            "output_tokens": one.output_tokens,
            "events": len(one.stamps),
            "slo_met": one.slo_met,
            "missed": one.missed,
            "status": one.status,
            "error": one.error,
        }
        if one.server_ms is not None:
            row["server_ms"] = one.server_ms
        if with_gaps:
            row["gaps_ms"] = [round(gap / NS_PER_MS, 3) for gap in one.gaps_ns()]
        yield encoder.encode(row) + b"\n"
