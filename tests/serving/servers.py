"""Server processes for the tests: start, find the address, stop."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.supervisor import Supervisor

CLI = (sys.executable, "-m", "diptych")
FAKE_SERVER = Path(__file__).parent / "fake_server.py"


@dataclass
class RunningServer:
    """A server process that is ready."""

    process: "subprocess.Popen[str]"
    url: str
    log: Path | None = None
    key: str | None = None  # that its metrics are asked for with

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        parts = urlsplit(self.url)
        assert parts.hostname and parts.port
        return parts.hostname, parts.port

    def metrics(self) -> dict[str, float]:
        """Metrics by name with labels (without model_name)."""
        values = {}
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        with urlopen(Request(f"{self.url}/metrics", headers=headers)) as reply:
            text = reply.read().decode()
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                bare = re.sub(r',?model_name="[^"]*"', "", name).replace("{,", "{").replace("{}", "")
                values[bare] = float(value)
        return values

    def terminate(self, timeout_s: float = 20.0) -> int:
        """SIGTERM and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def wait_until(condition: Any, timeout_s: float = 60.0) -> None:
    """Poll until the condition holds. The limit is for a machine on which much else runs."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


@contextmanager
def running(command: Sequence[str], log: Path | None = None) -> Iterator[RunningServer]:
    """Start a server and read its output until it says where it serves. log: gets its standard error."""
    with ExitStack() as stack:
        stderr = stack.enter_context(log.open("w")) if log else None
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        url = None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if match := re.search(r"(?:served|guide is) at (http://\S+)", line):
                url = match[1]
                break
        assert url, f"the server ended before it was ready: {seen}"
        yield RunningServer(process, url, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.stdout is not None
        process.stdout.close()


def fake_server(log: Path | None = None, **settings: Any) -> Any:
    """A server with the make-believe model; see fake_server.py."""
    return running((sys.executable, str(FAKE_SERVER), json.dumps(settings)), log)


KEYS = ("secret", "second")  # of the shared server that asks for one
_SHARED: dict[str, RunningServer] = {}
_STARTED = ExitStack()


def shared_fake_server(**settings: Any) -> RunningServer:
    """A server with the make-believe model that tests of this process use one after the other. It is not theirs to end,
    to change or to count on: its caches are not empty, its counters not zero, and its timeline is not theirs alone.
    What earlier tests asked of it has ended when it is handed out."""
    name = json.dumps(settings, sort_keys=True)
    if name not in _SHARED:
        server = _STARTED.enter_context(fake_server(**settings))
        server.key = next(iter(settings.get("serve", {}).get("api_keys", ())), None)
        _SHARED[name] = server
    server = _SHARED[name]
    assert server.process.poll() is None, "a test has ended a server that others use"
    wait_until(lambda: is_idle(server))
    return server


def is_idle(server: RunningServer) -> bool:
    """Whether no request is open there."""
    metrics = server.metrics()
    return metrics["vllm:num_requests_running"] == 0 and metrics["vllm:num_requests_waiting"] == 0


@pytest.fixture(scope="session", autouse=True)
def end_of_shared_servers() -> Iterator[None]:
    """For the conftest of every folder whose tests share servers."""
    yield
    _SHARED.clear()
    _STARTED.close()


def process_of(fleet: Fleet, worker: int) -> int:
    """The process id of a worker that is a child of this process (0: it is not running)."""
    port = fleet.workers[worker]
    assert isinstance(port, Supervisor)
    return port.worker_pid or 0
