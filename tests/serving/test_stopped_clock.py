"""A pause of the whole host, or of the process that watches, is not held against the workers; their own silence is."""

import asyncio
from typing import Any

import pytest

from diptych.control.slo import NS_PER_S
from diptych.serving.fleet import heartbeat_monitor
from diptych.serving.fleet.worker_handle import WorkerState
from diptych.serving.link.heartbeat import Pulse

TIMEOUT_S = 10.0


class Host:
    """A clock that only sleeping moves, and pauses: (when, how long nothing of this host runs)."""

    def __init__(self, *pauses: tuple[float, float]) -> None:
        self.now = self.stamp = 1000.0
        self.pauses = [(1000.0 + at, length) for at, length in pauses]
        self.end = 1000.0 + sum(length for _, length in pauses) + 500.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * NS_PER_S)

    async def sleep(self, seconds: float) -> None:
        if self.now > self.end:
            raise asyncio.CancelledError
        self.now += seconds
        self.stamp = self.now
        while self.pauses and self.pauses[0][0] <= self.now:
            self.now += self.pauses.pop(0)[1]  # the watch wakes before any worker has stamped again


class Worker:
    """Stamps while this host runs; from ``dies_s`` on not any more."""

    state = WorkerState.READY

    def __init__(self, host: Host, *, dies_s: float = 1e9) -> None:
        self.host, self.dies_s = host, dies_s
        self.killed: list[tuple[float, str]] = []

    def pulse(self) -> Pulse:
        return Pulse(int(min(self.host.stamp, 1000.0 + self.dies_s) * NS_PER_S), 1, 0, 0)

    def kill(self, because: str) -> None:
        self.killed.append((self.host.now - 1000.0, because))
        self.state = WorkerState.LOST


def watch(monkeypatch: pytest.MonkeyPatch, host: Host, *workers: Worker) -> None:
    monkeypatch.setattr(heartbeat_monitor, "time", host)
    monkeypatch.setattr(heartbeat_monitor.asyncio, "sleep", host.sleep)
    ports: Any = workers

    async def until_the_end() -> None:
        with pytest.raises(asyncio.CancelledError):
            await heartbeat_monitor.watch_pulses(ports, TIMEOUT_S)

    asyncio.run(until_the_end())


@pytest.mark.parametrize("length", [3.0, 11.0, 60.0, 86_400.0])
def test_workers_outlive_a_host_that_was_stopped(length: float, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host((50.0, length), (120.0 + length, length))
    worker = Worker(host)
    watch(monkeypatch, host, worker)
    assert not worker.killed


@pytest.mark.parametrize("pause", [(), ((20.0, 500.0),)], ids=["undisturbed", "after a pause"])
def test_a_worker_that_is_silent_is_killed_all_the_same(pause: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(*pause)
    silent, alive = Worker(host, dies_s=100.0 + sum(length for _, length in pause)), Worker(host)
    watch(monkeypatch, host, silent, alive)
    [(when, because)] = silent.killed
    assert "no sign of life" in because
    assert TIMEOUT_S < when - silent.dies_s < 2 * TIMEOUT_S
    assert not alive.killed
