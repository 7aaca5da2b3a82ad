#!/usr/bin/env python3
"""A crowd at the front end's door: 8,000 streams that are open at once, and 20,000 requests that wait at once.

    python benchmarks/queues.py [--streams 8000] [--queued 20000] [--descriptors N] [--json queues.json]

The server is the real front end before a make-believe worker (tests/serving/fake_worker.py). Clients are plain
connections of other processes, each opened with one request, all without a pause in between. For the streams the worker
has room for all of them, and each client reads. For the queue the worker is busy with a few streams until all requests
wait; then these end, and every waiting request must be answered. Counted is how each call ended: an answer, a refusal
(429 or 503, with Retry-After or without), or a connection that was reset, closed or never answered; and the memory of
the front end before, at the most, and after all have gone. ``--descriptors`` limits the server's open files.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from common import report
from loopback import Crowd, http_request, is_by_the_book, listen_drops, memory_of, raise_descriptor_limit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.serving.servers import FAKE_SERVER, RunningServer, running  # noqa: E402

CALLS_PER_PROCESS = 8_000
NUM_BLOCKS_EACH = 40  # of a stream: prompt and answer
STREAM_TOKENS = 1_000
NUM_BLOCKING = 4
BLOCKING_TOKENS = 1_000_000
STEP_MS = {"streams": 1000, "queued": 2}
PROMPT = [5] * 16


def crowd_process(pipe: Connection, address: tuple[str, int], request: bytes, count: int) -> None:
    """A part of the crowd. Reads "count" (how many streams are open, replies are over), "wait" (until all are over),
    and "leave", and answers each."""
    raise_descriptor_limit()
    crowd = Crowd(address)
    pipe.send("ready")
    while True:
        crowd.run(pipe.poll, 3600)
        order = pipe.recv()
        if order == "call":
            crowd.call([request] * count)
        elif order == "count":
            pipe.send((crowd.count_open(), len(crowd.over)))
        elif order == "leave":
            waited = [caller.first_byte_s - caller.started_s for caller in crowd.over if caller.first_byte_s]
            waited += [c.first_byte_s - c.started_s for c in crowd.callers.values() if c.first_byte_s]
            num_silent = sum(not caller.reply.num_bytes for caller in crowd.callers.values())
            crowd.hang_up()
            pipe.send((crowd.fates(), num_silent, max(waited, default=0.0)))
            return


class Crowds:
    """The crowd in several processes: one alone may have too few descriptors."""

    def __init__(self, address: tuple[str, int], request: bytes, count: int) -> None:
        parts = [min(CALLS_PER_PROCESS, count - at) for at in range(0, count, CALLS_PER_PROCESS)]
        context = get_context("spawn")
        self._pipes = []
        for part in parts:
            ours, theirs = context.Pipe()
            context.Process(target=crowd_process, args=(theirs, address, request, part), daemon=True).start()
            assert ours.recv() == "ready"
            self._pipes.append(ours)

    def say(self, order: str) -> None:
        """To every process."""
        for pipe in self._pipes:
            pipe.send(order)

    def ask(self, order: str) -> list[Any]:
        """What every process answers."""
        self.say(order)
        return [pipe.recv() for pipe in self._pipes]


class Samples:
    """Values of a server's /metrics, read twice a second by a thread over one connection: a server that is full would
    take no other, and closes one that is idle."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._connection = HTTPConnection(*address, timeout=600)
        self._lines = self._read()
        Thread(target=self._keep_reading, daemon=True).start()

    def __call__(self, *names: str) -> list[float]:
        """By the beginnings of their lines, each the sum of its lines."""
        lines = self._lines
        return [sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)) for name in names]

    def _keep_reading(self) -> None:
        with suppress(HTTPException, OSError):  # the server has ended
            while True:
                time.sleep(0.5)
                self._lines = self._read()

    def _read(self) -> list[str]:
        self._connection.request("GET", "/metrics")
        with self._connection.getresponse() as reply:
            if reply.status != 200:
                raise HTTPException(f"/metrics has status {reply.status}")
            return reply.read().decode().splitlines()


@contextmanager
def front_end(kind: str, count: int, descriptors: int) -> Iterator[RunningServer]:
    """A server with a make-believe worker: for streams it has room for all, for a queue it has little."""
    num_blocks = NUM_BLOCKS_EACH * count if kind == "streams" else NUM_BLOCKING * BLOCKING_TOKENS // 16
    settings: dict[str, Any] = {"step_ms": STEP_MS[kind], "num_blocks": num_blocks, "max_model_len": 2**22}
    seqs = count if kind == "streams" else NUM_BLOCKING
    budget = {"max_batched_tokens": max(2048, seqs)}
    settings["scheduler"] = {"max_num_seqs": seqs, "max_waiting": 10**6, "budget": budget}
    settings["cluster"] = {
        "max_queued": 10**6,
        **({"max_prefills_in_flight_per_worker": 0} if kind == "streams" else {}),
    }
    command = [sys.executable, str(FAKE_SERVER), json.dumps(settings)]
    if descriptors:
        command = ["bash", "-c", f'ulimit -n {descriptors}; exec "$0" "$@"', *command]
    with running(command) as server:
        yield server


def wait_for(condition: Any, seconds: float, pause_s: float = 1.0) -> bool:
    """Ask again and again. Returns whether the condition came to hold in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(pause_s)
    return False


def row_of(kind: str, count: int, fates: Counter[str], memory: list[dict[str, float]], **more: Any) -> dict[str, Any]:
    """A row of the table. memory: before, at the most, after."""
    before, most, after = memory
    return {
        "what": kind,
        "calls": count,
        "resets": sum(n for fate, n in fates.items() if fate.startswith("E") or fate.startswith("connect")),
        "otherwise than documented": sum(n for fate, n in fates.items() if not is_by_the_book(fate)),
        **more,
        "RSS before MiB": round(before["rss"], 1),
        "at most": round(most["rss"], 1),
        "after": round(after["rss"], 1),
        "KiB each": round((most["rss"] - before["rss"]) * 1024 / max(1, count), 1),
    }


def measure_streams(count: int, descriptors: int, seconds: float) -> tuple[dict[str, Any], Counter[str]]:
    """Streams that are open at the same time."""
    body = {"prompt": PROMPT, "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
    with front_end("streams", count, descriptors) as server:
        pid, drops, samples = server.process.pid, listen_drops(), Samples(server.address)
        crowds = Crowds(server.address, http_request("POST", "/v1/completions", body), count)
        memory, started = [memory_of(pid)], time.monotonic()
        crowds.say("call")
        num_open = num_over = 0

        def all_are_there() -> bool:
            nonlocal num_open, num_over
            num_open, num_over = map(sum, zip(*crowds.ask("count"), strict=True))
            print(f"\r{num_open} streams, {num_over} over", end="", file=sys.stderr)
            return num_open + num_over >= count

        wait_for(all_are_there, seconds)
        took_s = time.monotonic() - started
        time.sleep(5)  # some tokens for each
        memory.append(memory_of(pid))
        fates, row = gone(crowds)
        wait_for(lambda: not any(samples("vllm:num_requests_running", "vllm:num_requests_waiting")), 120)
        memory.append(memory_of(pid))
        overflows = listen_drops()["ListenOverflows"] - drops["ListenOverflows"]
    print(file=sys.stderr)
    row |= {"open": num_open, "seconds": round(took_s, 1), "backlog overflows": overflows}
    return row_of("streams", count, fates, memory, **row), fates


def measure_queue(count: int, descriptors: int, seconds: float) -> tuple[dict[str, Any], Counter[str]]:
    """Requests that wait at the same time, and are then answered."""
    blocking = {"prompt": PROMPT, "max_tokens": BLOCKING_TOKENS, "ignore_eos": True, "stream": True}
    with front_end("queued", count, descriptors) as server:
        pid, drops, samples = server.process.pid, listen_drops(), Samples(server.address)
        blockers = Crowds(server.address, http_request("POST", "/v1/completions", blocking), NUM_BLOCKING)
        blockers.say("call")
        wait_for(lambda: samples("vllm:num_requests_running") == [NUM_BLOCKING], 60)
        crowds = Crowds(
            server.address, http_request("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 2}), count
        )
        memory, started = [memory_of(pid)], time.monotonic()
        crowds.say("call")
        num_waiting = num_over = 0

        def all_wait() -> bool:
            nonlocal num_waiting, num_over
            num_over = sum(over for _, over in crowds.ask("count"))
            num_waiting = round(samples("vllm:num_requests_waiting")[0])
            print(f"\r{num_waiting} wait, {num_over} over", end="", file=sys.stderr)
            return num_waiting + num_over >= count

        wait_for(all_wait, seconds)
        took_s = time.monotonic() - started
        memory.append(memory_of(pid))
        blockers.ask("leave")
        wait_for(lambda: sum(over for _, over in crowds.ask("count")) >= count, seconds)
        fates, row = gone(crowds)
        time.sleep(1)
        memory.append(memory_of(pid))
        overflows = listen_drops()["ListenOverflows"] - drops["ListenOverflows"]
    print(file=sys.stderr)
    row |= {"waited at once": num_waiting, "seconds": round(took_s, 1), "backlog overflows": overflows}
    return row_of("queued", count, fates, memory, **row), fates


def gone(crowds: Crowds) -> tuple[Counter[str], dict[str, Any]]:
    """How the calls ended, after the crowd has left; silent: those that never got a byte."""
    fates, silent, longest = Counter[str](), 0, 0.0
    for counts, num_silent, waited in crowds.ask("leave"):
        fates += counts
        silent += num_silent
        longest = max(longest, waited)
    return fates, {"never answered": silent, "first byte max s": round(longest, 1)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8_000, help="open at once (0: not measured)")
    parser.add_argument("--queued", type=int, default=20_000, help="waiting at once (0: not measured)")
    parser.add_argument("--descriptors", type=int, default=0, help="the server's limit (ulimit -n; 0: as it is)")
    parser.add_argument("--seconds", type=float, default=300.0, help="until all must be there, or answered")
    parser.add_argument("--json")
    given = parser.parse_args()
    rows, fates = [], {}
    for kind, count, measure in (("streams", given.streams, measure_streams), ("queued", given.queued, measure_queue)):
        if count:
            row, ends = measure(count, given.descriptors, given.seconds)
            rows.append(row)
            fates[kind] = dict(ends)
            print(f"{kind}: " + ", ".join(f"{number} {fate}" for fate, number in ends.most_common()))
    report("queues", rows, given.json, fates=fates, descriptors=given.descriptors or raise_descriptor_limit())


if __name__ == "__main__":
    main()
