"""What each signal does to each process: who is asked to end lets the running end, and leaves nothing behind."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from servers import CLI, FAKE_SERVER, fake_server, running, wait_until
from test_server_life import first_event, stream

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def first_of(*numbers: signal.Signals) -> list[Any]:
    """These, and the other stop signals as slow tests: a server that serves gets each of them in the usual run."""
    slow = [pytest.param(number, marks=pytest.mark.slow) for number in STOP_SIGNALS if number not in numbers]
    return [*numbers, *slow]


def is_ready(url: str) -> bool:
    return httpx.get(f"{url}/ready").status_code == 200


@contextmanager
def ended_at_last(process: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.mark.system
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_lets_the_running_end(number: signal.Signals) -> None:
    with fake_server(step_ms=5) as server:
        with stream(server.url, max_tokens=300) as reply:
            _, rest = first_event(reply)
            server.process.send_signal(number)
            wait_until(lambda: not is_ready(server.url))
            events = list(rest)
        assert events[-1] == "data: [DONE]" and json.loads(events[-2].removeprefix("data: "))["choices"]
        assert server.process.wait(60) == 0


@pytest.mark.system
@pytest.mark.parametrize("second", first_of(signal.SIGTERM))
def test_a_second_stop_signal_of_any_kind_ends_the_drain(second: signal.Signals) -> None:
    with fake_server(step_ms=5, serve={"drain_timeout_s": 600}) as server, stream(server.url) as reply:
        _, rest = first_event(reply)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: not is_ready(server.url))
        server.process.send_signal(second)
        assert server.process.wait(60) == 0
        assert "shutting down" in list(rest)[-2]


@pytest.mark.system
def test_a_server_that_its_parent_keeps_from_hang_ups_serves_on() -> None:
    command = ("nohup", sys.executable, str(FAKE_SERVER), json.dumps({"step_ms": 1}))
    with running(command) as server:
        server.process.send_signal(signal.SIGHUP)
        for _ in range(3):
            assert httpx.post(f"{server.url}/v1/completions", json={"prompt": [1], "max_tokens": 3}).status_code == 200
        assert is_ready(server.url) and server.terminate(60) == 0


@pytest.mark.system
def test_a_terminal_that_is_closed_lets_the_running_end() -> None:
    terminal, its_end = pty.openpty()
    command = [sys.executable, str(FAKE_SERVER), json.dumps({"step_ms": 5})]
    takes_terminal = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", takes_terminal, *command],
        stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True,
    )  # fmt: skip
    os.close(its_end)
    with ended_at_last(process):
        with os.fdopen(terminal, "rb", buffering=0) as screen:
            shown = b""
            while b"\n" not in shown or b"served at" not in shown:
                shown += screen.read(4096)
            url = shown.decode().split("served at ")[1].split()[0]
            with stream(url, max_tokens=300) as reply:
                _, rest = first_event(reply)
                screen.close()
                assert list(rest)[-1] == "data: [DONE]"
        assert process.wait(60) == 0


@pytest.mark.system
@pytest.mark.parametrize("number", first_of(signal.SIGINT))
def test_a_server_that_is_still_loading_ends(number: signal.Signals, tmp_path: Path) -> None:
    command = (sys.executable, str(FAKE_SERVER), json.dumps({"load_s": 600}))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with ended_at_last(subprocess.Popen(command, env=environment)) as process:
        parent = psutil.Process(process.pid)
        wait_until(parent.children)
        workers = parent.children()
        process.send_signal(number)
        assert process.wait(60) == 0
        assert not any(worker.is_running() for worker in workers) and not list(tmp_path.iterdir())


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGKILL])
def test_no_worker_outlives_a_server_that_is_ended_at_once(number: signal.Signals) -> None:
    with fake_server() as server:
        workers = psutil.Process(server.process.pid).children(recursive=True)
        assert workers
        server.process.send_signal(number)
        assert server.process.wait(60) == -number
        wait_until(lambda: not any(worker.is_running() for worker in workers))


def first_line(process: "subprocess.Popen[bytes]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode()


def of_its_own_group(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)


@pytest.mark.system
@pytest.mark.parametrize("number", first_of(signal.SIGHUP))
def test_the_guide_ends_with_its_process_of_panels(number: signal.Signals) -> None:
    with ended_at_last(of_its_own_group((*CLI, "guide", "--port", "0"))) as process:
        assert "The guide is at" in first_line(process)
        panels = psutil.Process(process.pid).children()
        assert len(panels) == 1
        os.killpg(process.pid, number)  # as a terminal does
        assert process.wait(60) == 0 and not panels[0].is_running()


@pytest.mark.system
@pytest.mark.parametrize("number", first_of(signal.SIGHUP))
def test_a_worker_without_a_front_end_ends(number: signal.Signals, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32).hex().encode())
    key.chmod(0o600)
    command = (*CLI, "worker", "--join", "127.0.0.1:1", "--key-file", str(key))
    with ended_at_last(subprocess.Popen(command, stderr=subprocess.PIPE)) as process:
        assert process.stderr is not None and b"no front end" in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(60) == 0
        process.stderr.close()


@pytest.mark.system
def test_the_processes_beside_a_server_are_not_ended_by_its_terminal() -> None:
    """The server ends them when it has drained: an answer whose grammar is being tried needs one until then."""
    with ended_at_last(of_its_own_group((*CLI, "serve", "--port", "0", "--kv-cache-memory", "16MiB"))) as process:
        url = ""
        while "served at" not in url:
            url = first_line(process)
        url = url.split("served at ")[1].split()[0]
        wait_until(lambda: is_ready(url))
        asked = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[ab]{4}"}}
        assert httpx.post(f"{url}/v1/completions", json=asked, timeout=60).status_code == 200
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 3, "a worker, what tries grammars, and its fork"
        for child in children:
            for number in (signal.SIGINT, signal.SIGHUP):
                child.send_signal(number)
        assert httpx.post(f"{url}/v1/completions", json={**asked, "prompt": "b"}, timeout=60).status_code == 200
        assert psutil.Process(process.pid).children(recursive=True) == children
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(60) == 0
