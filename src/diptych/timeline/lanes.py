"""One worker's events as trace events: a slice per step, counters, and each request as nested asynchronous slices.

Owns the drawing ("Trace Event Format", JSON Object Format: times in microseconds). Must never read a clock or write a
file, and take events in the order of their times.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from diptych.control.events import (
    Event,
    FirstToken,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestRested,
    RequestResumed,
    StepBegun,
    StepFinished,
)
from diptych.control.slo import NS_PER_MS

STEPS_LANE, FAULTS_LANE = 1, 2
WAITING = ("queue", "swapped", "resting")  # parts of a life in which it computes nothing
WHOLE = "request"  # the slice around queue, prefill and decode
COLOURS = {"prefill": "thread_state_iowait", "decode": "thread_state_running", "mixed": "rail_animation"}
COUNTER_INTERVAL_NS = 100 * NS_PER_MS  # between two readings of a counter while the batch stays the same
_UNHEARD = -(2**62)

TraceEvent = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Window:
    """The part of the time to draw, in nanoseconds."""

    start_ns: int = 0
    end_ns: int = 2**62


@dataclass(slots=True)
class _WorkerStay:
    """A request on its worker: the slice that is open and since when."""

    name: str
    since_ns: int
    arrived_ns: int
    chunk_end_ns: int = 0  # end of its newest prefill chunk


def phase_of(step: StepBegun | StepFinished) -> str:
    """Which kind of step it is: prefill, decode or mixed."""
    if not step.prefills:
        return "decode"
    return "mixed" if step.num_decodes else "prefill"


def prefill_context(step: StepFinished, prompts: dict[str, int]) -> int:
    """Tokens of prompts in the cache during a step; notes the progress of those in ``prompts``. A prompt that ended
    with this step is not there any more (its FirstToken comes before), nor is one that is computed once more."""
    held = sum(prompts.values())
    for request_id, start, num_tokens in step.prefills:
        held += start + num_tokens - prompts.get(request_id, 0)
        if request_id in prompts:
            prompts[request_id] = start + num_tokens
    return held


def time_of(event: Event) -> int:
    """When it happened: for a step, its end."""
    return event.end_ns if isinstance(event, StepFinished) else event.time_ns


@dataclass(slots=True)
class Lane:
    """What one worker's slices and counters need to remember. ``out`` holds what is drawn so far.

    receivers: attempt -> the worker that reserved blocks for it, shared by all lanes of a trace. joins_runs: decode
    steps in a row with the same batch become one slice (a simulation takes many at once); else every step is a slice.
    """

    worker: int
    window: Window
    receivers: dict[str, int] = field(default_factory=dict)
    joins_runs: bool = True
    out: list[TraceEvent] = field(default_factory=list)
    crashes: list[int] = field(default_factory=list)  # times to come, ascending
    _stays: dict[str, _WorkerStay] = field(default_factory=dict)
    _num_waiting: int = 0
    _prompts: dict[str, int] = field(default_factory=dict)
    _run: StepFinished | None = None  # decode steps in a row, drawn as one slice
    _run_steps: int = 0
    _run_held: int = 0
    _counted: tuple[int, int] = (-1, -1)  # decodes and prefills of the newest reading of the counters
    _counted_ns: int = _UNHEARD

    def begin(self, request_id: str, name: str, now: int) -> None:
        """A request is here, in the part of its life called ``name``: queue, reserved, or (when nothing is known of
        what was before) decode."""
        self._stays[request_id] = _WorkerStay(name, now, now)

    def mark(self, name: str, start_ns: int, end_ns: int, details: dict[str, Any]) -> None:
        """Draw something that befell the whole worker."""
        start, end = max(start_ns, self.window.start_ns), min(end_ns, self.window.end_ns)
        if start < end:
            more = {"tid": FAULTS_LANE, "dur": (end - start) / 1000, "cname": "terrible"}
            self.out.append(self._base("X", name, start, **more, args=details))

    def event(self, event: Event) -> None:
        """Take in one event."""
        self._crash_before(time_of(event))
        if isinstance(event, StepFinished):
            self._step(event)
        elif isinstance(event, RequestQueued):
            self.begin(event.request_id, "queue", event.time_ns)
            self._count_waiting(event.time_ns, 1)
        elif isinstance(event, RequestAdmitted):
            if event.is_first:
                self._prompts[event.request_id] = event.num_cached_tokens
            self._leave_queue(event.request_id, "prefill", event.time_ns)
        elif isinstance(event, FirstToken):
            self._prompts.pop(event.request_id, None)
            is_given_away = self.receivers.get(event.request_id, self.worker) != self.worker
            self._move(event.request_id, "handoff" if is_given_away else "decode", event.time_ns)
        elif isinstance(event, RequestPreempted):
            if event.is_stream:
                self._end_recomputation(event.request_id)
            self._wait(event.request_id, "swapped" if event.swapped else "queue", event.time_ns)
        elif isinstance(event, RequestRested):
            self._wait(event.request_id, "resting", event.time_ns)
        elif isinstance(event, RequestResumed):
            self._leave_queue(event.request_id, "decode", event.time_ns)
        elif isinstance(event, HandoffReserved):
            self.receivers[event.request_id] = self.worker
            self.begin(event.request_id, "reserved", event.time_ns)
        elif isinstance(event, HandoffDelivered):
            self._move(event.request_id, "decode", event.time_ns)
        elif isinstance(event, RequestFinished | HandoffReleased | HandoffExpired):
            self._finish(event.request_id, event.time_ns)

    def crash(self, now: int) -> None:
        """Whatever was here is lost."""
        self._end_run()
        self._end_stays(now)
        self._prompts.clear()
        self._count_waiting(now, -self._num_waiting)

    def close(self) -> None:
        """Nothing more comes: draw what is still open up to the end of the window."""
        self._crash_before(self.window.end_ns + 1)
        self._end_run()
        self._end_stays(self.window.end_ns)

    def _crash_before(self, now: int) -> None:
        while self.crashes and self.crashes[0] < now:
            self.crash(self.crashes.pop(0))

    def _step(self, step: StepFinished) -> None:
        held = prefill_context(step, self._prompts)
        for request_id, _, _ in step.prefills:
            if stay := self._stays.get(request_id):
                stay.chunk_end_ns = step.end_ns
        run = self._run
        is_plain = not step.prefills and not step.extra
        same_batch = run is not None and is_plain and step.num_decodes == run.num_decodes
        if run is not None and same_batch and step.start_ns == run.end_ns:
            self._run = replace(run, end_ns=step.end_ns)
            self._run_steps += step.num_steps
            return
        self._end_run()
        if not is_plain or not self.joins_runs:
            self._draw_step(step, step.num_steps, held)
        else:
            self._run, self._run_steps, self._run_held = step, step.num_steps, held

    def _end_run(self) -> None:
        if self._run is not None:
            self._draw_step(self._run, self._run_steps, self._run_held)
            self._run = None

    def _draw_step(self, step: StepFinished, num_steps: int, prefill_tokens: int) -> None:
        start, end = max(step.start_ns, self.window.start_ns), min(step.end_ns, self.window.end_ns)
        if start >= end:
            return
        phase = phase_of(step)
        details = {
            "step": step.step_id,
            "steps": num_steps,
            "prefill_tokens": sum(num_tokens for _, _, num_tokens in step.prefills),
            "prompts": ", ".join(request_id for request_id, _, _ in step.prefills[:8] if request_id),
            "decodes": step.num_decodes,
            "decode_context": step.decode_context,
            "predicted_ms": step.predicted_ns / 1e6,
        }
        if step.extra:
            details["guessed_tokens"] = sum(extra.num_tokens for extra in step.extra)
            details["guessed_right"] = step.num_extra_tokens
        self.out.append(
            self._base("X", phase, start, tid=STEPS_LANE, dur=(end - start) / 1000, cname=COLOURS[phase], args=details)
        )
        batch = (step.num_decodes, len(step.prefills))
        if self.joins_runs or batch != self._counted or start - self._counted_ns >= COUNTER_INTERVAL_NS:
            self._counted, self._counted_ns = batch, start
            self._counter("batch", start, {"decode": step.num_decodes, "prefill": len(step.prefills)})
            self._counter("KV tokens", start, {"decode": step.decode_context, "prefill": prefill_tokens})

    def _finish(self, request_id: str, now: int) -> None:
        stay = self._stays.get(request_id)
        self._prompts.pop(request_id, None)
        if stay is None:  # refused on arrival, or known elsewhere only
            return
        self._end_recomputation(request_id)
        if stay.name in WAITING:
            self._count_waiting(now, -1)
        self._move(request_id, "", now)
        self._slice(request_id, WHOLE, stay.arrived_ns, now)
        del self._stays[request_id]

    def _end_stays(self, now: int) -> None:
        for request_id, stay in self._stays.items():
            self._slice(request_id, stay.name, stay.since_ns, now)
            self._slice(request_id, WHOLE, stay.arrived_ns, now)
        self._stays.clear()

    def _end_recomputation(self, request_id: str) -> None:
        """Only the first prefill of a request ends with an event; a later one ended with its last chunk."""
        stay = self._stays.get(request_id)
        if stay is not None and stay.name == "prefill" and stay.chunk_end_ns > stay.since_ns:
            self._prompts.pop(request_id, None)
            self._move(request_id, "decode", stay.chunk_end_ns)

    def _wait(self, request_id: str, name: str, now: int) -> None:
        """Let a request wait from now on, if it does not yet."""
        stay = self._stays.get(request_id)
        if stay is not None and stay.name not in WAITING:
            self._count_waiting(now, 1)
        self._move(request_id, name, now)

    def _leave_queue(self, request_id: str, name: str, now: int) -> None:
        if self._move(request_id, name, now):
            self._count_waiting(now, -1)

    def _move(self, request_id: str, name: str, now: int) -> bool:
        """Begin the next part of a request's life; False when nothing is known of it."""
        stay = self._stays.get(request_id)
        if stay is None:
            return False
        self._slice(request_id, stay.name, stay.since_ns, now)
        stay.name, stay.since_ns = name, now
        return True

    def _slice(self, request_id: str, name: str, start: int, end: int) -> None:
        start, end = max(start, self.window.start_ns), min(end, self.window.end_ns)
        if start < end:
            own = {"cat": f"request@{self.worker}", "id": request_id}  # two workers may hold it at once
            self.out.append(self._base("b", name, start, **own, args={"request": request_id}))
            self.out.append(self._base("e", name, end, **own))

    def _count_waiting(self, now: int, change: int) -> None:
        self._num_waiting += change
        self._counter("waiting", now, {"requests": self._num_waiting})

    def _counter(self, name: str, now: int, values: dict[str, int]) -> None:
        if self.window.start_ns <= now <= self.window.end_ns:
            self.out.append(self._base("C", name, now, args=values))

    def _base(self, kind: str, name: str, now: int, **more: Any) -> TraceEvent:
        return {"ph": kind, "name": name, "pid": self.worker + 1, "ts": now / 1000, **more}
