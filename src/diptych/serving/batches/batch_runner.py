"""Runs the lines of batches when there is room for them, and writes their rows: one loop, and one writer.

    loop:    validate a part -> expire -> start lines, the most urgent batch first -> finish what is done -> wait
    line:    execute -> its row, or try again later: nothing of a line is kept before its row is on disk
    writer:  all rows that are ready -> the store, in one go

Memory does not grow with the number of lines: a batch has some lines read ahead, and a line leaves when its row is
on disk. A server that stops, or is killed, runs the lines again whose rows were not on disk.

Every line of a batch is checked before any runs, a part of its file at a time, so that others get their turns.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from diptych.base.limited_log import LimitedLog, kind_of
from diptych.control.errors import DiptychError
from diptych.serving import edge_limits
from diptych.serving.api.error_format import error_body
from diptych.serving.batches.batch_records import Batch, End, LineFault, LinePlace, LineResult, usage_of
from diptych.serving.batches.batch_store import BatchStore, row_id
from diptych.serving.batches.line_check import check_line, reply_row, request_body
from diptych.serving.batches.line_schedule import (
    BUFFERED_BYTES,
    BUFFERED_LINES,
    LineLimits,
    LineSchedule,
    Pace,
    RunningBatch,
    WaitingLine,
)
from diptych.serving.failures.watched_tasks import start_watched

PART_LINES = 500
PART_BYTES = 4 * 2**20


class LineIntake:
    """The lines of one batch, from the beginning: what an earlier attempt has noted is forgotten."""

    def __init__(self, store: BatchStore, batch: Batch, models: Collection[str]) -> None:
        self._store = store
        self._batch = batch
        self._models = models
        self._texts = store.texts(batch.terms.input_file)
        self._num_lines = 0
        self._faults: list[LineFault] = []
        store.tables.forget_lines(batch.number)

    def read_part(self, now: int) -> bool:
        """Check some more lines; False when the batch is in progress, has failed or was cancelled. now: Unix
        seconds."""
        if self._store.batch(self._batch.id, self._batch.tenant).status != "validating":
            return False
        is_over = self._read_part()
        limit = self._store.limits.max_lines
        if self._num_lines > limit:
            self._faults.append(LineFault("too_many_lines", f"the file has more than {limit} lines, the limit"))
            is_over = True
        if not is_over and len(self._faults) < edge_limits.BATCH_FAULTS:
            return True
        if not self._num_lines:
            self._faults.append(LineFault("empty_file", "the file has no lines"))
        tables, number = self._store.tables, self._batch.number
        if self._faults:
            tables.forget_lines(number)
            tables.set_status(self._batch, "failed", now, faults=self._faults[: edge_limits.BATCH_FAULTS])
        else:
            with tables.begin():
                tables.set_total(number, self._num_lines)
                tables.set_status(self._batch, "in_progress", now)
        return False

    def _read_part(self) -> bool:
        """Whether the file is at its end."""
        places: list[LinePlace] = []
        num_bytes, most = 0, self._store.limits.max_line_bytes
        is_over = True
        for offset, text in self._texts:
            self._num_lines += 1
            number = self._num_lines
            if len(text) > most:
                self._faults.append(LineFault("line_too_long", f"the line has more than {most} bytes", number))
            else:
                found = check_line(text, number, self._batch.terms.endpoint, self._models)
                if isinstance(found, LineFault):
                    self._faults.append(found)
                else:
                    places.append(LinePlace(number, offset, len(text), found))
            num_bytes += len(text)
            if number % PART_LINES == 0 or num_bytes >= PART_BYTES or len(self._faults) >= edge_limits.BATCH_FAULTS:
                is_over = False
                break
        with self._store.tables.begin():
            repeated = self._store.tables.add_lines(self._batch.number, places)
        for place in repeated:
            words = f"custom_id {place.custom_id[:80]!r} was given to an earlier line"
            self._faults.append(LineFault("duplicate_custom_id", words, place.number, "custom_id"))
        self._faults.sort(key=lambda fault: fault.line or 0)
        return is_over


logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # of a line that fails by the server's fault
BUSY = (429, 503)  # the server had no room; that is no attempt
MAX_RETRY_S = 30.0
POLL_S = 0.2  # between two looks whether there is room
SWEEP_S = 60.0  # between two looks for files that have expired
DISK_RETRY_S = 5.0
Result = TypeVar("Result")


class InThread(Protocol):
    """Runs a function in the thread of the store, in the order of the calls."""

    async def __call__(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run ``work`` in a thread. Returns its result."""
        ...


@dataclass(frozen=True, slots=True)
class LineReply:
    """What a line was answered. body: JSON. retry_after_s: where the server had no room."""

    status: int
    body: bytes
    request_id: str = ""
    retry_after_s: float = 0.0


class LineExecutor(Protocol):
    """Runs the requests of lines."""

    async def __call__(self, path: str, body: bytes, tenant: str, key: str) -> LineReply:
        """The reply to a POST. key: see BatchTerms. Cancelling it ends the request."""
        ...


@dataclass(slots=True)
class BatchCounts:
    """Since the start: lines with a row that came of an answer or of a refusal, retries, and failures of the disk."""

    completed: int = 0
    failed: int = 0
    retries: int = 0
    disk_failures: int = 0


class BatchRunner:
    """others: how many requests are open that lines are to wait for; None: no request is taken now. models: names that
    lines may ask for. clock: Unix seconds. counts: of the runner before, to go on with."""

    def __init__(
        self,
        store: BatchStore,
        in_thread: InThread,
        execute: LineExecutor,
        others: Callable[[], int | None],
        models: Callable[[], Collection[str]],
        limits: LineLimits,
        clock: Callable[[], float],
        counts: BatchCounts | None = None,
    ) -> None:
        self._store = store
        self._in_thread = in_thread
        self._execute = execute
        self._others = others
        self._limits = limits
        self.pace = Pace()
        self._log = LimitedLog(logger)
        self._models = models
        self._clock = clock
        self.counts = counts or BatchCounts()
        self._defect: BaseException | None = None  # that has ended a line's task, or the writer
        self.schedule = LineSchedule()
        self._new: list[Batch] = []
        self._intakes: dict[str, tuple[Batch, LineIntake]] = {}
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._results: list[LineResult] = []
        self._has_results = asyncio.Event()
        self._wake = asyncio.Event()
        self._sweep_at = 0.0

    @property
    def num_open(self) -> int:
        """Batches that have not ended, as far as this process has seen them."""
        return len(self._new) + len(self._intakes) + len(self.schedule.batches)

    def add(self, batch: Batch) -> None:
        """A batch was created."""
        self._new.append(batch)
        self._wake.set()

    def cancel(self, batch: Batch) -> None:
        """A client gave up a batch, which the store knows already."""
        running = self.schedule.batches.get(batch.number)
        if running is not None and running.end is None:
            self._give_up(running, "cancelled")
        self._wake.set()

    async def run(self) -> None:
        """Run until cancelled, or until a defect, which is raised. Lines that run then are ended; their rows that are
        ready are still written."""
        writing = start_watched(self._write(), "the writer of batches", self._on_defect)
        try:
            while not await self._has_begun():
                await asyncio.sleep(DISK_RETRY_S)
            while True:
                self._wake.clear()
                if self._defect is not None:
                    raise self._defect
                wait_s = await self._guarded_turn()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):  # wait_for of Python 3.11 may swallow a cancellation
                        await self._wake.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            try:
                await self._in_thread(self._store.commit, self._results)
            except (OSError, sqlite3.Error) as error:  # said; these lines run once more after the next start
                self._on_disk_failure(error)

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def _has_begun(self) -> bool:
        """Take up the batches that are open. False: the disk fails."""
        try:
            found = await self._in_thread(self._store.tables.open_batches)
        except (OSError, sqlite3.Error) as error:
            self._on_disk_failure(error)
            return False
        known = {batch.id for batch in self._new}  # created meanwhile
        for batch in found:
            if batch.status != "validating":
                self.schedule.add(batch)
            elif batch.id not in known:
                self._new.append(batch)
        return True

    async def _guarded_turn(self) -> float:
        """How long nothing needs to be done, if nothing happens. A disk that fails stops batches, never the server. A
        defect ends this runner: its owner reports that, and begins another."""
        try:
            return await self._turn()
        except (OSError, sqlite3.Error) as error:
            self._on_disk_failure(error)
        return DISK_RETRY_S

    async def _turn(self) -> float:
        now = self._clock()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            await self._in_thread(self._store.drop_expired, int(now))
        await self._validate(int(now))
        for running in self.schedule.over(now):
            found = await self._in_thread(self._store.conclude, running.batch, "expired", int(now))
            self._give_up(running, found.end)
        await self._start_lines(now)
        for running in list(self.schedule.batches.values()):
            if running.is_done:
                await self._finish(running)
        return self._wait_s(now)

    def _wait_s(self, now: float) -> float:
        if self._intakes or self._new:
            return POLL_S if self._others() is None else 0.0
        times = [float(entry.batch.expires_s) for entry in self.schedule.in_order()]
        if (retry := self.schedule.next_retry()) is not None:
            times.append(retry)
        wait_s = min([self._sweep_at, *times]) - now
        return max(0.01, min(wait_s, POLL_S if self.schedule.batches else SWEEP_S))

    async def _validate(self, now: int) -> None:
        """A part of each file that is being validated. A server that takes no requests may not know its models yet."""
        if self._others() is None:
            return
        new, self._new = self._new, []
        for batch in new:
            intake = await self._in_thread(LineIntake, self._store, batch, self._models())
            self._intakes[batch.id] = (batch, intake)
        for batch, intake in list(self._intakes.values()):
            if await self._in_thread(intake.read_part, now):
                continue
            found = await self._in_thread(self._store.batch, batch.id, batch.tenant)
            if found.status == "cancelling":
                await self._in_thread(self._store.tables.forget_lines, found.number)
            if found.is_open:
                self.schedule.add(found)
            del self._intakes[batch.id]

    async def _start_lines(self, now: float) -> None:
        if (num_others := self._others()) is None:
            return
        num_held, num_beside = self.schedule.num_held, self.schedule.num_beside
        for running in self.schedule.in_order():
            if num_held >= self._limits.at_once:
                break
            batch = running.batch
            num_left = max(0, batch.total - running.num_done)
            slack_s = max(0.0, self.pace.slack_s(num_left, batch.created_s, batch.expires_s, now))
            most = self._limits.beside if num_others and slack_s else self._limits.at_once
            while num_held < most:
                if running.wants_lines:
                    lines = await self._in_thread(
                        self._store.read_lines, batch, running.after, BUFFERED_LINES, BUFFERED_BYTES
                    )
                    self.schedule.read(running, lines)
                line = self.schedule.take(running, now)
                if line is None:
                    break
                line.best_effort_s = slack_s if num_beside >= self._limits.beside else 0.0
                key = (batch.number, line.place.number)
                name = f"line {line.place.number} of {batch.id}"
                task = self._tasks[key] = start_watched(self._try_line(batch, line), name, self._on_defect)
                task.add_done_callback(partial(self._on_line_over, batch, line))
                num_held += 1
                num_beside += not line.best_effort_s

    def _give_up(self, running: RunningBatch, end: End | None) -> None:
        self.schedule.give_up(running, end or "cancelled")
        for number in running.held:
            if (task := self._tasks.get((running.batch.number, number))) is not None:
                task.cancel()

    async def _finish(self, running: RunningBatch) -> None:
        """All its lines have their rows, or get them now."""
        now, wanted = int(self._clock()), running.end or "completed"
        found = await self._in_thread(self._store.conclude, running.batch, wanted, now)
        end = found.end or wanted
        while end != "completed" and await self._in_thread(self._store.end_lines, found, end):
            pass
        await self._in_thread(self._store.finish, found, end, now)
        del self.schedule.batches[running.batch.number]

    # -- lines --------------------------------------------------------------------------------------------------------

    def _on_line_over(self, batch: Batch, line: WaitingLine, task: asyncio.Task[None]) -> None:
        """A callback, since a task that is cancelled before its first step runs none of its own code."""
        if task.cancelled():
            self.schedule.put_back(batch.number, line, 0.0)
        del self._tasks[batch.number, line.place.number]
        self._wake.set()

    async def _try_line(self, batch: Batch, line: WaitingLine) -> None:
        endpoint = batch.terms.endpoint
        try:
            body = request_body(line.text, endpoint, line.best_effort_s)
            reply = await self._execute(endpoint, body, batch.tenant, batch.terms.key)
        except Exception as error:
            self._log.error(kind_of(error), "line %d of %s failed", line.place.number, batch.id, error=error)
            reply = LineReply(500, error_body(DiptychError("internal error; the server's log has the details")))
        is_busy = reply.status in BUSY
        if is_busy or (reply.status >= 500 and line.num_attempts < MAX_ATTEMPTS):
            self.counts.retries += 1
            delay_s = min(MAX_RETRY_S, max(1.0, reply.retry_after_s))
            line.num_attempts -= is_busy
            self.schedule.put_back(batch.number, line, self._clock() + delay_s)
            return
        row = reply_row(
            row_id(batch, line.place.number), line.place.custom_id, reply.status, reply.request_id, reply.body
        )
        usage = usage_of(reply.body)
        self._results.append(LineResult(batch.number, line.place.number, row, reply.status < 400, usage))
        self._has_results.set()

    async def _write(self) -> None:
        """Rows that are ready, to the disk. What cannot be written is kept, and no more lines start meanwhile."""
        while True:
            await self._has_results.wait()
            self._has_results.clear()
            if not (results := tuple(self._results)):
                continue
            try:
                await self._in_thread(self._store.commit, results)
            except (OSError, sqlite3.Error) as error:
                self._on_disk_failure(error)
                await asyncio.sleep(DISK_RETRY_S)
                self._has_results.set()
                continue
            del self._results[: len(results)]
            for result in results:
                self.schedule.done(result.batch, result.line)
                self.counts.completed += result.is_success
                self.counts.failed += not result.is_success
            self.pace.on_done(len(results), self._clock())
            self._wake.set()

    def _on_defect(self, error: BaseException) -> None:
        """Note the defect of a task beside the loop, which raises it."""
        self._defect = self._defect or error
        self._wake.set()

    def _on_disk_failure(self, error: Exception) -> None:
        self.counts.disk_failures += 1
        self._log.error("disk", "batches wait for their disk: %s", error)
