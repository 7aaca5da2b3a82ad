"""The log of a simulation: every event of every worker, in order, in one canonical form; and as a trace, which Perfetto
and chrome://tracing open.

Decode steps in a row with the same batch and nothing between them on their worker are one record, whether they were
simulated one by one or all at once; so equal runs give equal bytes. A trace has the lanes of timeline/ and, beside
them, what a simulation adds: its faults, a window, and a cap on the number of trace events; what was cut is said in
``otherData``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b

import msgspec

from diptych.control.events import Event, KVEvents, StepFinished
from diptych.control.slo import NS_PER_S
from diptych.simulation.faults import Fault
from diptych.timeline.lanes import Lane, TraceEvent, Window
from diptych.timeline.perfetto import document, place_of

LoggedEvent = tuple[int, Event]  # (worker, what happened there); -1: the front end
MAX_TRACE_EVENTS = 200_000


class EventLog:
    """Events of many workers (-1: the front end), in order of time, then of worker, then of being reported."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, Event]] = []
        self._runs: dict[int, StepFinished] = {}  # worker -> its decode steps that may still go on
        self._is_sorted = True

    def __len__(self) -> int:
        return len(self._entries) + len(self._runs)

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        if self._runs or not self._is_sorted:
            for worker in sorted(self._runs):
                self._entries.append((worker, self._runs[worker]))
            self._runs.clear()
            self._entries.sort(key=_place)
            self._is_sorted = True
        return iter(self._entries)

    def extend(self, worker: int, events: list[Event]) -> None:
        """``worker`` reports these events."""
        for event in events:
            if type(event) is StepFinished:
                self._add_step(worker, event)
            else:
                self._entries.append((worker, event))
        self._is_sorted = False

    def _add_step(self, worker: int, step: StepFinished) -> None:
        """A run of decode steps is added to the log when another step follows it."""
        run = self._runs.pop(worker, None)
        is_decode = step.num_decodes > 0 and not step.prefills
        if run is not None:
            follows = run.end_ns == step.start_ns and run.step_id + run.num_steps == step.step_id
            is_plain = not (run.extra or step.extra)
            if is_decode and follows and is_plain and run.num_decodes == step.num_decodes:
                self._runs[worker] = replace(run, end_ns=step.end_ns, num_steps=run.num_steps + step.num_steps)
                return
            self._entries.append((worker, run))
        if is_decode:
            self._runs[worker] = step
        else:
            self._entries.append((worker, step))

    def lines(self) -> Iterator[bytes]:
        """One JSON array a line: [worker, kind of event, its fields]."""
        encoder = msgspec.json.Encoder()
        for worker, event in self:
            yield encoder.encode((worker, type(event).__name__, _plain(event))) + b"\n"

    def digest(self) -> str:
        """A fingerprint of the whole log (hexadecimal)."""
        digest = blake2b(digest_size=16)
        for line in self.lines():
            digest.update(line)
        return digest.hexdigest()


def _place(entry: tuple[int, Event]) -> tuple[int, int]:
    worker, event = entry
    return event.end_ns if isinstance(event, StepFinished) else event.time_ns, worker


def _plain(event: Event) -> object:
    if isinstance(event, KVEvents):
        hashes = {name: [block.hex() for block in getattr(event, name)] for name in ("stored", "evicted")}
        tier = {} if event.tier == "device" else {"tier": event.tier}
        return {"time_ns": event.time_ns, "sequence": event.sequence, **hashes, **tier}
    return event


def trace(
    events: Iterable[LoggedEvent],
    duration_ns: int,
    *,
    faults: Sequence[Fault] = (),
    window: Window | None = None,
    max_trace_events: int = MAX_TRACE_EVENTS,
) -> tuple[TraceEvent, str]:
    """The trace as plain data, and one sentence about what it leaves out ("" when it holds everything)."""
    chosen = window or Window()
    chosen = Window(chosen.start_ns, min(chosen.end_ns, duration_ns))
    log = list(events)
    drawn = _draw(log, faults, chosen)
    note = ""
    if len(drawn) > max_trace_events:
        end_ns = max(chosen.start_ns + 1, int(drawn[max_trace_events]["ts"] * 1000))
        note = (
            f"the timeline ends at {end_ns / NS_PER_S:.3f} s of {chosen.end_ns / NS_PER_S:.3f} s: it holds at most "
            f"{max_trace_events:,} trace events; choose a part with --timeline-window"
        )
        chosen = Window(chosen.start_ns, end_ns)
        drawn = _draw(log, faults, chosen)
    names = {event["pid"] - 1: f"worker {event['pid'] - 1}" for event in drawn}
    return document(drawn, names, {"tool": "diptych simulate", "note": note}), note


def _draw(log: Sequence[LoggedEvent], faults: Sequence[Fault], window: Window) -> list[TraceEvent]:
    lanes: dict[int, Lane] = {}
    receivers: dict[str, int] = {}
    for fault in sorted(faults, key=lambda fault: fault.at_ns):
        lane = lanes.setdefault(fault.worker, Lane(fault.worker, window, receivers))
        lane.mark(fault.kind, fault.at_ns, fault.at_ns + fault.duration_ns, {"factor": fault.factor})
        if fault.kind == "crash":
            lane.crashes.append(fault.at_ns)
    for worker, event in log:
        if worker >= 0:  # what the front end notes of lost requests follows from the crashes
            lanes.setdefault(worker, Lane(worker, window, receivers)).event(event)
    for lane in lanes.values():
        lane.close()
    return sorted((event for lane in lanes.values() for event in lane.out), key=place_of)
