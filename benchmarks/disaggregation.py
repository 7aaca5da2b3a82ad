"""One prefill worker and one decode worker, one core each: long prompts, the cost of a handoff, cancel storms.

    python benchmarks/disaggregation.py MODEL_DIR [--transfer shared_memory|tcp] [--repetitions 5] [--json FILE]
                                        [--only interference,handoff,storm,control]

interference  4 streams decode; a 4096-token prompt is prefilled meanwhile. Gaps between tokens of the streams, during
              / before; then the same once more with nothing but the streams, to see what the machine does by itself.
handoff       a 4096-token prompt on the idle server: end of its prefill to the decode worker's taking over
              (``handoff_ms``), and to the second token; bytes that travelled.
storm         50 prompts of 8000 tokens are sent and cancelled one after another, then a short one: its time to first
              token, over that on the idle server.
control       CPU time of the front-end process per request of 64 tokens, several at once, HTTP and text included.
"""

import argparse
import asyncio
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from chaos import ServerProcess
from client import Stream, percentile, run_stream
from common import report

LONG, STREAMS = 4096, 4


def body(rng: random.Random, num_tokens: int, max_tokens: int) -> dict[str, Any]:
    """A greedy request with a prompt that no cache has seen."""
    prompt = [rng.randrange(300, 16000) for _ in range(num_tokens)]
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_latency": True,
            "stream_options": {"include_usage": True}}  # fmt: skip


async def one(url: str, request: dict[str, Any]) -> Stream:
    """Ask and wait."""
    stream = Stream()
    await run_stream(url, request, stream)
    if stream.error:
        raise RuntimeError(stream.error)
    return stream


async def streams_alone(url: str, rng: random.Random, long_after: float | None) -> dict[str, Any]:
    """Gaps of the streams in a quiet part and in the part after it, in which a long prompt comes or not."""
    streams = [Stream() for _ in range(STREAMS)]
    tasks = [asyncio.create_task(run_stream(url, body(rng, 512, 3000), stream)) for stream in streams]
    await asyncio.gather(*(stream.first.wait() for stream in streams))
    await asyncio.sleep(1.0)
    quiet = time.perf_counter()
    await asyncio.sleep(4.0)
    middle, ttft = time.perf_counter(), 0.0
    if long_after is None:
        long = await one(url, body(rng, LONG, 4))
        middle, end, ttft = long.sent, long.stamps[0], long.ttft
    else:
        await asyncio.sleep(long_after)
        end = time.perf_counter()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [gap for stream in streams for gap in stream.gaps()]
    return {
        "before": [b - a for a, b in gaps if a >= quiet and b <= middle],
        "during": [b - a for a, b in gaps if b > middle and a < end],
        "ttft": ttft,
    }


def interference(url: str, rng: random.Random, repetitions: int) -> dict[str, Any]:
    """The row of this question."""
    runs, controls = [], []
    for _ in range(repetitions):
        runs.append(asyncio.run(streams_alone(url, rng, None)))
        controls.append(asyncio.run(streams_alone(url, rng, runs[-1]["ttft"])))

    def factors(kept: list[dict[str, Any]]) -> list[float]:
        return [percentile(run["during"], 99) / percentile(run["before"], 99) for run in kept]

    before = [gap for run in runs for gap in run["before"]]
    during = [gap for run in runs for gap in run["during"]]
    return {
        "question": "interference",
        "before p50 ms": round(1e3 * percentile(before, 50), 1),
        "before p99 ms": round(1e3 * percentile(before, 99), 1),
        "during p50 ms": round(1e3 * percentile(during, 50), 1),
        "during p99 ms": round(1e3 * percentile(during, 99), 1),
        "p99 during / before, median": round(statistics.median(factors(runs)), 2),
        "each": [round(factor, 2) for factor in factors(runs)],
        "without a long prompt": [round(factor, 2) for factor in factors(controls)],
        "TTFT 4096 s": round(statistics.median([run["ttft"] for run in runs]), 2),
    }


def handoff(server: ServerProcess, rng: random.Random, repetitions: int) -> dict[str, Any]:
    """The row of this question."""
    handoffs, seconds, bytes_before = [], [], transferred(server)
    for _ in range(repetitions + 1):
        stream = asyncio.run(one(server.url, body(rng, LONG, 8)))
        assert stream.usage is not None
        handoffs.append(stream.usage["latency"]["handoff_ms"])
        seconds.append(1e3 * (stream.stamps[1] - stream.stamps[0]))
    handoffs, seconds = handoffs[1:], seconds[1:]
    return {
        "question": "handoff",
        "handoff ms, median": round(statistics.median(handoffs), 2),
        "min": round(min(handoffs), 2),
        "max": round(max(handoffs), 2),
        "first to second token ms": round(statistics.median(seconds), 1),
        "bytes a prompt": round((transferred(server) - bytes_before) / (repetitions + 1)),
    }


def transferred(server: ServerProcess) -> float:
    """KV bytes that have travelled so far."""
    return sum(value for name, value in server.metrics().items() if name == "diptych:kv_transfer_bytes_total")


async def cancelled(url: str, request: dict[str, Any], after_s: float) -> None:
    """Send it and hang up."""
    task = asyncio.create_task(run_stream(url, request, Stream()))
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def storm_once(url: str, rng: random.Random) -> tuple[float, float]:
    """(time to first token on the idle server, after the storm), seconds."""
    idle = await one(url, body(rng, 32, 4))
    for _ in range(50):
        await cancelled(url, body(rng, 8000, 4), 0.05)
    after = await one(url, body(rng, 32, 4))
    return idle.ttft, after.ttft


def storm(url: str, rng: random.Random, repetitions: int) -> dict[str, Any]:
    """The row of this question."""
    asyncio.run(one(url, body(rng, 32, 4)))
    pairs = [asyncio.run(storm_once(url, rng)) for _ in range(repetitions)]
    return {
        "question": "storm",
        "idle TTFT ms": round(1e3 * statistics.median([idle for idle, _ in pairs]), 1),
        "after TTFT ms": round(1e3 * statistics.median([after for _, after in pairs]), 1),
        "after / idle, median": round(statistics.median([after / idle for idle, after in pairs]), 2),
        "each": [round(after / idle, 2) for idle, after in pairs],
    }


async def many(url: str, rng: random.Random, count: int, at_once: int) -> None:
    """Requests of 64 tokens."""
    gate = asyncio.Semaphore(at_once)

    async def ask() -> None:
        async with gate:
            await one(url, body(rng, 64, 64))

    await asyncio.gather(*(ask() for _ in range(count)))


def control(server: ServerProcess, rng: random.Random) -> dict[str, Any]:
    """The row of this question."""
    asyncio.run(many(server.url, rng, 8, 8))
    tick = os.sysconf("SC_CLK_TCK")

    def cpu_s() -> float:
        fields = Path(f"/proc/{server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / tick

    before, count = cpu_s(), 160
    asyncio.run(many(server.url, rng, count, 8))
    return {"question": "control", "front-end CPU ms a request": round(1e3 * (cpu_s() - before) / count, 2)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", default="interference,handoff,storm,control")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    arguments = ["--model", str(options.model), "--prefill", "1", "--decode", "1", "--transfer", options.transfer]
    server = ServerProcess([*arguments, "--disaggregate", "always"])
    rows: list[dict[str, Any]] = []
    try:
        asyncio.run(one(server.url, body(rng, 1024, 16)))
        for question in options.only.split(","):
            if question == "interference":
                rows.append(interference(server.url, rng, options.repetitions))
            elif question == "handoff":
                rows.append(handoff(server, rng, options.repetitions))
            elif question == "storm":
                rows.append(storm(server.url, rng, options.repetitions))
            elif question == "control":
                rows.append(control(server, rng))
            print(rows[-1], flush=True)
    finally:
        server.close()
    report(f"disaggregation {options.model.name} {options.transfer}", rows, options.json)


if __name__ == "__main__":
    main()
