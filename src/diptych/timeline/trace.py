"""What the timeline's ring holds as a trace for Perfetto, drawn by the lanes that simulations use too.

Owns what a live trace adds to them: transfers, lost workers, a beginning in the middle of things, and small portions.
It is made in a thread of the process that serves, so that no call may hold the interpreter for long, and what is drawn
becomes bytes at once: hundreds of thousands of dictionaries would keep the garbage collector busy.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from typing import Any

import msgspec

from diptych.control.commands import attempt_id_of
from diptych.timeline.lanes import Lane, TraceEvent, Window
from diptych.timeline.perfetto import frame, place_of, titles
from diptych.timeline.records import (
    AnswerRecord,
    Decoding,
    Record,
    StepBegunRecord,
    StepRecord,
    TransferRecord,
    WorkerRecord,
    event_of,
)
from diptych.timeline.ring import Timeline

LOST_STATES = ("lost", "stopped")
PIECE = 1000  # trace events that are joined at once

Row = tuple[float, int, int, bytes]  # place_of a trace event, and its JSON


@dataclass(frozen=True, slots=True)
class Holding:
    """A copy of the ring, so that drawing may take its time. decoding: the batches before the records."""

    records: Sequence[Record]
    decoding: Decoding
    roles: dict[int, str]
    end_ns: int
    about: dict[str, Any]


@dataclass(slots=True)
class _Track:
    """One worker: its lane, the rows that are done, and since when it is lost."""

    lane: Lane
    rows: list[Row] = field(default_factory=list)
    lost: tuple[str, int] | None = None
    was_lost: bool = False

    def draw(self, record: Record) -> None:
        """Take in one record."""
        lane = self.lane
        if isinstance(record, TransferRecord):
            lane.out += _transfer(record, lane.window)
        elif isinstance(record, WorkerRecord):
            self.end_loss(record.time_ns)
            if record.state in LOST_STATES:
                lane.crash(record.time_ns)
                self.lost, self.was_lost = (record.state, record.time_ns), True
        elif not isinstance(record, AnswerRecord | StepBegunRecord):  # the lanes draw what workers reported
            lane.event(event_of(record))
        self.keep()

    def end_loss(self, now: int) -> None:
        """The worker is back, or nothing more is known."""
        if self.lost is not None:
            state, since_ns = self.lost
            self.lane.mark(state, since_ns, now, {})
            self.lost = None

    def keep(self) -> None:
        """What the lane has drawn, as rows."""
        if self.lane.out:
            self.rows += [(*place_of(event), msgspec.json.encode(event)) for event in self.lane.out]
            self.lane.out.clear()


def hold(timeline: Timeline, now: int) -> Holding:
    """What the timeline holds at ``now``."""
    about = {"tool": "diptych serve", "run_id": timeline.run_id, "unix_ns_at_zero": timeline.unix_ns_at_zero}
    roles = {number: worker.role for number, worker in timeline.workers.items()}
    return Holding(timeline.since(0), timeline.decoding_after(timeline.first_sequence - 1), roles, now, about)


def trace(holding: Holding, last_ns: int | None = None) -> list[bytes]:
    """The JSON of the trace in pieces: all of it, or the last ``last_ns`` nanoseconds."""
    records = sorted(holding.records, key=_end_of)  # those of several workers come in portions
    begin_ns = min(map(_start_of, records), default=0)
    start_ns = begin_ns if last_ns is None else max(begin_ns, holding.end_ns - last_ns)
    end_ns = max(holding.end_ns, _end_of(records[-1]) if records else 0)
    window = Window(start_ns, end_ns)
    tracks: dict[int, _Track] = {}
    receivers: dict[str, int] = {}
    for record in records:
        track = tracks.get(record.worker)
        if track is None:
            track = tracks[record.worker] = _Track(Lane(record.worker, window, receivers, joins_runs=False))
            for request_id in holding.decoding.get(record.worker, ()):
                track.lane.begin(request_id, "decode", begin_ns)
        track.draw(record)
    for track in tracks.values():
        track.end_loss(end_ns)
        track.lane.close()
        track.keep()
        track.rows.sort(reverse=True)
    names = {worker: _name(worker, holding.roles.get(worker)) for worker in tracks}
    heads = titles(names, (worker for worker, track in tracks.items() if track.was_lost))
    return list(_pieces(heads, merge(*(_drain(track.rows) for track in tracks.values())), holding.about))


def _name(worker: int, role: str | None) -> str:
    return f"worker {worker} ({role})" if role else f"worker {worker}"


def _drain(rows: list[Row]) -> Iterator[Row]:
    """The rows from the last to the first, each freed when it is used: freeing them at once would take long."""
    while rows:
        yield rows.pop()


def _pieces(heads: list[TraceEvent], rows: Iterable[Row], about: dict[str, Any]) -> Iterator[bytes]:
    yield msgspec.json.encode(frame(about))[:-1] + b',"traceEvents":[' + msgspec.json.encode(heads)[1:-1]
    separator = b"," if heads else b""
    encoded = (row[3] for row in rows)
    while piece := b",".join(islice(encoded, PIECE)):
        yield separator + piece
    yield b"]}"


def _transfer(transfer: TransferRecord, window: Window) -> list[TraceEvent]:
    """A slice on the receiver, on a track of its own: several transfers may overlap."""
    start, end = max(transfer.start_ns, window.start_ns), min(transfer.end_ns, window.end_ns)
    if start >= end:
        return []
    attempt_id = attempt_id_of(transfer.request_id, transfer.epoch)
    own = {"name": "transfer", "cat": "transfer", "id": attempt_id, "pid": transfer.worker + 1}
    details = {
        "request": transfer.request_id,
        "from": transfer.sender,
        "to": transfer.worker,
        "bytes": transfer.num_bytes,
        "exposed_ms": transfer.exposed_ns / 1e6,
    }
    return [{**own, "ph": "b", "ts": start / 1000, "args": details}, {**own, "ph": "e", "ts": end / 1000}]


def _end_of(record: Record) -> int:
    return record.end_ns if isinstance(record, StepRecord | TransferRecord) else record.time_ns


def _start_of(record: Record) -> int:
    return record.start_ns if isinstance(record, StepRecord | TransferRecord) else record.time_ns
