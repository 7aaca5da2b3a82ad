"""What ``diptych bench`` itself costs, and how much it distorts: many streams from a make-believe server.

    python benchmarks/bench.py overhead [--streams 2000] [--rate 5000] [--seconds 20] [--json client_overhead.json]

The server (fake_sse_server.py, a process of its own) writes each token at a known time on the clock that both processes
share. Reported: CPU time of the client per received token; the delay from the server's write of a request's first token
to the client's time stamp (kernel, loopback and client together); and what a TTFT has beside the time that the server
gave it: that delay, and the time from the intended sending until the server has read the request, its own queue
included. The second row is the hardest case: all requests come within 50 ms, and their tokens too.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
from typing import Any

from common import HERE, OtherLoad, report

from diptych.bench.load import LoadResult
from diptych.bench.session import BenchConfig, drive, open_session
from diptych.bench.target import TargetConfig
from diptych.report.statistics import percentile
from diptych.workload.description import ArrivalConfig, LengthConfig, LengthsConfig, WorkloadConfig


def workload(streams: int, tokens: int, spread_s: float) -> WorkloadConfig:
    """One request per stream; they arrive evenly within ``spread_s``."""
    lengths = LengthsConfig(prompt=LengthConfig(mean=64), output=LengthConfig(mean=tokens))
    return WorkloadConfig(
        num_requests=streams, rate=streams / spread_s, arrivals=ArrivalConfig(kind="constant"), lengths=lengths
    )


async def measure(url: str, streams: int, tokens: int, itl_ms: float, spread_s: float) -> LoadResult:
    """All streams once."""
    pace = {"ttft_ms": 100.0, "itl_ms": itl_ms}
    target = TargetConfig(url=url, extra={"fake": pace})
    config = BenchConfig(target=target, workload=workload(streams, tokens, spread_s))
    async with open_session(config) as session:
        return await session.run()


def row(name: str, result: LoadResult, others: float) -> dict[str, Any]:
    """The figures of a run."""
    first, last, added = [], [], []
    for record in result.records:
        assert record.server_ms is not None and record.is_completed, record.error
        assert record.ttft_ns is not None
        added.append((record.ttft_ns - (record.server_ms["first_ns"] - record.server_ms["asked_ns"])) / 1e6)
        first.append((record.stamps[0] + result.start_ns - record.server_ms["first_ns"]) / 1e6)
        last.append((record.stamps[-1] + result.start_ns - record.server_ms["last_ns"]) / 1e6)
    tokens = sum(record.output_tokens for record in result.records)
    for values in (first, last, added):
        values.sort()
    return {
        "case": name,
        "streams": len(result.records),
        "tokens/s": round(tokens / (result.duration_ns / 1e9)),
        "CPU us/token": round(result.health.cpu_us_per_token or 0, 1),
        "client cores": round(result.health.cpu_share, 3),
        "first token late p50 ms": round(percentile(first, 50), 3),
        "p99 ms": round(percentile(first, 99), 3),
        "max ms": round(first[-1], 3),
        "last token late p99 ms": round(percentile(last, 99), 3),
        "TTFT added p50 ms": round(percentile(added, 50), 3),
        "TTFT added p99 ms": round(percentile(added, 99), 3),
        "sent late p99 ms": round(result.health.late_p99_ms, 3),
        "others' cores": round(others, 2),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=5000.0, help="tokens per second, of all streams")
    parser.add_argument("--seconds", type=float, default=20.0)


def main(options: argparse.Namespace) -> None:
    """Start the server, measure, print."""
    itl_s = options.streams / options.rate
    tokens = max(2, round(options.seconds / itl_s))
    server = subprocess.Popen([sys.executable, str(HERE / "fake_sse_server.py")], stdout=subprocess.PIPE, text=True)
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(server.pid, {1})
        os.sched_setaffinity(0, {0})
    rows = []
    try:
        assert server.stdout is not None
        url = re.findall(r"http\S+", server.stdout.readline())[0]
        cases = (("spread", itl_s * 4), ("at once", 0.05))
        for name, spread_s in cases:
            load = OtherLoad()
            result = drive(measure(url, options.streams, tokens, 1e3 * itl_s, spread_s))
            rows.append(row(name, result, load.cores()))
            asyncio.run(asyncio.sleep(1))
    finally:
        server.terminate()
        server.wait()
    report("client overhead", rows, options.json)
