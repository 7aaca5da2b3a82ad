"""Replay of a worker: a fresh engine gets what a live one got, at the same times, and must decide the same.

Only its public methods are called, and only with inputs of the recording.
"""

from base64 import b64decode
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from diptych.control.config import EngineConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.kvcache.tier_records import TIER_EVENTS, DiskContents, TierEvent
from diptych.control.engine.recording import FORMAT, VERSION, DecisionChain, measured_steps, plan_summary
from diptych.control.errors import ConfigError, RequestError
from diptych.control.events import Event, RequestFinished, StepFinished
from diptych.control.request import FinishReason, PeerRun, Request, RequestOptions, WaitClass
from diptych.control.slo import Slo
from diptych.control.step import DraftProposal, SchedulerOutput, StepFeatures, StepResult, VerifyResult
from diptych.simulation.collector import Collector
from diptych.simulation.recordings import read_recording
from diptych.simulation.results import GapHistogram, RequestTable, SimulationResult, WorkerUsage

READABLE = (3, 4, 5, 6, 7, 8, 9, 10, VERSION)  # versions
BEST_EFFORT_SINCE = 8  # the first version in which class batch does
HAS_GROUPS = 10  # the first version in which a request has a block table for each group
PARTS = ("finished", "paused", "swapped out", "swapped in", "resumed", "new blocks")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that was not the same. ``explanation`` names the field that differs, in words."""

    line: int  # of the recording, from 1
    time_ns: int
    expected: str
    actual: str
    explanation: str


@dataclass(slots=True)
class ReplayReport:
    """What came out of a replay. ``result`` describes the requests and steps up to the first difference, with the
    clock at 0 at the first input. is_complete: the recording has its closing line. terms_ns: of the step-time model at
    its end."""

    path: Path
    diptych: str  # version that wrote it
    config: EngineConfig
    num_steps: int = 0  # plans compared
    num_refused: int = 0
    num_aborted: int = 0
    is_complete: bool = False
    difference: Difference | None = None
    terms_ns: tuple[float, ...] = ()
    result: SimulationResult = field(default_factory=lambda: SimulationResult(RequestTable(), GapHistogram(), [], 0))

    @property
    def is_identical(self) -> bool:
        """Whether every decision was the same."""
        return self.difference is None


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """What ran in a recording: the worker's settings, its warm-up and its steps, each with its nanoseconds."""

    config: EngineConfig
    warm_up: list[tuple[StepFeatures, int]]
    steps: list[tuple[StepFeatures, int]]


def recorded_steps(path: Path) -> RecordedSteps:
    """The steps of a recording (see measured_steps). Raises ConfigError when the file is none."""
    recording = read_recording(path, {FORMAT: READABLE})
    rows = list(recording.rows())
    warm_up = [(StepFeatures(*row[1]), row[2]) for row in rows if row[0] == "observe"]
    config = msgspec.convert(recording.header["config"], EngineConfig)
    return RecordedSteps(config, warm_up, list(measured_steps(rows)))


def replay(path: str | Path, on_events: Callable[[list[Event]], None] | None = None) -> ReplayReport:
    """Give a fresh engine the inputs of the recording and compare every plan; ends at the first difference. on_events:
    called with what the engine reports.

    Raises ConfigError when the file is no recording.
    """
    recording = read_recording(Path(path), {FORMAT: READABLE})
    report = ReplayReport(recording.path, recording.diptych, msgspec.convert(recording.header["config"], EngineConfig))
    worker = _ReplayedEngine(report, on_events, recording.header["version"])
    for line, row in enumerate(recording.rows(), 2):
        try:
            difference = worker.apply(row, line)
        except ConfigError:
            raise
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            text = f"the worker could not take it: {type(error).__name__}: {error}"
            difference = Difference(line, worker.now, str(row[0]), type(error).__name__, text)
        if difference:
            report.difference = difference
            break
    worker.conclude()
    return report


class _ReplayedEngine:
    """A core on its way through a recording, and what it did."""

    def __init__(
        self,
        report: ReplayReport,
        on_events: Callable[[list[Event]], None] | None = None,
        version: int = VERSION,
    ) -> None:
        self._on_events = on_events
        self._version = version
        self.core = EngineCore(report.config)
        self.now = 0
        self._report = report
        self._chain = DecisionChain()
        self._start_ns: int | None = None
        self._under_way: deque[SchedulerOutput] = deque()  # two, where the next step was planned ahead
        self._usage = WorkerUsage(report.config.cache.num_blocks)
        self._ahead: set[str] = set()  # prompts that the next "add" is of
        self._numbers: dict[str, tuple[int, int]] = {}  # of requests in the worker: place of arrival, time of it
        self._num_arrivals = 0
        self._collector = Collector(1)

    def apply(self, row: list[Any], line: int) -> Difference | None:
        """One row; the difference that it showed, if any. Raises ConfigError for one that recordings do not have."""
        core, report = self.core, self._report
        match row:
            case ["begin", now, *plan]:
                self._tick(now)
                return self._begin(plan, line)
            case ["end", now, *fields]:
                self._tick(now)
                self._end(*fields)
            case ["add", *fields]:
                self._take(core.add_request(self._request(fields), self.now))
            case ["reserve", *fields]:
                request = self._request(fields)
                self._take(core.reserve(request, self.now, request.lease_ns))
            case ["deliver", now, request_id, first_step_ns, first_token_ns]:
                self._tick(now)
                times = {"first_step_ns": first_step_ns, "first_token_ns": first_token_ns}
                self._take(core.deliver(request_id, now, **times))
            case ["ahead", request_id]:
                self._ahead.add(request_id)
            case ["placed" | "expire" | "shrink" as kind, now, *fields]:
                self._tick(now)
                calls: dict[str, Callable[..., list[Event]]]
                calls = {"placed": core.place_found, "expire": core.expire, "shrink": core.shrink_cache}
                self._take(calls[kind](*fields, now))
            case ["release", now, request_id]:
                self._tick(now)
                self._take(core.release(request_id, now))
                self._forget(request_id)
            case ["drop", now, request_id, *reason]:
                self._tick(now)
                report.num_aborted += request_id in core.requests
                self._take(core.drop(request_id, now, FinishReason(*reason or ("abort",))))
                self._forget(request_id)
            case ["abort", now, request_id, reason]:
                self._tick(now)
                report.num_aborted += reason == FinishReason.ABORT
                self._take(core.abort(request_id, now, FinishReason(reason)))
            case ["renew", now, attempt_ids]:
                self._tick(now)
                core.renew(attempt_ids, now)
            case ["tier", now, name, fields]:
                self._tick(now)
                self.core.on_tier(tier_event(name, fields), now)
            case ["observe", features, duration_ns]:
                core.observe(StepFeatures(*features), duration_ns)
            case ["configure", scheduler]:
                core.configure(msgspec.convert(scheduler, SchedulerConfig))
            case ["rescale", ratio]:
                core.rescale(ratio)
            case ["refuse", *fields]:  # version 3
                return self._refuse(*fields, line=line)
            case ["closed", *_]:
                report.is_complete = True
            case _:
                raise ConfigError(f"line {line} of the recording is no known row: {str(row)[:60]}", param="path")
        return None

    def conclude(self) -> None:
        """Fill in what is known at the end."""
        result = self._report.result
        result.requests, result.gaps = self._collector.requests, self._collector.gaps
        result.duration_ns = self.now - (self._start_ns or 0)
        result.workers = [self._usage]
        self._report.terms_ns = self.core.model.coefficients

    def _tick(self, now: int) -> None:
        if self._start_ns is None:
            self._start_ns = now
        self.now = now

    def _request(self, fields: list[Any]) -> Request:
        """The request of an "add" or "reserve"; its time becomes now."""
        if len(fields) == 2:
            now, (request_id, num_prompt, max_tokens, hashes, options, reads, *handoff) = fields
            options = msgspec.convert(options, RequestOptions)
        else:  # version 3
            now, request_id, num_prompt, max_tokens, hashes, priority, ttft_ns, tpot_ns, reads, *handoff = fields
            slo = Slo(ttft_ns, tpot_ns) if ttft_ns or tpot_ns else None
            options = RequestOptions(priority=priority, slo=slo)
        self._tick(now)
        hashes = tuple(b64decode(block_hash) for block_hash in hashes)
        request = Request(
            request_id, num_prompt, max_tokens, block_hashes=hashes, options=options, reads_prefix_cache=reads
        )
        request.is_best_effort = self._version >= BEST_EFFORT_SINCE and options.is_best_effort
        request.hands_off, request.lease_ns, borrowed, request.num_remote_tokens, *more = handoff
        tables = borrowed if self._version >= HAS_GROUPS or not borrowed else [borrowed]
        request.remote_block_tables = tuple(tuple(block_ids) for block_ids in tables)
        request.is_early_prefill = request_id in self._ahead
        self._ahead.discard(request_id)
        request.wait_class_at_arrival = WaitClass(more[0]) if more else WaitClass.NEW  # unknown before version 5
        request.is_remote_prefill = more[1] if len(more) > 1 else False  # nothing came up for those before version 7
        request.peer_run = PeerRun(*more[2]) if len(more) > 2 and more[2] else None  # unknown before version 9
        self._numbers[request_id] = (self._num_arrivals, now)
        self._num_arrivals += 1
        return request

    def _forget(self, request_id: str) -> None:
        if request_id not in self.core.requests:
            self._numbers.pop(request_id, None)

    def _refuse(
        self, request_id: str, num_prompt: int, max_tokens: int, expected: str, *, line: int
    ) -> Difference | None:
        self._report.num_refused += 1
        try:
            self.core.check_request(Request(request_id, num_prompt, max_tokens))
            actual = "no refusal"
        except RequestError as error:
            actual = type(error).__name__
        if actual == expected:
            return None
        text = f"request {request_id} was refused with {expected}; here it meets {actual}"
        return Difference(line, self.now, expected, actual, text)

    def _begin(self, plan: list[Any], line: int) -> Difference | None:
        """plan: digest and summary of the recorded one, if there was something to do."""
        output = self.core.begin_step(self.now)
        if output is not None:
            self._under_way.append(output)
        expected = plan[1] if plan else None
        if expected is None and output is None:
            return None
        self._report.num_steps += 1
        actual = None if output is None else msgspec.to_builtins(plan_summary(output))
        if output is not None and expected is not None:
            if msgspec.to_builtins(self._chain.add(output)) == plan[0]:
                return None
            actual = msgspec.json.decode(msgspec.json.encode(actual))
        text = explain(expected, actual)
        here = str(output) if expected == actual else describe(actual)
        return Difference(line, self.now, describe(expected), here, text)

    def _end(
        self,
        step_id: int,
        stopped: list[Any],
        full_blocks: list[Any],
        failed: list[Any],
        repeats: list[Any],
        extra: Sequence[Any] = (),
        proposals: Sequence[Any] = (),
    ) -> None:
        num_steps, last_start_ns = repeats or (1, None)
        result = StepResult(
            step_id,
            stopped=tuple((request_id, FinishReason(reason)) for request_id, reason in stopped),
            full_blocks=tuple((request_id, b64decode(block_hash)) for request_id, block_hash in full_blocks),
            failed=tuple((request_id, message) for request_id, message, *_ in failed),
            beyond_grammar=frozenset(request_id for request_id, _, *reason in failed if reason),
            extra=tuple(VerifyResult(*fields) for fields in extra),
            proposals=tuple(DraftProposal(request_id, tuple(chances)) for request_id, chances in proposals),
        )
        events = self.core.end_step(result, self.now, num_steps=num_steps, last_start_ns=last_start_ns)
        self._take(events, self._under_way.popleft())

    def _take(self, events: list[Event], output: SchedulerOutput | None = None) -> None:
        """Note what happened; ``output``: the plan of the step that ended."""
        self._collector.take(0, events, output, self._usage)
        if self._on_events is not None:
            self._on_events(events)
        for event in events:
            if isinstance(event, StepFinished):
                self._note_step(event)
            elif isinstance(event, RequestFinished):
                number, arrival_ns = self._numbers.pop(event.request_id)
                self._collector.add_row(event, number, arrival_ns - (self._start_ns or 0), 0, "")

    def _note_step(self, event: StepFinished) -> None:
        usage, duration_ns = self._usage, event.end_ns - event.start_ns
        tokens = sum(count for _, _, count in event.prefills)
        usage.add_step(tokens, event.num_decodes, event.num_steps, duration_ns, event.num_extra_tokens)
        blocks = round(self.core.stats().kv_usage * usage.num_blocks)
        usage.add_blocks(blocks, blocks, duration_ns)


def tier_event(name: str, fields: dict[str, Any]) -> TierEvent:
    """The event of a "tier" row. Raises KeyError or TypeError for one that no version has written."""
    if name == DiskContents.__name__:
        fields = {part: tuple(b64decode(block_hash) for block_hash in hashes) for part, hashes in fields.items()}
    event: TierEvent = TIER_EVENTS[name](**fields)
    return event


def describe(summary: Sequence[Any] | None) -> str:
    """A plan's summary in words."""
    if summary is None:
        return "no step"
    step_id, chunks, num_decodes, context, predicted_ns, changes = summary
    parts = [f"step {step_id}"]
    parts += [f"prefill {name}[{start}:{start + count}]{' (last)' * last}" for name, start, count, last in chunks]
    if num_decodes:
        parts.append(f"{num_decodes} decodes at context {context}")
    parts += [f"{count} {part}" for part, count in zip(PARTS, changes or (), strict=False) if count]
    return ", ".join(parts) + f", predicted {predicted_ns} ns"


def explain(expected: Sequence[Any] | None, actual: Sequence[Any] | None) -> str:
    """The first part of two plan summaries that differs, in words."""
    if expected is None or actual is None:
        return "one of the two has nothing to do"
    names = ("step id", "prompt chunks", "number of decodes", "context of the decodes", "predicted time", "membership")
    for name, recorded, here in zip(names, expected, actual, strict=True):
        if recorded != here:
            return f"{name}: {recorded} in the recording, {here} here"
    return "the same work, but with other block ids, other requests leaving or joining, or in another order"
