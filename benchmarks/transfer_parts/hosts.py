"""What workers on other hosts cost: a front end with many of them, joining, and a front end that restarts.

    python benchmarks/transfer.py hosts [--model PATH] [--workers 64] [--seconds 20] [--parts joined,join]
                               [--json hosts.json]

joined: the front end's share of a core and its memory, with --workers joined workers that compute no model and take 20
steps a second each, every one with a stream that a client reads.
join: from the start of ``diptych worker --join`` to the first token, with the weights in the page cache; and after the
front end was killed and started again, until it is ready with the same workers.
All processes are on this machine: what is measured is processor time and waiting, not a network.
"""

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import ROOT, names_of, report
from servers import PORT, PROGRAM, URL, diptych_server, free_port

from diptych.base.child_process import end_process
from diptych.serving.link.engine_options import BUNDLED_MODEL
from diptych.tls.shared_key import SharedKey

TESTS = ROOT / "tests" / "serving"
KEY = SharedKey(b"k" * 32)
WARM_S = 5.0  # before the window
AGENTS_PER_PROCESS = 8
AGENTS = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from fake_worker import fake_command
from diptych.serving.join.worker_agent import AgentOptions, WorkerAgent
from diptych.tls.shared_key import SharedKey
port, count, model = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
async def main():
    command = fake_command(step_ms=50.0)
    options = AgentOptions(host="127.0.0.1", port=port, key=SharedKey(b"k" * 32), model=model, command=command)
    agents = [WorkerAgent(options) for _ in range(count)]
    await asyncio.gather(*(agent.run() for agent in agents))
asyncio.run(main())
"""


@contextmanager
def key_file() -> Iterator[str]:
    """The key, as a file."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(KEY.secret)
        file.flush()
        yield file.name


@contextmanager
def ended(process: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    """Ends with the block."""
    try:
        yield process
    finally:
        end_process(process)


def _until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """When it was met, in seconds of the monotonic clock."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            if condition():
                return time.monotonic()
        except OSError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{what} took more than {timeout_s:g} s")


def _is_ready() -> bool:
    with urllib.request.urlopen(URL + "/ready", timeout=2) as reply:
        return bool(reply.status == 200)


def _num_ready() -> int:
    with urllib.request.urlopen(URL + "/admin/workers", timeout=5) as reply:
        return sum(worker["state"] == "ready" for worker in json.load(reply)["workers"])


def _read_stream(until: threading.Event, counts: list[int]) -> None:
    """One client: long streams, one after the other."""
    body = {"prompt": list(range(64)), "max_tokens": 4000, "ignore_eos": True, "stream": True}
    while not until.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        while not until.is_set() and reply.readline():
            counts.append(1)
        connection.close()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def joined(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The front end's share of a core and its memory beside many joined workers."""
    door, stop, counts = free_port(), threading.Event(), list[int]()
    with ExitStack() as stack:
        path = stack.enter_context(key_file())
        server = _front_end(stack, options.model, door, path, str(options.workers))
        for first in range(0, options.workers, AGENTS_PER_PROCESS):
            count = min(AGENTS_PER_PROCESS, options.workers - first)
            command = [sys.executable, "-c", AGENTS, str(TESTS), str(door), str(count), str(options.model)]
            stack.enter_context(ended(subprocess.Popen(command, stderr=subprocess.DEVNULL)))
        _until(lambda: _num_ready() == options.workers, 60 + 4 * options.workers, "joining")
        clients = [threading.Thread(target=_read_stream, args=(stop, counts)) for _ in range(options.workers)]
        for client in clients:
            client.start()
        time.sleep(WARM_S)
        begun_s, cpu_s, num_tokens, rss_mib = time.monotonic(), _cpu_s(server.pid), len(counts), _rss_mib(server.pid)
        time.sleep(options.seconds)
        passed_s = time.monotonic() - begun_s
        row = {
            "what": f"{options.workers} joined workers, a stream each",
            "lines_per_s": (len(counts) - num_tokens) / passed_s,
            "front_end_cores": (_cpu_s(server.pid) - cpu_s) / passed_s,
            "rss_mib": _rss_mib(server.pid),
            "rss_grown_mib": _rss_mib(server.pid) - rss_mib,
        }
        stop.set()
        for client in clients:
            client.join()
    return [row]


def _front_end(stack: ExitStack, model: Path, door: int, path: str, most: str) -> "subprocess.Popen[bytes]":
    """A front end without workers of its own."""
    command = [PROGRAM, "serve", "--model", str(model), "--port", str(PORT), "--both", "0", "--key-file", path]
    command += ["--listen-workers", f"127.0.0.1:{door}", "--max-workers", most]
    return stack.enter_context(ended(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)))


def _first_token_s() -> float:
    """When the first token of a short prompt was there."""
    body = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
    request = urllib.request.Request(URL + "/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).close()
    return time.monotonic()


def join(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds from a worker's start to its first token, and from a front end's restart to ready."""
    door = free_port()
    with ExitStack() as stack:
        path = stack.enter_context(key_file())
        with diptych_server(options.model):  # the weights are in the page cache then
            pass
        server = _front_end(stack, options.model, door, path, "4")
        command = [PROGRAM, "worker", "--model", str(options.model), "--join", f"127.0.0.1:{door}", "--key-file", path]
        _until(lambda: bool(_connects(door)), 60, "the front end's start")
        begun_s = time.monotonic()
        stack.enter_context(ended(subprocess.Popen(command, stderr=subprocess.DEVNULL)))
        _until(_is_ready, 120, "joining")
        joined_s = _first_token_s() - begun_s
        server.send_signal(signal.SIGKILL)
        server.wait()
        begun_s = time.monotonic()
        _front_end(stack, options.model, door, path, "4")
        ready_s = _until(_is_ready, 120, "the restart") - begun_s
    model = Path(options.model).name
    return [{"what": f"one worker, {model}", "join_to_first_token_s": joined_s, "restart_to_ready_s": ready_s}]


def _connects(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 1):
        return True


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "joined": joined,
    "join": join,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--parts", type=names_of(PARTS), default=list(PARTS))


def main(options: argparse.Namespace) -> None:
    """The parts that were asked for."""
    rows: list[dict[str, Any]] = []
    for name in options.parts:
        rows += PARTS[name](options)
    report("hosts", rows, options.json)
