"""The event log as a trace that Perfetto and chrome://tracing open.

Owns what a simulation adds to the lanes: its faults, a window, and a cap on the number of trace events; what was cut
is said in ``otherData``.
"""

from collections.abc import Iterable, Sequence

from diptych.control.slo import NS_PER_S
from diptych.simulation.faults import Fault
from diptych.simulation.report.series import LoggedEvent
from diptych.timeline.lanes import Lane, TraceEvent, Window
from diptych.timeline.perfetto import document, place_of

MAX_TRACE_EVENTS = 200_000


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
