"""Exceptions that nobody expects, planted where no request waits for them: each is counted, and the rest goes on."""

import asyncio
import gc
import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from batch_files import ENDPOINT

from diptych.serving.api.listener import Listener, bind
from diptych.serving.api.response_store import ResponseStore
from diptych.serving.batches.app_lines import AppLines
from diptych.serving.batches.batch_service import RUNNER, BatchOptions, BatchService, LineHost
from diptych.serving.failures.failure_board import FailureBoard
from diptych.serving.failures.loop_defects import LOOP, LoopDefects
from diptych.serving.fleet.fleet_planner import FleetPlanner
from diptych.serving.keys import keyring
from diptych.serving.keys.keyring import Keyring
from diptych.serving.long_work import LONG, LongWork

pytestmark = pytest.mark.asyncio


class PlantedError(Exception):
    """A defect."""


def fails(*arguments: Any, **settings: Any) -> Any:
    raise PlantedError("planted")


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def counted() -> FailureBoard:
    """Where the defects of this loop are counted from now on."""
    board = FailureBoard()
    asyncio.get_running_loop().set_exception_handler(LoopDefects(board))
    return board


async def test_what_a_callback_and_a_forgotten_task_raise_is_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board, loop = counted(), asyncio.get_running_loop()

    async def forgotten() -> None:
        fails()

    for number in range(3):
        loop.call_soon(fails)
        await asyncio.sleep(0)
        task = loop.create_task(forgotten())
        await asyncio.wait([task])
        del task
        gc.collect()
        await until(lambda least=2 * number + 2: board.counts[LOOP] >= least)  # type: ignore[misc]
    assert board.counts == {LOOP: 6} and board.health()[0] == 200
    assert len([record for record in caplog.records if record.exc_info]) == 1  # from one place
    loop.call_soon(Mock(side_effect=ConnectionResetError("the client has left")))
    await asyncio.sleep(0.01)
    assert board.counts == {LOOP: 6} and "the client has left" in caplog.text


async def test_a_connection_that_cannot_be_made_one_leaves_nothing_behind() -> None:
    board, listening = counted(), bind("127.0.0.1", 0)
    listener = Listener(listening, 1 << 20)
    listener.start(fails)
    reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()
    client, other = socket.socketpair()
    listener._num_refusals = 1
    listener._open(client, fails, listener._on_refused)
    await until(lambda: not listener._num_refusals and not listener._tasks)
    assert client.fileno() == -1
    gc.collect()
    await until(lambda: board.counts[LOOP])
    listener.stop()
    for each in (listening, other):
        each.close()


async def test_long_work_goes_on_whatever_fails_behind_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    board, work = counted(), LongWork()
    monkeypatch.setattr(work.freed, "note", fails)
    size = 1 << 20
    assert size > LONG
    found = await asyncio.wait_for(asyncio.gather(*(work.run(lambda: 7, size) for _ in range(5))), 30)
    assert found == [7] * 5 and not work.num_bytes
    await until(lambda: board.counts[LOOP] == 5)
    work.close()


async def test_keys_are_looked_at_again_after_a_look_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keyring, "LOOK_S", 0.001)
    path = tmp_path / "keys.toml"
    entries = [f'[[key]]\nname = "{name}"\nkey = "sk-{name}-0123456789abcdef"\n' for name in ("a", "b")]
    path.write_text("".join(entries))
    path.chmod(0o600)
    keys = Keyring((), path)
    signature, looks = keyring._signature, []

    def failing(path: Path) -> Any:
        looks.append(path)
        return fails() if len(looks) < 4 else signature(path)

    monkeypatch.setattr(keyring, "_signature", failing)
    keys.start()
    await until(lambda: keys.complaint)
    assert keys.named("b") is not None
    path.write_text(entries[0])  # a key is taken back
    await until(lambda: keys.named("b") is None)
    assert not keys.complaint and caplog.text.count("the API keys stay as they were") == 1
    keys.stop()


async def test_a_planner_that_cannot_begin_again_is_tried_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    class Guard:
        def make(self) -> Any:
            return SimpleNamespace(name="first")

        def replacement(self) -> Any:
            tries.append("begin")
            return fails() if len(tries) < 3 else SimpleNamespace(name="second")

        def on_failure(self, parts: Any, error: BaseException) -> float:
            return 0.001

    planner = FleetPlanner(Guard(), Mock(), Mock(), lambda: 0)  # type: ignore[arg-type]
    planner._fail(PlantedError())
    await until(lambda: not planner._is_down)
    assert len(tries) == 3 and planner._parts.name == "second"  # type: ignore[attr-defined]


async def test_an_answer_is_not_lost_with_a_defect_of_the_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResponseStore()
    for number in range(2):  # while it is opened, and later
        with monkeypatch.context() as patch:
            patch.setattr(store, "_make_room", fails)
            assert "the store has failed" in await store.put_in_time({"id": "a"}, "", None, [])
        assert store.num_not_stored == number + 1 and "planted" in caplog.text
        assert await store.put_in_time({"id": f"b{number}"}, "", None, []) == ""
    store.close()


async def test_a_defect_of_the_runner_of_batches_is_reported_and_another_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, board = BatchService(BatchOptions(tmp_path)), FailureBoard()
    service.connect(LineHost(Mock(), lambda: 0, lambda: ("fake",), (ENDPOINT,)))
    first = service.runner
    assert first is not None
    monkeypatch.setattr(first, "_turn", fails)
    service.start(board)
    await until(lambda: board.counts[RUNNER] and service.runner is not first)
    await until(lambda: board.health()[0] == 200)
    await service.stop()
    service.close()


async def test_a_line_whose_reply_broke_off_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"a":', "more_body": True})
        fails()

    with caplog.at_level(logging.ERROR):
        reply = await AppLines(Mock(), app)(ENDPOINT, b"{}", "", "")  # type: ignore[arg-type]
    assert reply.status == 500 and b"internal error" in reply.body and "planted" in caplog.text
    assert httpx.codes(reply.status) == 500
