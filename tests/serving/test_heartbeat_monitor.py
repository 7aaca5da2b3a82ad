"""The watch over workers that hang goes on when it cannot read one of their files."""

import asyncio
import time
from pathlib import Path

import pytest

from diptych.serving.fleet.heartbeat_monitor import watch_pulses
from diptych.serving.fleet.supervisor import Supervisor
from diptych.serving.fleet.worker_handle import WorkerState
from diptych.serving.fleet.worker_process import WorkerProcess
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.heartbeat import FILE_NAME, Heartbeat


class Worker(Supervisor):
    """One without a process."""

    def __init__(self, directory: Path) -> None:
        super().__init__(0, EngineOptions(), ())
        directory.mkdir()
        self.state = WorkerState.READY
        self.directory = directory
        self._process = WorkerProcess(EngineOptions(), (), lambda data: None)
        self._process._directory = directory
        self.reasons: list[str] = []

    def kill(self, because: str) -> None:
        self.reasons.append(because)
        self.state = WorkerState.LOST


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_read_says_nothing_of_its_worker_and_others_are_watched(tmp_path: Path) -> None:
    unreadable, silent = Worker(tmp_path / "0"), Worker(tmp_path / "1")
    (unreadable.directory / FILE_NAME).mkdir()  # an OSError, as where no descriptor is free
    Heartbeat(silent.directory / FILE_NAME, clock=lambda: time.monotonic_ns() - 60 * 10**9).close()
    watch = asyncio.create_task(watch_pulses([unreadable, silent], 0.1))
    for _ in range(500):
        await asyncio.sleep(0.01)
        if silent.reasons:
            break
    assert "no sign of life" in silent.reasons[0]
    assert not unreadable.reasons
    assert not watch.done()
    watch.cancel()
