"""Sends a workload to a target at the workload's own pace, and collects a record of each request.

In an open loop requests leave when they are due and never wait for answers; in a closed loop each client waits for its
answer before it sends again.
"""

import asyncio
import math
import resource
from bisect import insort
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace

from diptych.bench.clock import now_ns
from diptych.bench.conversations import Conversations, TurnCounts
from diptych.bench.health import Health, HealthWatch
from diptych.bench.objectives import LatencyObjectives
from diptych.bench.pacing import Pacer, pacer
from diptych.bench.prepared_requests import PreparedRequests
from diptych.bench.request_records import ClientRecord, client_record
from diptych.bench.target import Target, no_tokens
from diptych.bench.token_stream import TokenStream
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.workload.spec import ClosedLoop, RequestSpec, Workload

LEAD_NS = 50 * NS_PER_MS  # from deciding to start to the first request
FINE_NS = 3 * NS_PER_MS  # closer than this to its time a request is waited for by the pacer: loop timers tick in ms
CONNECT_NS = 250 * NS_PER_MS  # how long before its time a request's connection is opened, if the client has time
SPARE_FILES = 32  # that a run needs beside its connections
LATE_BODY_NS = 5 * NS_PER_MS  # how long before its time a body is made that waits for an earlier answer
SWEEP_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """The state of a run. met, judged: of requests whose verdict is known; a request that is late already is judged."""

    elapsed_s: float
    sent: int
    total: int
    running: int
    completed: int
    failed: int
    tokens: int
    met: int
    judged: int
    ttft_p50_ms: float | None


Watcher = Callable[[LoadProgress], None]
GiveUp = Callable[[LoadProgress], bool]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """slo: for requests that name none. duration_s: nothing is sent after that. watch: called with the progress
    four times a second; give_up: the same, and a run ends early once it returns True."""

    slo: LatencyObjectives = field(default_factory=LatencyObjectives)
    duration_s: float | None = None
    watch: Watcher | None = None
    give_up: GiveUp | None = None


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """A run. ended: "done", "duration", "stopped" (by an interrupt) or "given up"."""

    records: list[ClientRecord]
    start_ns: int  # of the workload, on the monotonic clock (clock.py)
    duration_ns: int  # start of the workload to the last event of any request
    health: Health
    ended: str
    total: int  # requests that the workload has
    turns: TurnCounts | None = None  # of conversations; None where there are none


def ramped(workload: Iterable[RequestSpec], start_rate: float, end_rate: float, over_s: float) -> Iterator[RequestSpec]:
    """A workload with a rate of 1/s, its arrivals moved so that the rate rises (or falls) evenly and then stays.

    The u-th second of the workload comes when the integral of the rate is u.
    """
    slope = (end_rate - start_rate) / over_s
    area = (start_rate + end_rate) / 2 * over_s
    for spec in workload:
        u = spec.arrival_ns / NS_PER_S
        if u >= area:
            at = over_s + (u - area) / end_rate
        elif slope == 0:
            at = u / start_rate
        else:
            at = (math.sqrt(start_rate * start_rate + 2 * slope * u) - start_rate) / slope
        yield replace(spec, arrival_ns=int(at * NS_PER_S))


class Load:
    """A single run of a workload."""

    def __init__(self, target: Target, conversations: Conversations, options: LoadOptions, stop: asyncio.Event) -> None:
        self._target = target
        self._conversations = conversations
        self._options = options
        self._stop = stop
        self._start_ns = 0
        self._records: list[ClientRecord] = []
        self._running: dict[int, tuple[RequestSpec, TokenStream]] = {}
        self._outcomes: dict[int, str] = {}
        self._sent = self._total = self._tokens = self._yielded_ns = 0
        self._num_completed = self._num_failed = self._num_judged = self._num_met = 0
        self._ended = "done"
        self._ttfts: list[int] = []
        self._all_done = asyncio.Event()

    async def open_loop(self, workload: Workload | Iterable[RequestSpec], total: int) -> LoadResult:
        """Requests leave at their times, whatever happened to those before."""
        self._total = total
        async with self._watching():
            prepared = PreparedRequests(self._conversations, workload, self._slo)
            await self._get_ready(prepared)
            with closing(pacer()) as clock:
                for number, spec, body in prepared:
                    due = self._start_ns + spec.arrival_ns
                    if body is None and await self._wait_until(due - LATE_BODY_NS, clock, prepared):
                        body = self._conversations.delayed_body(number, spec, self._slo(spec))
                    if body is None or not await self._wait_until(due, clock, prepared):
                        break
                    self._send(number, spec, body, due)
                    await self._yield()  # in a burst, answers are read too
            await self._drain()
        return self._result

    async def closed_loop(self, workload: ClosedLoop) -> LoadResult:
        """Each client asks, waits for its answer, thinks, and asks again. Raises ConfigError for more clients than this
        process can have connections."""
        self._total = len(workload)
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if min(workload.concurrency, len(workload)) > allowed - SPARE_FILES:
            message = (
                f"concurrency is {workload.concurrency:,}; this process may have {allowed:,} open files (ulimit -n)"
            )
            raise ConfigError(message, param="concurrency")
        async with self._watching():
            await asyncio.gather(*(self._client(workload, client) for client in range(workload.concurrency)))
            await self._drain()
        return self._result

    async def _client(self, workload: ClosedLoop, client: int) -> None:
        while not self._is_over() and (spec := workload.next_request(client, max(0, now_ns() - self._start_ns))):
            due = self._start_ns + spec.arrival_ns
            number = self._sent
            body = self._conversations.body(number, spec, self._slo(spec))
            self._sent += 1
            if (pause := due - now_ns()) <= 0:
                due = now_ns()  # it wanted to ask at once; making its question is not the server's time
            elif await self._stopped_within(pause / NS_PER_S) or self._is_over():
                self._sent -= 1
                return
            await self._send(number, spec, body, due, counted=True).done

    async def _get_ready(self, prepared: PreparedRequests) -> None:
        """Make bodies and open connections for the first requests, before the start."""
        while prepared.prepare(0) or self._target.client.connect_ahead(prepared.num_due(CONNECT_NS)):
            await asyncio.sleep(0)
        self._start_ns = now_ns() + LEAD_NS

    async def _yield(self) -> None:
        """Let other tasks run, if they have waited for a millisecond."""
        if now_ns() - self._yielded_ns > NS_PER_MS:
            await asyncio.sleep(0)
            self._yielded_ns = now_ns()

    async def _wait_until(self, due: int, clock: Pacer, prepared: PreparedRequests) -> bool:
        """False when the run is over before that. Meanwhile bodies of later requests are made."""
        if self._is_too_late(due):
            return False
        while (left := due - now_ns()) > FINE_NS:
            now = now_ns() - self._start_ns
            if self._target.client.connect_ahead(prepared.num_due(now + CONNECT_NS)) or prepared.prepare(now):
                await self._yield()
            elif await self._stopped_within((left - FINE_NS / 2) / NS_PER_S):
                return False
        if left > 0:
            await clock.sleep(left)
        return not self._stop.is_set()

    async def _stopped_within(self, seconds: float) -> bool:
        if not self._stop.is_set():
            try:
                await asyncio.wait_for(self._stop.wait(), seconds)
            except TimeoutError:
                return False
        return True

    def _is_over(self) -> bool:
        return self._is_too_late(now_ns()) or self._stop.is_set()

    def _is_too_late(self, at_ns: int) -> bool:
        """Whether nothing is sent any more at that time; then that is why the run ended."""
        duration_s = self._options.duration_s
        if duration_s is None or at_ns - self._start_ns <= duration_s * NS_PER_S:
            return False
        self._ended = "duration"
        return True

    def _slo(self, spec: RequestSpec) -> LatencyObjectives:
        return self._options.slo.for_request(spec.slo)

    def _send(self, number: int, spec: RequestSpec, body: bytes, due: int, *, counted: bool = False) -> TokenStream:
        stream = self._conversations.stream(due, spec)
        if not counted:
            self._sent += 1
        self._running[number] = (spec, stream)
        self._target.send(body, stream)
        stream.done.add_done_callback(lambda _: self._on_done(number))
        if spec.abort_after_ns is not None:
            asyncio.get_running_loop().call_later(spec.abort_after_ns / NS_PER_S, self._leave, number)
        return stream

    def _leave(self, number: int) -> None:
        if number in self._running:
            self._cut(number, "aborted", "the client gave up")

    def _cut(self, number: int, outcome: str, why: str) -> None:
        self._outcomes[number] = outcome
        self._running[number][1].cancel(now_ns(), why)

    def _on_done(self, number: int) -> None:
        spec, stream = self._running.pop(number)
        outcome = self._outcomes.pop(number, "completed" if stream.is_complete and stream.stamps else "failed")
        if outcome == "failed" and stream.is_complete:
            stream.error = no_tokens(stream)
        made = client_record(number, spec, stream, self._slo(spec), self._start_ns, outcome)
        self._records.append(made)
        self._conversations.on_end(spec, stream)
        self._tokens += made.output_tokens
        self._num_completed += made.is_completed
        self._num_failed += outcome == "failed"
        self._num_judged += made.slo_met is not None
        self._num_met += bool(made.slo_met)
        if made.ttft_ns is not None:
            insort(self._ttfts, made.ttft_ns)
        if not self._running:
            self._all_done.set()

    async def _drain(self) -> None:
        """Wait for answers that are on their way; if the run was stopped, close their connections instead."""
        while self._running and not self._stop.is_set():
            self._all_done.clear()
            waiters = {asyncio.ensure_future(self._all_done.wait()), asyncio.ensure_future(self._stop.wait())}
            _, pending = await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
            for waiter in pending:
                waiter.cancel()
        if self._stop.is_set() and self._ended != "given up":
            self._ended = "stopped"
        for number in list(self._running):
            self._cut(number, "unfinished", "the run ended first")
        while self._running:
            await asyncio.sleep(0)

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        health = HealthWatch()
        health.start()
        self._start_ns = now_ns() + LEAD_NS
        sweep = asyncio.create_task(self._sweep())
        sweep.add_done_callback(lambda _: self._stop.set())  # a failing watcher ends the run
        try:
            yield
        finally:
            has_failed = sweep.done()
            sweep.cancel()
        if has_failed:
            await sweep
        late = [record.sent_ns - record.intended_ns for record in self._records]
        self._result = LoadResult(
            records=sorted(self._records, key=lambda record: record.number),
            start_ns=self._start_ns,
            duration_ns=max((record.end_ns for record in self._records), default=0),
            health=health.stop(self._tokens, late),
            ended=self._ended,
            total=self._total,
            turns=self._conversations.counts,
        )

    async def _sweep(self) -> None:
        """Four times a second: time-outs, progress, giving up."""
        limit_ns = self._target.config.timeout_s * NS_PER_S
        while True:
            await asyncio.sleep(SWEEP_S)
            now = now_ns()
            for number, (_, stream) in list(self._running.items()):
                if now - stream.sent_ns > limit_ns:
                    self._cut(number, "failed", f"no whole answer in {self._target.config.timeout_s:g} s")
            options = self._options
            if options.watch is None and options.give_up is None:
                continue
            progress = self._progress(now)
            if options.watch is not None:
                options.watch(progress)
            if options.give_up is not None and not self._stop.is_set() and options.give_up(progress):
                self._ended = "given up"
                self._stop.set()

    def _progress(self, now: int) -> LoadProgress:
        late = sum(
            bool(self._slo(spec).overdue(now - stream.intended_ns, has_token=bool(stream.stamps)))
            for spec, stream in self._running.values()
        )
        ttfts = self._ttfts
        return LoadProgress(
            elapsed_s=max(0, now - self._start_ns) / NS_PER_S,
            sent=self._sent,
            total=self._total,
            running=len(self._running),
            completed=self._num_completed,
            failed=self._num_failed,
            tokens=self._tokens + sum(len(stream.stamps) for _, stream in self._running.values()),
            met=self._num_met,
            judged=self._num_judged + late,
            ttft_p50_ms=ttfts[len(ttfts) // 2] / NS_PER_MS if ttfts else None,
        )
