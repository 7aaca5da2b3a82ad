"""What a front costs: time to the first token that it adds with long prompts, and processor time per streamed token.

    python benchmarks/front.py cost [--rate 100] [--prompt-kb 220] [--streams 64 256] [--engines 2] [--seconds 8]
                               [--repetitions 3] [--vllm-router VENV] [--sglang-router VENV] [--json FILE]

Engines are make-believe servers of known pace (fake_sse_server.py), processes of their own; the client is one, too.
Each way in turn gets the same load, in several rounds: straight to one engine, through ``diptych front``, and through
the routers of vLLM and SGLang where an environment with them is named (``python -m venv VENV; VENV/bin/pip install
vllm-router``). Added time to first token: percentiles through a front less those straight to an engine in the same
round, open loop. Processor time: of all threads of the front's process and its children, over a window in which every
stream runs, per event that the client gets. Reported are the median of the rounds, and their least and most.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common import HERE, report, spread
from servers import free_port

from diptych.base.child_process import end_process

FAKE = HERE / "fake_sse_server.py"
DIPTYCH = (sys.executable, "-c", "from diptych.cli.main import main; main()")
READY_S = 60.0
FIRST_TOKEN_MS = 20.0


def cpu_s(pid: int) -> float:
    """User plus system time of a process, its threads and its children, in seconds."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0]) / 1e9
        total += sum(cpu_s(int(child)) for child in (task / "children").read_text().split())
    return total


@contextmanager
def process(command: list[str], port: int, model: str = "fake") -> Iterator[int]:
    """A server process that answers requests for this model; gives its id."""
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        asyncio.run(_listening(port, started, model))
        yield started.pid
    finally:
        end_process(started, 10)


async def _listening(port: int, started: "subprocess.Popen[bytes]", model: str = "fake") -> None:
    """Until an answer to a whole request has come through."""
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": 1, "stream": True}).encode()
    end = time.monotonic() + READY_S
    while time.monotonic() < end and started.poll() is None:
        try:
            if (await stream(port, request_of(port, body)))[0] is not None:
                return
        except OSError:
            pass
        await asyncio.sleep(0.2)
    raise RuntimeError(f"{started.args} was not ready within {READY_S:g} s")


def request_of(port: int, body: bytes) -> bytes:
    """A whole HTTP request."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def stream(port: int, request: bytes) -> tuple[float | None, int]:
    """Seconds to the first event (None: there was none), and how many events came."""
    begin, first, count = time.perf_counter(), None, 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        while data := await reader.read(65536):
            events = data.count(b'"text":')
            is_last = data.endswith(b"0\r\n\r\n")
            if events and first is None:
                first = time.perf_counter() - begin
            count += events
            if is_last:
                break
    finally:
        writer.close()
    return first, count


def _open_loop(port: int, rate: float, seconds: float, prompt_bytes: int, results: Any) -> None:
    """Requests at even intervals; puts all times to the first token."""

    async def main() -> list[float | None]:
        tasks = []
        begin = time.perf_counter()
        for number in range(int(rate * seconds)):
            text = f"{number} " + "word " * (prompt_bytes // 5)
            body = json.dumps({"model": "fake", "prompt": text, "max_tokens": 2, "stream": True}).encode()
            await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(stream(port, request_of(port, body))))
        return [first for first, _ in await asyncio.gather(*tasks)]

    results.put(asyncio.run(main()))


def _streams(port: int, count: int, results: Any) -> None:
    """Open streams that run until this process is ended; puts the number of events once a second."""

    async def one(total: list[int]) -> None:
        body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 100_000, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_of(port, body))
        while data := await reader.read(65536):
            total[0] += data.count(b'"text":')

    async def main() -> None:
        total = [0]
        streams = [asyncio.create_task(one(total)) for _ in range(count)]
        while not all(each.done() for each in streams):
            results.put((time.monotonic(), total[0]))
            await asyncio.sleep(0.25)

    asyncio.run(main())


def first_tokens(port: int, options: argparse.Namespace) -> list[float]:
    """Milliseconds to the first token of every request that was answered."""
    context = get_context("spawn")
    results = context.Queue()
    arguments = (port, options.rate, options.seconds, options.prompt_kb * 1000, results)
    client = context.Process(target=_open_loop, args=arguments, daemon=True)
    client.start()
    found = results.get(timeout=options.seconds + 120)
    client.join()
    assert None not in found, f"{found.count(None)} of {len(found)} requests were not answered"
    return sorted(1e3 * first for first in found)


def per_token(port: int, pid: int, count: int, seconds: float) -> tuple[float, float]:
    """(microseconds of processor time per event, events a second)."""
    context = get_context("spawn")
    results = context.Queue()
    client = context.Process(target=_streams, args=(port, count, results), daemon=True)
    client.start()
    try:
        time.sleep(3.0 + count / 100)
        while not results.empty():
            results.get()
        begin_s, begin = results.get(timeout=10)
        begin_cpu = cpu_s(pid)
        time.sleep(seconds)
        while not results.empty():
            results.get()
        cpu = cpu_s(pid) - begin_cpu
        end_s, end = results.get(timeout=10)
    finally:
        client.terminate()
        client.join()
    rate = (end - begin) / (end_s - begin_s)
    return 1e6 * cpu / (rate * seconds), rate


def ways(options: argparse.Namespace, engines: list[int]) -> dict[str, list[str]]:
    """The command of each front, without its port."""
    urls = [f"http://127.0.0.1:{port}" for port in engines]
    found = {
        "diptych": [*DIPTYCH, "front", *(part for url in urls for part in ("--engine", f"openai={url}")), "--port"]
    }
    for name, venv, module in (
        ("vllm-router", options.vllm_router, "vllm_router.launch_router"),
        ("sglang-router", options.sglang_router, "sglang_router.launch_router"),
    ):
        if venv is not None:
            command = [str(venv / "bin" / "python"), "-m", module, "--worker-urls", *urls, "--policy", "cache_aware"]
            found[name] = [*command, "--prometheus-port", str(free_port()), "--host", "127.0.0.1", "--port"]
    return found


def first_token_times(port: int, options: argparse.Namespace) -> tuple[float, float]:
    """(p50, p99) of the time to the first token, milliseconds."""
    times = first_tokens(port, options)
    return times[(len(times) - 1) // 2], times[int(0.99 * (len(times) - 1))]


@dataclass
class Found:
    """What was measured of one way, a value for each round."""

    first_tokens: list[tuple[float, float]] = field(default_factory=list)
    per_token: dict[int, list[tuple[float, float]]] = field(default_factory=dict)


def row_of(name: str, straight: list[tuple[float, float]], found: Found) -> dict[str, Any]:
    """One row of the table: medians over the rounds, and in brackets the least and the most."""
    row: dict[str, Any] = {"through": name or "(no front)"}
    for at, label in ((0, "p50"), (1, "p99")):
        row[f"TTFT {label} ms"] = spread([times[at] for times in found.first_tokens])
        if name:
            pairs = zip(found.first_tokens, straight, strict=True)
            row[f"added {label} ms"] = spread([times[at] - without[at] for times, without in pairs])
    for count, costs in found.per_token.items():
        row[f"us/token, {count} streams"] = spread([cost for cost, _ in costs])
        row[f"tokens/s, {count} streams"] = round(statistics.median(rate for _, rate in costs))
    return row


def measure(fronts: dict[str, tuple[int, int]], port: int, options: argparse.Namespace) -> dict[str, Found]:
    """By name ("": without a front); in every round all take turns. fronts: (port, process). port: of an engine."""
    found = {name: Found() for name in ("", *fronts)}
    for number in range(options.repetitions):
        found[""].first_tokens.append(first_token_times(port, options))
        for name, (front, _) in fronts.items():
            found[name].first_tokens.append(first_token_times(front, options))
        for count in options.streams:
            for name, (front, pid) in fronts.items():
                found[name].per_token.setdefault(count, []).append(per_token(front, pid, count, options.seconds))
        print(f"round {number + 1} of {options.repetitions} is done", file=sys.stderr, flush=True)
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--prompt-kb", type=int, default=220)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--vllm-router", type=Path)
    parser.add_argument("--sglang-router", type=Path)


def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    pace = json.dumps({"ttft_ms": FIRST_TOKEN_MS, "itl_ms": 20.0})
    ports = [free_port() for _ in range(options.engines)]
    commands = [[sys.executable, str(FAKE), "--port", str(port), "--pace", pace] for port in ports]
    engines = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    try:
        time.sleep(2.0)
        with ExitStack() as running:
            fronts = {}
            for name, command in ways(options, ports).items():
                port = free_port()
                fronts[name] = (port, running.enter_context(process([*command, str(port)], port)))
            found = measure(fronts, ports[0], options)
    finally:
        for engine in engines:
            engine.terminate()
            engine.wait()
    rows = [row_of(name, found[""].first_tokens, each) for name, each in found.items()]
    settings = {"rate": options.rate, "prompt_kb": options.prompt_kb, "engines": options.engines}
    rounds = {name: asdict(each) for name, each in found.items()}
    report("what a front costs", rows, options.json, **settings, loadavg=os.getloadavg()[0], rounds=rounds)
