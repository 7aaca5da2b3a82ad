"""Turns events into rows and histograms as they happen; keeps no event."""

from diptych.control.events import (
    Event,
    FirstToken,
    RequestFinished,
    RequestPreempted,
    RequestRested,
    RequestResumed,
    StepFinished,
)
from diptych.control.step import SchedulerOutput
from diptych.simulation.results import GapHistogram, RequestTable, WorkerUsage


class _Streams:
    """The gaps between tokens on one worker, from what each step did to the batch as a whole."""

    __slots__ = ("joined", "last_token_ns", "preempted", "resumed")

    def __init__(self) -> None:
        self.last_token_ns = 0  # when the batch last gave tokens
        self.joined: dict[str, int] = {}  # since then: request -> time of its newest token
        self.preempted: dict[str, int] = {}  # request -> time of its newest token
        self.resumed: list[int] = []  # times of the newest tokens of those that came back from the host tier


class Collector:
    """Listens to every worker."""

    def __init__(self, num_workers: int) -> None:
        self.requests = RequestTable()
        self.gaps = GapHistogram()
        self._streams = [_Streams() for _ in range(num_workers)]
        self._handoffs: dict[str, int] = {}  # attempt that one worker prefills and another decodes -> its first token
        self._interrupted: dict[str, int] = {}  # attempt that goes on with an answer -> when its newest token came

    def expect_handoff(self, attempt_id: str) -> None:
        """The attempt will go on elsewhere after its first token."""
        self._handoffs[attempt_id] = -1

    def restart(self, old_attempt: str, new_attempt: str, last_token_ns: int) -> None:
        """The request is tried again. last_token_ns: when its newest token came (-1: it has none)."""
        self._handoffs.pop(old_attempt, None)
        self._interrupted.pop(old_attempt, None)
        if last_token_ns >= 0:
            self._interrupted[new_attempt] = last_token_ns

    def last_token_ns(self, worker: int) -> int:
        """When the decode batch of a worker last gave tokens."""
        return self._streams[worker].last_token_ns

    def take(self, worker: int, events: list[Event], output: SchedulerOutput | None, usage: WorkerUsage) -> None:
        """Count what one worker reports, except who finished (see ``add_row``); ``output``: the plan that ended."""
        streams = self._streams[worker]
        for event in events:
            if type(event) is StepFinished:
                self._step(streams, event, output)
            elif type(event) is FirstToken:
                if self._interrupted and event.request_id in self._interrupted:
                    self.gaps.add(event.time_ns - self._interrupted.pop(event.request_id), 1)
                if event.request_id in self._handoffs:
                    self._handoffs[event.request_id] = event.time_ns
                else:
                    streams.joined[event.request_id] = event.time_ns
            elif type(event) is RequestPreempted and event.is_stream:
                usage.num_preemptions += 1
                streams.preempted.setdefault(event.request_id, streams.last_token_ns)
            elif type(event) is RequestRested:
                streams.preempted[event.request_id] = streams.joined.pop(event.request_id, streams.last_token_ns)
            elif type(event) is RequestResumed:
                streams.resumed.append(streams.preempted.pop(event.request_id, streams.last_token_ns))
            elif type(event) is RequestFinished and streams.preempted:
                streams.preempted.pop(event.request_id, None)

    def _step(self, streams: _Streams, step: StepFinished, output: SchedulerOutput | None) -> None:
        if output is not None and output.resumed and self._handoffs:
            taken = [
                self._handoffs.pop(request.request_id)
                for request in output.resumed
                if request.request_id in self._handoffs
            ]
            streams.resumed.extend(taken)
        if step.num_decodes:
            self._decode(streams, step)
        if streams.preempted and output is not None:  # one that was preempted has been computed again: its next token
            for chunk in output.prefills:
                if chunk.is_last and chunk.request_id in streams.preempted:
                    self.gaps.add(step.end_ns - streams.preempted.pop(chunk.request_id), 1)
                    streams.joined[chunk.request_id] = step.end_ns

    def _decode(self, streams: _Streams, step: StepFinished) -> None:
        """The first step of a run ends the pause since each member's newest token; the others follow at once."""
        duration = step.end_ns - step.start_ns
        mean = duration // step.num_steps
        first_end = step.start_ns + mean
        old = step.num_decodes
        joined, resumed = streams.joined, streams.resumed
        if joined:
            for time_ns in joined.values():
                if time_ns != step.end_ns:  # who joins with this very step takes no token in it
                    self.gaps.add(first_end - time_ns, 1)
                    old -= 1
            streams.joined = {name: time_ns for name, time_ns in joined.items() if time_ns == step.end_ns}
        if resumed:
            for time_ns in resumed:
                self.gaps.add(first_end - time_ns, 1)
            old -= len(resumed)
            resumed.clear()
        if old > 0:
            self.gaps.add(first_end - streams.last_token_ns, old)
        if step.num_steps > 1:
            self.gaps.add(mean, step.num_decodes * (step.num_steps - 1))
        streams.last_token_ns = step.end_ns

    def add_row(
        self, event: RequestFinished, number: int, arrival_ns: int, worker: int, kind: str, attempt_id: str = ""
    ) -> None:
        """The one terminal event of a request, whose current attempt this is."""
        if self._handoffs:
            self._handoffs.pop(attempt_id, None)
        if self._interrupted:
            self._interrupted.pop(attempt_id, None)
        self.requests.add(event, number, arrival_ns, worker=worker, kind=kind)
