"""The longest gaps between events of a stream, and what else was running then.

Other streams that were decoding, and prompts that had been sent and had no token yet, are the possible causes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest

from diptych.bench.request_records import ClientRecord
from diptych.control.slo import NS_PER_MS, NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """One gap. token: how many events the stream had before it. decoding: other streams between their first and last
    token. prefilling: prompt tokens of requests that waited for their first token, by number of the request."""

    number: int
    at_s: float
    gap_ms: float
    token: int
    decoding: int
    prefilling: dict[int, int] = field(default_factory=dict)


def longest_gaps(records: Sequence[ClientRecord], count: int = 10) -> list[Stall]:
    """The ``count`` longest gaps, the longest first. Of each stream only its longest counts."""
    worst: list[tuple[int, int, ClientRecord]] = []
    for record in records:
        if len(record.stamps) > 1:
            gap, place = max((gap, -place) for place, gap in enumerate(record.gaps_ns()))
            worst.append((gap, -place, record))
    chosen = nlargest(count, worst, key=lambda found: found[0])
    return [_stall(record, place, gap, records) for gap, place, record in chosen]


def _stall(stalled: ClientRecord, place: int, gap: int, records: Sequence[ClientRecord]) -> Stall:
    start = stalled.stamps[place]
    end = start + gap
    decoding, prefilling = 0, {}
    for other in records:
        if other is stalled or other.sent_ns >= end or other.end_ns <= start:
            continue
        if not other.stamps or other.stamps[0] > start:
            prefilling[other.number] = other.prompt_tokens
        if other.stamps and other.stamps[0] < end and other.stamps[-1] > start:
            decoding += 1
    return Stall(
        number=stalled.number,
        at_s=start / NS_PER_S,
        gap_ms=gap / NS_PER_MS,
        token=place + 1,
        decoding=decoding,
        prefilling=prefilling,
    )
