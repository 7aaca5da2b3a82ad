"""The event log as a trace that Perfetto and chrome://tracing open.

Owns the trace-event JSON ("JSON Object Format": traceEvents, times in microseconds). One process per replica: the
steps on one lane, faults on another, counters, and each request as nested asynchronous slices. Must stay small: a
window and a cap on the number of trace events, and what was cut is said in ``otherData``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diptych.control.events import (
    Event,
    FirstToken,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestResumed,
    StepFinished,
)
from diptych.control.slo import NS_PER_S
from diptych.simulation.faults import Fault
from diptych.simulation.report.series import LoggedEvent, phase_of, prefill_context

MAX_TRACE_EVENTS = 200_000
STEPS_LANE, FAULTS_LANE = 1, 2
WHOLE = "request"  # the slice around queue, prefill and decode
COLOURS = {"prefill": "thread_state_iowait", "decode": "thread_state_running", "mixed": "rail_animation"}

TraceEvent = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Window:
    """The part of the run to draw, in nanoseconds."""

    start_ns: int = 0
    end_ns: int = 2**62


@dataclass(slots=True)
class _Stay:
    """A request on its replica: the slice that is open and since when."""

    name: str
    since_ns: int
    queued_ns: int
    chunk_end_ns: int = 0  # end of its newest prefill chunk


@dataclass(slots=True)
class _Lane:
    """What one replica's counters and slices need to remember."""

    replica: int
    window: Window
    out: list[TraceEvent] = field(default_factory=list)
    stays: dict[str, _Stay] = field(default_factory=dict)
    num_waiting: int = 0
    prompts: dict[str, int] = field(default_factory=dict)
    run: StepFinished | None = None  # decode steps in a row, drawn as one slice
    run_steps: int = 0
    run_held: int = 0
    crashes: list[int] = field(default_factory=list)  # times to come, ascending

    def fault(self, fault: Fault) -> None:
        """Draw a fault; a crash also ends all stays when its time has come."""
        if fault.kind == "crash":
            self.crashes.append(fault.at_ns)
        start = max(fault.at_ns, self.window.start_ns)
        end = min(fault.at_ns + fault.duration_ns, self.window.end_ns)
        if start < end:
            more = {"tid": FAULTS_LANE, "dur": (end - start) / 1000, "cname": "terrible"}
            self.out.append(self._base("X", fault.kind, start, **more, args={"factor": fault.factor}))

    def event(self, event: Event) -> None:
        """Take in one event of the log."""
        self._crash_before(event.end_ns if isinstance(event, StepFinished) else event.time_ns)
        if isinstance(event, StepFinished):
            self._step(event)
        elif isinstance(event, RequestQueued):
            self.stays[event.request_id] = _Stay("queue", event.time_ns, event.time_ns)
            self._count_waiting(event.time_ns, 1)
        elif isinstance(event, RequestAdmitted):
            if event.is_first:
                self.prompts[event.request_id] = event.num_cached_tokens
            self._move(event.request_id, "prefill", event.time_ns)
            self._count_waiting(event.time_ns, -1)
        elif isinstance(event, FirstToken):
            self.prompts.pop(event.request_id, None)
            self._move(event.request_id, "decode", event.time_ns)
        elif isinstance(event, RequestPreempted):
            self._end_recomputation(event.request_id)
            self._move(event.request_id, "swapped" if event.swapped else "queue", event.time_ns)
            self._count_waiting(event.time_ns, 1)
        elif isinstance(event, RequestResumed):
            self._move(event.request_id, "decode", event.time_ns)
            self._count_waiting(event.time_ns, -1)
        elif isinstance(event, RequestFinished):
            self._finish(event)

    def close(self) -> None:
        """The log ended: draw what is still open up to the end of the window."""
        self._crash_before(self.window.end_ns + 1)
        self._end_run()
        self._end_stays(self.window.end_ns)

    def _crash_before(self, now: int) -> None:
        while self.crashes and self.crashes[0] < now:
            at_ns = self.crashes.pop(0)
            self._end_stays(at_ns)
            self.prompts.clear()
            self._count_waiting(at_ns, -self.num_waiting)

    def _step(self, step: StepFinished) -> None:
        held = prefill_context(step, self.prompts)
        for request_id, _, _ in step.prefills:
            if stay := self.stays.get(request_id):
                stay.chunk_end_ns = step.end_ns
        run = self.run
        same_batch = run is not None and not step.prefills and step.num_decodes == run.num_decodes
        if run is not None and same_batch and step.start_ns == run.end_ns:
            self.run = replace(run, end_ns=step.end_ns)
            self.run_steps += step.num_steps
            return
        self._end_run()
        if step.prefills:
            self._draw_step(step, step.num_steps, held)
        else:
            self.run, self.run_steps, self.run_held = step, step.num_steps, held

    def _end_run(self) -> None:
        if self.run is not None:
            self._draw_step(self.run, self.run_steps, self.run_held)
            self.run = None

    def _draw_step(self, step: StepFinished, num_steps: int, prefill_tokens: int) -> None:
        start, end = max(step.start_ns, self.window.start_ns), min(step.end_ns, self.window.end_ns)
        if start >= end:
            return
        phase = phase_of(step)
        details = {
            "step": step.step_id,
            "steps": num_steps,
            "prefill_tokens": sum(num_tokens for _, _, num_tokens in step.prefills),
            "prompts": ", ".join(request_id for request_id, _, _ in step.prefills[:8]),
            "decodes": step.num_decodes,
            "decode_context": step.decode_context,
            "predicted_ms": step.predicted_ns / 1e6,
        }
        self.out.append(
            self._base("X", phase, start, tid=STEPS_LANE, dur=(end - start) / 1000, cname=COLOURS[phase], args=details)
        )
        self._counter("batch", start, {"decode": step.num_decodes, "prefill": len(step.prefills)})
        self._counter("KV tokens", start, {"decode": step.decode_context, "prefill": prefill_tokens})

    def _finish(self, event: RequestFinished) -> None:
        stay = self.stays.get(event.request_id)
        self.prompts.pop(event.request_id, None)
        if stay is None:  # refused on arrival
            return
        self._end_recomputation(event.request_id)
        if stay.name in ("queue", "swapped"):
            self._count_waiting(event.time_ns, -1)
        self._move(event.request_id, "", event.time_ns)
        self._slice(event.request_id, WHOLE, stay.queued_ns, event.time_ns)
        del self.stays[event.request_id]

    def _end_stays(self, now: int) -> None:
        for request_id, stay in self.stays.items():
            self._slice(request_id, stay.name, stay.since_ns, now)
            self._slice(request_id, WHOLE, stay.queued_ns, now)
        self.stays.clear()

    def _end_recomputation(self, request_id: str) -> None:
        """Only the first prefill of a request ends with an event; a later one ended with its last chunk."""
        stay = self.stays.get(request_id)
        if stay is not None and stay.name == "prefill" and stay.chunk_end_ns > stay.since_ns:
            self.prompts.pop(request_id, None)
            self._move(request_id, "decode", stay.chunk_end_ns)

    def _move(self, request_id: str, name: str, now: int) -> None:
        stay = self.stays.get(request_id)
        if stay is None:
            return
        self._slice(request_id, stay.name, stay.since_ns, now)
        stay.name, stay.since_ns = name, now

    def _slice(self, request_id: str, name: str, start: int, end: int) -> None:
        start, end = max(start, self.window.start_ns), min(end, self.window.end_ns)
        if start < end:
            own = {"cat": "request", "id": request_id}
            self.out.append(self._base("b", name, start, **own, args={"request": request_id}))
            self.out.append(self._base("e", name, end, **own))

    def _count_waiting(self, now: int, change: int) -> None:
        self.num_waiting += change
        self._counter("waiting", now, {"requests": self.num_waiting})

    def _counter(self, name: str, now: int, values: dict[str, int]) -> None:
        if self.window.start_ns <= now <= self.window.end_ns:
            self.out.append(self._base("C", name, now, args=values))

    def _base(self, kind: str, name: str, now: int, **more: Any) -> TraceEvent:
        return {"ph": kind, "name": name, "pid": self.replica + 1, "ts": now / 1000, **more}


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
    replicas = sorted({one["pid"] for one in drawn})
    named = [entry for pid in replicas for entry in _names(pid, has_faults=any(f.replica + 1 == pid for f in faults))]
    about = {"tool": "diptych simulate", "note": note}
    return {"traceEvents": named + drawn, "displayTimeUnit": "ms", "otherData": about}, note


def _draw(log: Sequence[LoggedEvent], faults: Sequence[Fault], window: Window) -> list[TraceEvent]:
    lanes: dict[int, _Lane] = {}
    for fault in sorted(faults, key=lambda one: one.at_ns):
        lane = lanes.setdefault(fault.replica, _Lane(fault.replica, window))
        lane.fault(fault)
    for replica, event in log:
        if replica >= 0:  # what the front end notes of lost requests follows from the crashes
            lanes.setdefault(replica, _Lane(replica, window)).event(event)
    for lane in lanes.values():
        lane.close()
    drawn = [one for lane in lanes.values() for one in lane.out]
    return sorted(drawn, key=_place)


def _place(event: TraceEvent) -> tuple[float, int, int]:
    """In order of time; at one time inner slices end before outer ones, and outer ones begin before inner ones."""
    is_whole = event["name"] == WHOLE
    rank = {"e": 1 if is_whole else 0, "b": 2 if is_whole else 3}.get(event["ph"], 3)
    return event["ts"], event["pid"], rank


def _names(pid: int, *, has_faults: bool) -> list[TraceEvent]:
    def meta(name: str, value: dict[str, Any], tid: int = 0) -> TraceEvent:
        return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": value}

    entries = [
        meta("process_name", {"name": f"replica {pid - 1}"}),
        meta("process_sort_index", {"sort_index": pid}),
        meta("thread_name", {"name": "steps"}, STEPS_LANE),
    ]
    return [*entries, meta("thread_name", {"name": "faults"}, FAULTS_LANE)] if has_faults else entries
