"""CPU time of the server process per streamed token: the front end alone, in front of a make-believe worker.

The worker (tests/serving/fake_worker.py, a process of its own) emits one token per stream every ``--step-ms``; the
clients (another process) read plain sockets. Counted: user and system time of the server process over a window in
which every stream is running, divided by the tokens that it sent in that window. Work done once per request is not in
the window.

    python benchmarks/overhead.py http [--streams 1 8 64 256] [--step-ms 20] [--chat]
"""

import argparse
import asyncio
import json
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from common import ROOT, report

sys.path.insert(0, str(ROOT / "tests" / "serving"))

from servers import fake_server

START_S = 60.0
PROMPT_TOKENS = 300  # the make-believe answer goes on counting: past the vocabulary's single bytes, which are no text


def cpu_s(pid: int) -> float:
    """User plus system time of all threads of a process, as its scheduler counts it: in nanoseconds."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def num_sent(url: str) -> float:
    """Tokens that the server has received from its worker."""
    text = urlopen(f"{url}/metrics").read().decode()
    lines = (line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total"))
    return float(next(lines).split()[-1])


def clients(url: str, count: int, path: str, body: dict[str, Any]) -> None:
    """Open the streams and throw away what comes (in a process of its own)."""

    async def one(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
        )
        writer.write("\r\n".join((*head, "", "")).encode() + data)
        while await reader.read(65536):
            pass

    async def main() -> None:
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        await asyncio.gather(*(one(parts.hostname, parts.port) for _ in range(count)))

    asyncio.run(main())


def measure(streams: int, step_ms: float, seconds: float, chat: bool) -> dict[str, Any]:
    """One row of the table."""
    body: dict[str, Any] = {"max_tokens": 7000, "ignore_eos": True, "stream": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    if chat:
        body["messages"] = [{"role": "user", "content": "x " * PROMPT_TOKENS}]
    else:
        body["prompt"] = [5] * PROMPT_TOKENS
    scheduler = {"max_num_seqs": max(256, streams)}
    with fake_server(step_ms=step_ms, num_blocks=streams * 260, scheduler=scheduler) as server:
        reader = get_context("spawn").Process(target=clients, args=(server.url, streams, path, body), daemon=True)
        reader.start()
        give_up = time.monotonic() + START_S
        while num_sent(server.url) < 2 * streams and time.monotonic() < give_up:  # the clients are starting
            time.sleep(0.2)
        time.sleep(2.0 + streams / 200)
        start_tokens = num_sent(server.url)  # that page, too, costs CPU: before what is counted, and after it
        start_cpu, start = cpu_s(server.process.pid), time.monotonic()
        time.sleep(seconds)
        cpu, elapsed = cpu_s(server.process.pid) - start_cpu, time.monotonic() - start
        tokens = num_sent(server.url) - start_tokens
        reader.terminate()
        reader.join()
    return {
        "streams": streams,
        "tokens/s": round(tokens / elapsed),
        "server CPU": f"{cpu / elapsed:.0%}",
        "us/token": round(1e6 * cpu / tokens, 1),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--chat", action="store_true")


def main(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    rows = [measure(n, arguments.step_ms, arguments.seconds, arguments.chat) for n in arguments.streams]
    report("server CPU per streamed token", rows, arguments.json, step_ms=arguments.step_ms, chat=arguments.chat)
