"""A supervisor in a process that has no file descriptor left, with a command that is no worker."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_worker import fake_command

from diptych.control.errors import WorkerError
from diptych.serving.fleet import private_directory
from diptych.serving.fleet.exit_status import Loss
from diptych.serving.fleet.supervisor import Supervisor
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.messages import Ready, WorkerMessage

pytestmark = pytest.mark.asyncio


class Fleet:
    """Notes what happens."""

    def __init__(self) -> None:
        self.num_ready = 0
        self.losses: list[Loss] = []

    def on_message(self, worker: int, message: WorkerMessage) -> None:
        self.num_ready += isinstance(message, Ready)

    def on_defect(self, where: str, error: BaseException) -> None:
        """None is expected."""
        raise AssertionError(where) from error

    def on_lost(self, worker: int, loss: Loss) -> None:
        self.losses.append(loss)


@contextmanager
def no_descriptors() -> Iterator[list[int]]:
    """Take all of them."""
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield held
    finally:
        for descriptor in held:
            os.close(descriptor)


async def until(condition: object) -> None:
    for _ in range(6000):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


@pytest.mark.system
async def test_a_dead_worker_is_started_again_without_a_free_descriptor(limited: None) -> None:
    fleet = Fleet()
    supervisor = Supervisor(0, EngineOptions(), fake_command())
    supervisor.start(fleet)
    try:
        await until(lambda: fleet.num_ready == 1)
        for round_number in range(2):
            with no_descriptors():
                assert supervisor.worker_pid is not None
                os.kill(supervisor.worker_pid, signal.SIGKILL)
                await until(lambda wanted=round_number + 2: fleet.num_ready == wanted)
        assert [loss.crashed for loss in fleet.losses] == [False, False]
        assert supervisor.num_restarts == 2
    finally:
        await supervisor.stop()


@pytest.mark.system
async def test_restarts_leave_no_descriptor_open(limited: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.serving.fleet.supervisor.FIRST_PAUSE_S", 0.01)
    fleet = Fleet()
    before = set(os.listdir("/proc/self/fd"))
    supervisor = Supervisor(0, EngineOptions(), fake_command())
    supervisor.start(fleet)
    counts = []
    for wanted in range(1, 4):
        await until(lambda wanted=wanted: fleet.num_ready == wanted)
        counts.append(len(os.listdir("/proc/self/fd")))
        assert supervisor.worker_pid is not None
        os.kill(supervisor.worker_pid, signal.SIGKILL)
        await until(lambda wanted=wanted: len(fleet.losses) == wanted)
    await supervisor.stop()
    assert len(set(counts)) == 1
    await until(lambda: set(os.listdir("/proc/self/fd")) == before)


async def test_a_start_that_fails_for_a_while_is_no_loss_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("diptych.serving.fleet.supervisor.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fleet = Fleet()
    starts: list[float] = []
    supervisor = Supervisor(0, EngineOptions(), (sys.executable, "-c", "pass"))
    failing = False
    really = asyncio.create_subprocess_exec

    async def start(*command: str, **options: object) -> asyncio.subprocess.Process:
        starts.append(asyncio.get_running_loop().time())
        if failing:
            raise OSError(24, "Too many open files")
        if len(starts) == 1:
            return await really(sys.executable, "-c", "import time; time.sleep(60)", **options)  # type: ignore[arg-type]
        return await really(*command, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with caplog.at_level(logging.ERROR):
        supervisor.start(fleet)
        assert supervisor.ready is not None
        supervisor.ready.set_result(Ready(1, 1, 1, 1, 1, [], ""))
        await until(lambda: supervisor.worker_pid)
        failing = True
        os.kill(supervisor.worker_pid or 0, signal.SIGKILL)
        await until(lambda: len(starts) > 10)
        assert len(fleet.losses) == 1
        assert len([record for record in caplog.records if "Too many open files" in record.message]) == 1
        assert supervisor.num_restarts == 1
        failing = False
        await until(lambda: len(fleet.losses) == 2)
    await supervisor.stop()
    assert not list(tmp_path.iterdir())


async def test_a_first_start_without_descriptors_says_so_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(directory: Path) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(private_directory, "lock_directory", fail)
    supervisor = Supervisor(0, EngineOptions(), (sys.executable, "-c", "pass"))
    supervisor.start(Fleet())
    assert supervisor.ready is not None
    with pytest.raises(WorkerError, match=r"cannot be run: .*Too many open files"):
        await supervisor.ready
    await supervisor.stop()
    assert not list(tmp_path.iterdir())
