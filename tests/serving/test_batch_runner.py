"""The runner of batches with a make-believe server: urgency, room, failures, ends, and restarts in the middle."""

import asyncio
import json
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_files import ENDPOINT, add_file, check_each_once, numbered, rows

from diptych.control.errors import ConfigError
from diptych.serving.batches.batch_records import Batch, BatchTerms, LineResult, LineUsage
from diptych.serving.batches.batch_runner import BatchRunner, LineReply
from diptych.serving.batches.batch_service import BatchOptions, BatchService, LineHost
from diptych.serving.batches.line_schedule import PACE_LINES, LineLimits, Pace, WaitingLine
from diptych.serving.failures.failure_board import FailureBoard

pytestmark = pytest.mark.asyncio
SERVED = LineReply(200, b'{"ok":true}', "req-1")


class FakeServer:
    """What runs lines. answer: of a body. others: open requests besides lines (None: none is taken)."""

    def __init__(self, answer: Callable[[bytes], LineReply] = lambda body: SERVED) -> None:
        self.answer = answer
        self.others: int | None = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.now = 1000.0
        self.bodies: list[bytes] = []
        self.num_running = self.most_running = self.num_cancelled = 0

    async def __call__(self, path: str, body: bytes, tenant: str, key: str = "") -> LineReply:
        self.bodies.append(body)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0)
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        return self.answer(body)

    def service(self, folder: Path, **lines: int) -> BatchService:
        limits = LineLimits(**{"at_once": 4, **lines})
        service = BatchService(BatchOptions(folder, lines=limits), clock=lambda: self.now)
        service.connect(LineHost(self, lambda: self.others, lambda: ("fake",), (ENDPOINT,)))
        service.start()
        return service


async def create(service: BatchService, file_id: str = "file-in", window_s: int = 3600) -> Batch:
    return await service.create(BatchTerms(file_id, ENDPOINT, f"{window_s}s", window_s), "")


async def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def ended(service: BatchService, batch: Batch, server: FakeServer | None = None) -> Batch:
    """server: whose clock goes on meanwhile."""
    async with asyncio.timeout(30):
        while (found := await service.batch(batch.id, "")).is_open:
            await asyncio.sleep(0.005)
            if server is not None:
                server.now += 1
    return found


async def stop(service: BatchService) -> None:
    await service.stop()
    service.close()


def ids(count: int) -> list[str]:
    return [f"id-{number}" for number in range(count)]


async def test_every_line_runs_once_and_a_bounded_number_at_once(tmp_path: Path) -> None:
    server = FakeServer()
    service = server.service(tmp_path)
    add_file(service.store, numbered(300))
    done = await ended(service, await create(service))
    assert (done.status, done.completed, server.most_running, len(server.bodies)) == ("completed", 300, 4, 300)
    assert {"in_progress_at", "finalizing_at", "completed_at"} <= done.times.keys()
    check_each_once(service.store, done, ids(300))
    [row, *_] = rows(service.store.path(done.output_file))
    assert row["response"] == {"status_code": 200, "request_id": "req-1", "body": {"ok": True}}
    assert row["error"] is None and row["id"].startswith("batch_req_")
    await stop(service)


async def test_a_refused_line_is_in_the_error_file_and_a_failing_one_is_tried_again(tmp_path: Path) -> None:
    failures = iter([LineReply(500, b'{"error":1}'), LineReply(429, b"{}", retry_after_s=2.0)])

    def answer(body: bytes) -> LineReply:
        if b'"max_tokens":3' in body and b"[9]" in body:
            return LineReply(400, b'{"error":{"message":"no"}}')
        if b"[8]" in body:
            return LineReply(500, b'{"error":2}')
        return next(failures, SERVED)

    server = FakeServer(answer)
    service = server.service(tmp_path)
    texts = numbered(4).split(b"\n")
    texts[1], texts[2] = texts[1].replace(b"[5, 6]", b"[9]"), texts[2].replace(b"[5, 6]", b"[8]")
    add_file(service.store, b"\n".join(texts))
    done = await ended(service, await create(service), server)
    good, bad = check_each_once(service.store, done, ids(4))
    assert (good, bad) == ({"id-0", "id-3"}, {"id-1", "id-2"})
    found = {row["custom_id"]: row["response"] for row in rows(service.store.path(done.error_file))}
    assert found["id-1"] == {"status_code": 400, "request_id": "", "body": {"error": {"message": "no"}}}
    assert found["id-2"]["status_code"] == 500
    assert sum(b"[8]" in body for body in server.bodies) == 3
    assert service.runner is not None and service.runner.counts.retries == 4
    await stop(service)


async def test_the_batch_whose_window_ends_first_goes_first(tmp_path: Path) -> None:
    server = FakeServer()
    server.others = 1
    service = server.service(tmp_path, at_once=1)
    add_file(service.store, numbered(2).replace(b"[5, 6]", b"[1]"), "file-1")
    add_file(service.store, numbered(2).replace(b"[5, 6]", b"[2]"), "file-2")
    batches = [await create(service, "file-1", 9000), await create(service, "file-2", 5000)]
    assert service.runner is not None
    await until(lambda: len(service.runner.schedule.batches) == 2)
    assert server.bodies == []
    server.others = 0
    for batch in batches:
        await ended(service, batch)
    assert [b"[2]" in body for body in server.bodies] == [True, True, False, False]
    await stop(service)


async def test_nothing_is_validated_before_the_server_takes_requests(tmp_path: Path) -> None:
    server = FakeServer()
    server.others = None
    service = server.service(tmp_path)
    add_file(service.store, numbered(2))
    batch = await create(service)
    await asyncio.sleep(0.3)
    assert (await service.batch(batch.id, "")).status == "validating"
    server.others = 0
    assert (await ended(service, batch)).completed == 2
    await stop(service)


async def test_lines_wait_for_other_requests_unless_their_window_would_be_missed(tmp_path: Path) -> None:
    server = FakeServer()
    server.others = 3
    service = server.service(tmp_path, at_once=4, beside=1)
    server.go_on.clear()
    add_file(service.store, numbered(20))
    batch = await create(service, window_s=1000)
    await until(lambda: server.num_running == 1)
    await asyncio.sleep(0.3)
    assert server.num_running == 1
    server.now += 501  # half of the window is over, and nothing is known of the pace
    await until(lambda: server.num_running == 4)
    server.go_on.set()
    assert (await ended(service, batch)).completed == 20
    await stop(service)


async def test_lines_say_for_how_long_they_give_way_but_for_those_that_run_beside_others(tmp_path: Path) -> None:
    server = FakeServer()
    service = server.service(tmp_path, at_once=4, beside=1)
    server.go_on.clear()
    add_file(service.store, numbered(6))
    batch = await create(service, window_s=1000)
    await until(lambda: server.num_running == 4)
    waits = [json.loads(body)["gives_way_ms"] for body in server.bodies]
    assert waits[0] == 0 and all(499_000 <= wait <= 500_000 for wait in waits[1:])  # until half of the window is over
    server.now += 600
    server.go_on.set()
    assert (await ended(service, batch)).completed == 6
    assert [json.loads(body)["gives_way_ms"] for body in server.bodies[4:]] == [0, 0]
    await stop(service)


async def test_a_pace_that_misses_the_window_is_urgent() -> None:
    pace = Pace()
    assert (pace.slack_s(5, 0, 1000, 400), pace.slack_s(5, 0, 1000, 501)) == (100, -1)
    for second in range(10):
        pace.on_done(2, 100.0 + second)
    assert pace.line_s == 0.5
    assert (pace.slack_s(100, 0, 1000, 890), pace.slack_s(111, 0, 1000, 890)) == (10, -1)
    pace.on_done(1, 5000.0)  # after a pause
    assert pace.line_s == 0.5
    for wrong in ({"at_once": 0}, {"at_once": 5000}, {"beside": -1}, {"at_once": 2, "beside": 3}):
        with pytest.raises(ConfigError, match="batch_lines"):
            LineLimits(**wrong)


class CountedGaps(deque[Any]):
    """A pace's gaps, which count how often they are gone through."""

    num_passes = 0

    def __iter__(self) -> Any:
        self.num_passes += 1
        return super().__iter__()


async def test_the_pace_is_taken_when_lines_are_done_and_not_for_each_batch_that_asks() -> None:
    pace = Pace()
    pace._gaps = gaps = CountedGaps(maxlen=PACE_LINES)
    for second in range(2 * PACE_LINES):
        pace.on_done(1, float(second))
    before = gaps.num_passes
    assert {pace.slack_s(5, 0, 1000, 0) for _ in range(1000)} == {990}
    assert gaps.num_passes == before <= 4 * PACE_LINES


async def test_batches_that_have_no_turn_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    slack_s = Pace.slack_s
    monkeypatch.setattr(Pace, "slack_s", lambda *arguments: asked.append(0) or slack_s(*arguments))
    server = FakeServer()
    server.go_on.clear()
    service = server.service(tmp_path, at_once=1)
    assert service.runner is not None
    add_file(service.store, numbered(3))
    batches = [await create(service) for _ in range(20)]
    await until(lambda: len(service.runner.schedule.batches) == 20 and server.num_running == 1)
    asked.clear()
    for _ in range(5):
        await service.runner._turn()
    assert asked == []
    server.go_on.set()
    assert {(await ended(service, batch)).completed for batch in batches} == {3}
    await stop(service)


async def test_a_window_that_is_over_ends_the_batch(tmp_path: Path) -> None:
    server = FakeServer()
    service = server.service(tmp_path)
    server.go_on.clear()
    add_file(service.store, numbered(30))
    batch = await create(service, window_s=100)
    await until(lambda: server.num_running == 4)
    server.now += 101
    done = await ended(service, batch)
    assert (done.status, done.failed, server.num_cancelled) == ("expired", 30, 4)
    check_each_once(service.store, done, ids(30))
    assert {row["error"]["code"] for row in rows(service.store.path(done.error_file))} == {"batch_expired"}
    assert done.json()["output_file_id"] is None
    await stop(service)


async def test_a_cancelled_batch_keeps_what_is_done(tmp_path: Path) -> None:
    server = FakeServer()
    service = server.service(tmp_path)
    add_file(service.store, numbered(500))
    batch = await create(service)
    await until(lambda: len(server.bodies) > 20)
    server.go_on.clear()
    assert (await service.cancel(batch.id, "")).status == "cancelling"
    done = await ended(service, batch)
    assert done.status == "cancelled" and done.completed >= 17
    check_each_once(service.store, done, ids(500))
    await stop(service)


async def test_a_batch_ends_though_its_lines_are_cancelled_before_their_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_lines = BatchRunner._start_lines

    async def start_and_cancel(runner: BatchRunner, now: float) -> None:
        await start_lines(runner, now)
        for running in runner.schedule.in_order():
            runner.cancel(running.batch)

    monkeypatch.setattr(BatchRunner, "_start_lines", start_and_cancel)
    server = FakeServer()
    service = server.service(tmp_path)
    add_file(service.store, numbered(10))
    done = await ended(service, await create(service))
    assert (done.status, done.completed, server.bodies) == ("cancelled", 0, [])
    await stop(service)


async def test_a_batch_can_be_cancelled_while_it_is_validated(tmp_path: Path) -> None:
    server = FakeServer()
    service = server.service(tmp_path)
    add_file(service.store, numbered(5000))
    batch = await create(service)
    await service.cancel(batch.id, "")
    done = await ended(service, batch)
    assert (done.status, done.total, server.bodies) == ("cancelled", 0, [])
    await stop(service)


async def test_a_stopped_service_goes_on_at_the_line(tmp_path: Path) -> None:
    chance = random.Random(3)
    server = FakeServer(lambda body: SERVED if chance.random() < 0.8 else LineReply(400, b"{}"))
    service = server.service(tmp_path)
    add_file(service.store, numbered(400))
    batch = await create(service)
    for number in (50, 120, 200):
        await until(lambda number=number: len(server.bodies) >= number)
        await stop(service)
        service = server.service(tmp_path)
    done = await ended(service, batch)
    check_each_once(service.store, done, ids(400))
    assert len(server.bodies) <= 400 + 3 * 4
    await stop(service)


async def test_a_disk_that_fails_delays_rows_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.serving.batches.batch_runner.DISK_RETRY_S", 0.01)
    server = FakeServer()
    service = server.service(tmp_path)
    add_file(service.store, numbered(60))
    failures = iter([False, True, True, False, True])
    commit = service.store.commit

    def failing(results: Any) -> None:
        if next(failures, False):
            raise OSError(28, "No space left on device")
        commit(results)

    monkeypatch.setattr(service.store, "commit", failing)
    done = await ended(service, await create(service))
    check_each_once(service.store, done, ids(60))
    assert service.runner is not None and service.runner.counts.disk_failures == 3
    await stop(service)


async def test_an_executor_that_raises_fails_its_line_alone(tmp_path: Path) -> None:
    def answer(body: bytes) -> LineReply:
        if b"[9]" in body:
            raise RuntimeError("a bug")
        return SERVED

    server = FakeServer(answer)
    service = server.service(tmp_path)
    add_file(service.store, numbered(3).replace(b"[5, 6]", b"[9]", 1))
    done = await ended(service, await create(service), server)
    assert check_each_once(service.store, done, ids(3))[1] == {"id-0"}
    await stop(service)


async def test_few_lines_are_in_memory_however_many_there_are(tmp_path: Path) -> None:
    server = FakeServer(lambda body: LineReply(429, b"{}", retry_after_s=5.0))
    service = server.service(tmp_path)
    add_file(service.store, numbered(2000))
    await create(service)
    await until(lambda: len(server.bodies) >= 32)
    await asyncio.sleep(0.05)
    assert service.runner is not None
    [running] = service.runner.schedule.batches.values()
    assert len(running.later) + len(running.buffer) + len(running.held) <= 2 * 32 + 4
    await stop(service)


async def test_the_tokens_of_all_lines_are_summed_once(tmp_path: Path) -> None:
    chat = b'{"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}'
    response = b'{"usage":{"input_tokens":5,"output_tokens":2,"output_tokens_details":{"reasoning_tokens":1}}}'
    replies = iter([chat, response, b'{"usage":null}', b'{"usage":3}', b"{}"])
    server = FakeServer(lambda body: LineReply(200, next(replies)))
    service = server.service(tmp_path)
    add_file(service.store, numbered(5))
    done = await ended(service, await create(service))
    assert done.json()["usage"] == {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 17,
    }
    result = LineResult(done.number, 1, b"{}\n", True, LineUsage(9, 9, 9, 9))
    service.store.commit([result])  # of a line that is done
    assert (await service.batch(done.id, "")).usage == done.usage
    await stop(service)


async def test_a_runner_that_fails_is_reported_and_replaced_and_no_line_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, server = FailureBoard(), FakeServer()
    service = BatchService(BatchOptions(tmp_path, lines=LineLimits(at_once=4)))
    service.connect(LineHost(server, lambda: server.others, lambda: ("fake",), (ENDPOINT,)))
    first, sound = service.runner, BatchRunner._try_line
    planted = [RuntimeError("planted")]

    async def failing(self: BatchRunner, batch: Batch, line: WaitingLine) -> None:
        if planted:
            raise planted.pop()
        await sound(self, batch, line)

    monkeypatch.setattr(BatchRunner, "_try_line", failing)
    add_file(service.store, numbered(5))
    service.start(board)
    done = await ended(service, await create(service))
    assert (done.status, done.completed) == ("completed", 5)
    check_each_once(service.store, done, ids(5))
    assert board.counts == {"the batch runner": 1} and service.runner is not first
    assert board.health()[0] == 200
    await stop(service)
