"""A small simulation as something to play back: the records of the live timeline, and every request's own line.

Owns how an event log becomes the records that ``GET /timeline`` sends (diptych.timeline.records has their shape) and
the spans of each request's life. Must never decide what is simulated (panels/) and never draw.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec

from diptych.control.events import (
    Event,
    FirstToken,
    HandoffDelivered,
    HandoffReserved,
    RequestFinished,
    StepFinished,
)
from diptych.control.slo import NS_PER_MS
from diptych.simulation.event_log import EventLog
from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
from diptych.simulation.results import RequestTable
from diptych.simulation.scenario import Scenario
from diptych.timeline.lanes import phase_of, time_of
from diptych.timeline.records import (
    Milestone,
    Record,
    TransferRecord,
    WorkerRecord,
    request_record,
    split_attempt_id,
    step_record,
)
from diptych.timeline.roster import Roster
from diptych.workload.spec import ClosedLoop, RequestSpec, Workload

VERSION = 1
STREAM = "stream"  # the kind of requests that are being answered when a scenario begins

Names = Mapping[str, str]  # request id of the simulation -> what the reader sees


@dataclass(slots=True)
class RequestPlayback:
    """One request's life as spans (phase, start, end, worker, steps), in order of time, in nanoseconds. phase:
    queued, prefill, transfer, decode, mixed or stalled. stamps: when its tokens came."""

    name: str
    arrival_ns: int
    spans: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)
    first_token_ns: int = -1
    handoff: tuple[int, int] = (-1, -1)  # from the first token to the decode worker going on
    handed_over_ns: set[int] = field(default_factory=set)  # the tokens after which it was handed over
    end_ns: int = -1

    def add(self, phase: str, start_ns: int, end_ns: int, worker: int) -> None:
        """Add a span in which the request was in this phase; what lies between this and the last span is waiting of
        some kind."""
        last_ns = self.spans[-1][2] if self.spans else self.arrival_ns
        if start_ns > last_ns:
            self._wait(last_ns, start_ns, worker)
        start_ns = max(start_ns, last_ns)
        if end_ns > start_ns:
            self._put(phase, start_ns, end_ns, worker, 1)

    def longest_gap_ns(self, since_ns: int = 0) -> int:
        """The longest gap between two tokens in a row, the first of them at ``since_ns`` or later; 0 with fewer than
        two. A pause for a handoff is none of them."""
        stamps = [stamp for stamp in self.stamps if stamp >= since_ns]
        gaps = pairwise(stamps)
        return max((later - earlier for earlier, later in gaps if earlier not in self.handed_over_ns), default=0)

    def handoff_pause_ns(self) -> int:
        """The longest time without a token because another worker was taking over; 0: it was not handed over."""
        gaps = pairwise(self.stamps)
        return max((later - earlier for earlier, later in gaps if earlier in self.handed_over_ns), default=0)

    def stalled_ns(self, since_ns: int = 0) -> int:
        """How long it stood still after ``since_ns``."""
        return sum(
            end - max(start, since_ns) for kind, start, end, _, _ in self.spans if kind == "stalled" and end > since_ns
        )

    def _wait(self, start_ns: int, end_ns: int, worker: int) -> None:
        if self.first_token_ns < 0 or start_ns < self.first_token_ns:
            self._put("queued", start_ns, end_ns, worker, 0)
            return
        begin, end = self.handoff  # until it joins the decode worker's next step, it is being handed over
        self._put("transfer" if begin <= start_ns <= end else "stalled", start_ns, end_ns, worker, 0)

    def _put(self, phase: str, start_ns: int, end_ns: int, worker: int, steps: int) -> None:
        if self.spans and phase not in ("prefill", "mixed"):
            kind, begin, stop, where, count = self.spans[-1]
            if (kind, stop, where) == (phase, start_ns, worker):
                self.spans[-1] = (kind, begin, end_ns, where, count + steps)
                return
        self.spans.append((phase, start_ns, end_ns, worker, steps))


@dataclass(slots=True)
class Playback:
    """What a scenario gave. lines: by name, in order of arrival."""

    scenario: Scenario
    table: RequestTable
    records: list[Record]
    lines: dict[str, RequestPlayback]

    def to_json(self) -> dict[str, Any]:
        """Plain data for a page: ``header``, ``lanes``, ``records`` and ``requests``, times in nanoseconds."""
        roles = _roles(self.scenario)
        header = {
            "kind": "header",
            "version": VERSION,
            "run_id": "guide",
            "unix_ns_at_zero": 0,
            "now_ns": self.end_ns,
            "first_sequence": 1,
            "next_sequence": len(self.records) + 1,
            "workers": {number: {"state": "ready", "role": role} for number, role in enumerate(roles)},
            "decoding": {},
        }
        return {
            "header": header,
            "lanes": [{"id": number, "label": label(roles, number), "role": role} for number, role in enumerate(roles)],
            "records": msgspec.to_builtins(self.records),
            "requests": [self._request(row) for row in self._rows()],
            "end_ns": self.end_ns,
        }

    @property
    def begun_ns(self) -> int:
        """When the last of the streams had its first token: gaps before are not the prompts' doing."""
        streams = self.scenario.workload
        firsts = [
            line.first_token_ns
            for line, spec in zip(self.lines.values(), _specs(streams), strict=True)
            if spec.kind == STREAM
        ]
        return max(firsts, default=0)

    @property
    def end_ns(self) -> int:
        """End of the last step, in nanoseconds."""
        return max((record.end_ns for record in self.records if hasattr(record, "end_ns")), default=0)

    def _rows(self) -> list[int]:
        table = self.table
        return sorted(range(len(table)), key=lambda row: table.number[row])

    def _request(self, row: int) -> dict[str, Any]:
        table = self.table
        line = list(self.lines.values())[table.number[row]]
        tpot_ns = table.tpot_ns(row)
        return {
            "name": line.name,
            "kind": table.kind[row],
            "arrival_ns": line.arrival_ns,
            "prompt_tokens": table.prompt_tokens[row],
            "output_tokens": table.output_tokens[row],
            "queue_ms": table.queue_ns[row] / NS_PER_MS,
            "prefill_ms": table.prefill_ns[row] / NS_PER_MS,
            "handoff_ms": table.handoff_ns[row] / NS_PER_MS,
            "decode_ms": table.decode_ns[row] / NS_PER_MS,
            "ttft_ms": table.ttft_ns(row) / NS_PER_MS,
            "tpot_ms": None if tpot_ns is None else tpot_ns / NS_PER_MS,
            "longest_gap_ms": line.longest_gap_ns(self.begun_ns) / NS_PER_MS,
            "handoff_pause_ms": line.handoff_pause_ns() / NS_PER_MS or None,
            "stalled_ms": line.stalled_ns(self.begun_ns) / NS_PER_MS,
            "completed": table.is_completed(row),
            "slo_met": {1: True, 0: False}.get(table.slo_met[row]),
            "spans": [list(span) for span in line.spans],
        }


class StepLog(EventLog):
    """Every step as an event of its own, where the usual log holds a run of decode steps as one."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[int, Event]] = []

    def extend(self, worker: int, events: list[Event]) -> None:
        self._events.extend((worker, event) for event in events)

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        return iter(sorted(self._events, key=lambda entry: (time_of(entry[1]), entry[0])))


def play(scenario: Scenario, names: Sequence[str], arrivals_ns: Sequence[int]) -> Playback:
    """Simulate and write down what happened. names, arrivals_ns: of the requests, in order of arrival."""
    cluster = SimulatedCluster(replace(scenario, record_events=False, fast_forward=False))
    log = cluster.log = StepLog()
    cluster.run()
    lines = {name: RequestPlayback(name, arrival) for name, arrival in zip(names, arrivals_ns, strict=True)}
    writer = _Writer({str(number): name for number, name in enumerate(names)}, lines, scenario)
    return Playback(scenario, cluster.collector.requests, writer.write(list(log)), lines)


def _specs(workload: Workload | ClosedLoop) -> list[RequestSpec]:
    assert not isinstance(workload, ClosedLoop)
    return list(workload)


def label(roles: Sequence[str], number: int) -> str:
    """What a worker is called on a page: "worker 1", "prefill 2"."""
    role = roles[number]
    place = sum(other == role for other in roles[: number + 1])
    return f"worker {place}" if role == "both" else f"{role} {place}"


def _roles(scenario: Scenario) -> list[str]:
    pools = scenario.pools
    if pools is None:
        return ["both"] * scenario.num_workers
    return [pools.role(number) for number in range(pools.num_workers)]


class _Writer:
    """Walks a log once."""

    def __init__(self, names: Names, lines: dict[str, RequestPlayback], scenario: Scenario) -> None:
        self._names = names
        self._lines = lines
        self._scenario = scenario
        self._records: list[Record] = []
        self._rosters: dict[int, Roster] = {}
        self._receivers: dict[str, tuple[int, int]] = {}  # attempt -> decode worker, tokens that it had already
        self._chunks: dict[str, tuple[int, int]] = {}  # attempt -> end of the first chunk, worker that computed it
        self._computed: dict[str, int] = {}  # attempt -> tokens of its prompt that are there
        self._first_tokens: dict[str, int] = {}

    def write(self, log: Sequence[tuple[int, Event]]) -> list[Record]:
        """Records in order of time."""
        lives = list(self._lives())
        for worker, event in log:
            while lives and lives[0].time_ns <= time_of(event):
                self._life(lives.pop(0))
            if isinstance(event, StepFinished):
                named = tuple((self._name(attempt_id), start, count) for attempt_id, start, count in event.prefills)
                self._step(worker, replace(event, prefills=named))
            elif isinstance(event, Milestone) and worker >= 0:
                self._milestone(worker, replace(event, request_id=self._name(event.request_id)))
        for life in lives:
            self._life(life)
        return self._records

    def _name(self, attempt_id: str) -> str:
        own, _ = split_attempt_id(attempt_id)
        return self._names[own] + attempt_id[len(own) :]

    def _line(self, attempt_id: str) -> RequestPlayback:
        return self._lines[split_attempt_id(attempt_id)[0]]

    def _roster(self, worker: int) -> Roster:
        return self._rosters.setdefault(worker, Roster())

    def _step(self, worker: int, step: StepFinished) -> None:
        roster = self._roster(worker)
        self._records.append(step_record(self._next, worker, step, roster.step(step)))
        for attempt_id, start, num_tokens in step.prefills:
            self._line(attempt_id).add("prefill", step.start_ns, step.end_ns, worker)
            self._chunks.setdefault(attempt_id, (step.end_ns, worker))
            self._computed[attempt_id] = start + num_tokens
        phase = phase_of(step) if step.num_decodes else "stalled"
        for attempt_id in roster.members:
            line = self._line(attempt_id)
            line.add(phase, step.start_ns, step.end_ns, worker)
            if step.num_decodes:
                line.stamps.append(step.end_ns)

    def _milestone(self, worker: int, event: Any) -> None:
        roster, attempt_id = self._roster(worker), event.request_id
        line = self._line(attempt_id)
        if isinstance(event, FirstToken):
            self._first_tokens[attempt_id] = event.time_ns
            if line.first_token_ns < 0:
                line.first_token_ns = event.time_ns
            line.stamps.append(event.time_ns)
            if self._receivers.get(attempt_id, (worker, 0))[0] == worker:
                roster.join(attempt_id, event.time_ns)
        elif isinstance(event, HandoffReserved):
            self._receivers[attempt_id] = (worker, event.num_cached_tokens)
        else:
            roster.note(event)
        if isinstance(event, HandoffDelivered):
            self._transfer(worker, event)
        if isinstance(event, RequestFinished) and event.latency.num_output_tokens:
            line.end_ns = event.time_ns
        self._records.append(request_record(self._next, worker, event))

    def _transfer(self, worker: int, event: HandoffDelivered) -> None:
        """KV has arrived: it began to travel when the first chunk was computed."""
        attempt_id = event.request_id
        begun_ns, sender = self._chunks.get(attempt_id, (event.time_ns, worker))
        prefilled_ns = self._first_tokens.get(attempt_id, begun_ns)
        pools = self._scenario.pools
        assert pools is not None
        own, epoch = split_attempt_id(attempt_id)
        line = self._line(attempt_id)
        line.handoff = (prefilled_ns, event.time_ns)
        line.handed_over_ns.add(prefilled_ns)
        num_tokens = self._computed.get(attempt_id, 0) - self._receivers[attempt_id][1]
        num_bytes = 0 if pools.num_hosts else num_tokens * pools.kv_bytes_per_token
        exposed_ns = event.time_ns - prefilled_ns
        self._records.append(
            TransferRecord(self._next, worker, sender, own, num_bytes, begun_ns, event.time_ns, exposed_ns, epoch)
        )

    def _lives(self) -> Iterator[WorkerRecord]:
        """What becomes of the workers' processes: those that crash are back when the fault is over."""
        found = []
        for number, role in enumerate(_roles(self._scenario)):
            found.append(WorkerRecord(0, number, 0, "ready", role))
        for fault in self._scenario.faults:
            if fault.kind == "crash":
                back_ns = fault.at_ns + max(fault.duration_ns, self._scenario.watch.detection_ns + 1)
                role = _roles(self._scenario)[fault.worker]
                found.append(WorkerRecord(0, fault.worker, fault.at_ns, "lost", role, "killed"))
                found.append(WorkerRecord(0, fault.worker, back_ns, "ready", role))
        return iter(sorted(found, key=lambda record: record.time_ns))

    def _life(self, record: WorkerRecord) -> None:
        left: tuple[str, ...] = ()
        if record.state == "lost":
            left = tuple(split_attempt_id(attempt_id)[0] for attempt_id in self._roster(record.worker).clear())
        self._records.append(msgspec.structs.replace(record, sequence=self._next, left=left))

    @property
    def _next(self) -> int:
        return len(self._records) + 1
