"""What a long prompt does to running streams, and to a short prompt behind it, over HTTP.

    python benchmarks/interference.py MODEL_DIR [--budgets 100,200,400] [--vllm VENV] [--json interference.json]

For each server: 4 streams decode; after a few quiet seconds a 4096-token prompt arrives, 0.1 s later one of 32 tokens.
Reported: gaps between tokens of the streams before and during the long prefill, and the time to first token of both
prompts. Then, on an idle server: the short prompt alone, and the short prompt sent 0.1 s behind an 8000-token one.
Servers run one after another on the same machine in the same session; every prompt is fresh random token ids.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from client import Stream, percentile, run_stream
from common import report
from engine import vllm_environment

PORT = 8123
URL = f"http://127.0.0.1:{PORT}"


class Server:
    """A server process that is ready when its health page answers."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        end = time.monotonic() + 300
        path = "/health" if Path(command[0]).name == "vllm" else "/ready"
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(URL + path, timeout=2).close()
                return
            except OSError:
                if self._process.poll() is not None:
                    raise RuntimeError(f"server ended with code {self._process.returncode}") from None
                time.sleep(0.5)
        raise RuntimeError("server not ready after 300 s")

    def close(self) -> None:
        """Stop the server and whatever it started."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Random token ids that no cache has seen."""
    return [rng.randrange(300, 16000) for _ in range(num_tokens)]


def body(model: str, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
    """A greedy completion request."""
    return {"model": model, "prompt": token_ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def interference(model: str, rng: random.Random) -> dict[str, Any]:
    """One repetition of the scenario."""
    streams = [Stream() for _ in range(4)]
    tasks = [asyncio.create_task(run_stream(URL, body(model, prompt(rng, 512), 3000), s)) for s in streams]
    await asyncio.gather(*(stream.first.wait() for stream in streams))
    await asyncio.sleep(1.0)
    quiet = time.perf_counter()
    await asyncio.sleep(4.0)
    long, short = Stream(), Stream()
    long_task = asyncio.create_task(run_stream(URL, body(model, prompt(rng, 4096), 4), long))
    await asyncio.sleep(0.1)
    short_task = asyncio.create_task(run_stream(URL, body(model, prompt(rng, 32), 4), short))
    await asyncio.wait({long_task, short_task}, timeout=300)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    errors = [stream.error for stream in (*streams, long, short) if stream.error]
    if errors:
        raise RuntimeError(errors[0])
    gaps = [gap for stream in streams for gap in stream.gaps()]
    return {
        "before": [b - a for a, b in gaps if a >= quiet and b <= long.sent],
        "during": [b - a for a, b in gaps if b > long.sent and a < long.stamps[0]],
        "long": long.ttft,
        "short": short.ttft,
    }


async def behind(model: str, rng: random.Random) -> dict[str, float]:
    """TTFT of a short prompt on the idle server, and behind an 8000-token one; and that of the long one alone."""
    alone = Stream()
    await run_stream(URL, body(model, prompt(rng, 32), 4), alone)
    long_alone = Stream()
    await run_stream(URL, body(model, prompt(rng, 4096), 4), long_alone)
    long, short = Stream(), Stream()
    task = asyncio.create_task(run_stream(URL, body(model, prompt(rng, 8000), 2), long))
    await asyncio.sleep(rng.uniform(0.1, 0.6))
    await run_stream(URL, body(model, prompt(rng, 32), 4), short)
    await task
    for stream in (alone, long, short, long_alone):
        if stream.error:
            raise RuntimeError(stream.error)
    return {"idle": alone.ttft, "behind": short.ttft, "long_alone": long_alone.ttft}


def measure(label: str, budget_ms: float | None, model: str, repetitions: int, seed: int) -> dict[str, Any]:
    """All repetitions against the server that is running, as one row."""
    rng = random.Random(seed)
    warm = Stream()
    asyncio.run(run_stream(URL, body(model, prompt(rng, 2048), 8), warm))
    runs = [asyncio.run(interference(model, rng)) for _ in range(repetitions)]
    waits = [asyncio.run(behind(model, rng)) for _ in range(repetitions)]
    before = [gap for run in runs for gap in run["before"]]
    during = [gap for run in runs for gap in run["during"]]
    p99 = 1e3 * percentile(during, 99)
    idle, short = (statistics.median([wait[key] for wait in waits]) for key in ("idle", "behind"))
    row = {
        "server": label,
        "before p50 ms": round(1e3 * percentile(before, 50), 1),
        "before p99 ms": round(1e3 * percentile(before, 99), 1),
        "during p50 ms": round(1e3 * percentile(during, 50), 1),
        "during p99 ms": round(p99, 1),
        "p99 / budget": round(p99 / budget_ms, 2) if budget_ms else None,
        "TTFT 4096 s": round(statistics.median([run["long"] for run in runs]), 2),
        "4096 alone s": round(statistics.median([wait["long_alone"] for wait in waits]), 2),
        "TTFT short s": round(statistics.median([run["short"] for run in runs]), 3),
        "short idle s": round(idle, 3),
        "short behind 8000 s": round(short, 3),
        "behind / idle": round(short / idle, 2),
    }
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> None:
    """Start each server in turn, measure it, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--budgets", default="100,200,400", help="TPOT objectives in ms for the chunked shape")
    parser.add_argument("--vllm", type=Path, help="vLLM's virtual environment, to measure it too")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    diptych = [
        str(Path(sys.executable).parent / "diptych"),
        "serve",
        "--model",
        str(options.model),
        "--port",
        str(PORT),
    ]
    name = options.model.name
    cases: list[tuple[str, float | None, list[str], dict[str, str]]] = [
        ("diptych unified", None, [*diptych, "--shape", "unified"], {})
    ]
    for budget in filter(None, options.budgets.split(",")):
        shape = [*diptych, "--shape", "chunked", "--tpot-slo-ms", budget]
        cases.append((f"diptych chunked {budget} ms", float(budget), shape, {}))
    if options.vllm:
        base = [str(options.vllm / "bin/vllm"), "serve", str(options.model), "--dtype", "bfloat16", "--port", str(PORT)]
        base += ["--host", "127.0.0.1", "--served-model-name", name, "--max-model-len", "8448", "--max-num-seqs", "32"]
        env = vllm_environment(options.vllm)
        cases.append(("vllm default", None, base, env))
        cases.append(("vllm 512-token budget", None, [*base, "--max-num-batched-tokens", "512"], env))
    rows = []
    for label, budget_ms, command, env in cases:
        server = Server(command, env)
        try:
            rows.append(measure(label, budget_ms, name, options.repetitions, options.seed))
        finally:
            server.close()
    report(f"interference {name}", rows, options.json)


if __name__ == "__main__":
    main()
