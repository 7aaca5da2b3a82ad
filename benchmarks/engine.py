"""Prefill and decode rates of the engine, in turns with vLLM's CPU build, beside what the machine can do.

    python benchmarks/engine.py MODEL_DIR [--vllm VENV] [--json engine-qwen2.5-0.5b.json]

MODEL_DIR is a Hugging Face directory (scripts/make_random_model.py makes one of a real shape with random weights).
With --vllm, the same commands go to vLLM in the environment VENV (scripts/bench-peers installs one) in the same run:
the two engines take turns, so that a noisy machine disturbs both alike. Reported: medians, spreads, ratios of medians,
and the roofline: prefill against the measured GEMM rate, decode against (weights + KV) / measured read bandwidth.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from common import report

HERE = Path(__file__).parent
PREFILLS = (2048, 8192)
BATCHES = (1, 8, 32)
CONTEXT = 512


class Child:
    """An engine in its own process that answers one command at a time."""

    def __init__(self, name: str, command: list[str], env: dict[str, str] | None = None) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
        )
        self._read()

    def ask(self, **command: Any) -> float:
        """Tokens per second for one command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return float(self._read()["tok_s"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.name} ended with code {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def vllm_environment(venv: Path) -> dict[str, str]:
    """What vLLM's CPU guide asks for: preloaded allocator and OpenMP, both cores, offline."""
    tcmalloc = next(venv.parent.glob("debs/usr/lib/*/libtcmalloc_minimal.so.4"), None)
    preload = [str(path) for path in (tcmalloc, venv / "lib/libiomp5.so") if path and path.exists()]
    return {
        "LD_PRELOAD": ":".join(preload),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0,1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def measure(children: list[Child], repetitions: int) -> list[dict[str, Any]]:
    """Every command to every child in turn, ``repetitions`` times."""
    commands: list[dict[str, Any]] = [{"do": "prefill", "tokens": tokens} for tokens in PREFILLS]
    commands += [{"do": "decode", "batch": batch, "context": CONTEXT, "steps": 48} for batch in BATCHES]
    for child in children:
        child.ask(do="prefill", tokens=512)
    rows = []
    for command in commands:
        samples: dict[str, list[float]] = {child.name: [] for child in children}
        for _ in range(repetitions):
            for child in children:
                samples[child.name].append(child.ask(**command))
                time.sleep(0.3)
        label = f"prefill {command['tokens']}" if command["do"] == "prefill" else f"decode b{command['batch']}"
        row: dict[str, Any] = {"what": label}
        for name, values in samples.items():
            row[name] = round(statistics.median(values), 1)
            row[f"{name} spread"] = f"{min(values):.4g}..{max(values):.4g}"
        if len(children) == 2:
            row["ratio"] = round(row[children[0].name] / row[children[1].name], 2)
        print("  " + json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def ceilings() -> dict[str, float]:
    """Read bandwidth (GB/s) and bf16 GEMM rate (TFLOP/s) with two threads, measured through torch."""
    import torch

    torch.set_num_threads(2)
    big = torch.zeros(1 << 28, dtype=torch.int64)  # 2 GiB
    halves = big.chunk(2)
    gbps = []
    for _ in range(5):
        began = time.perf_counter()
        threads = [threading.Thread(target=half.max) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gbps.append(big.numel() * 8 / (time.perf_counter() - began) / 1e9)
    rates = []
    a, b = torch.randn(2048, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    for _ in range(8):
        began = time.perf_counter()
        torch.nn.functional.linear(a, b)
        rates.append(2 * 2048**3 / (time.perf_counter() - began) / 1e12)
    return {"read_gbps": round(max(gbps), 1), "gemm_tflops": round(statistics.median(rates[2:]), 3)}


def roofline(rows: list[dict[str, Any]], model: Path, limits: dict[str, float]) -> None:
    """Add to each row the share of what the machine can do (and the arithmetic behind it)."""
    config = json.loads((model / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    per_layer = hidden * (2 * query + 2 * keys) + 3 * hidden * config["intermediate_size"]
    head = hidden * config["vocab_size"]
    for row in rows:
        kind, size = row["what"].split()
        if kind == "prefill":
            tokens = int(size)
            flop = 2 * tokens * layers * per_layer + 2 * head + 4 * layers * query * tokens * (tokens + 1) / 2
            row["roofline tok/s"] = round(tokens / (flop / (limits["gemm_tflops"] * 1e12)), 1)
        else:
            batch = int(size[1:])
            kv = 2 * 2 * layers * keys * (CONTEXT + 24)
            memory_s = (2 * (layers * per_layer + head) + batch * kv) / (limits["read_gbps"] * 1e9)
            compute_s = 2 * batch * (layers * per_layer + head) / (limits["gemm_tflops"] * 1e12)
            row["roofline tok/s"] = round(batch / max(memory_s, compute_s), 1)
        row["share"] = round(row["diptych"] / row["roofline tok/s"], 2)


def main() -> None:
    """Start the engines, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json")
    options = parser.parse_args()
    limits = ceilings()
    ours = [sys.executable, str(HERE / "peers" / "diptych_child.py"), str(options.model), str(options.threads)]
    children = [Child("diptych", ours)]
    if options.vllm:
        theirs = [str(options.vllm / "bin/python"), str(HERE / "peers" / "vllm_child.py"), str(options.model)]
        children.append(Child("vllm", theirs, vllm_environment(options.vllm)))
    rows = measure(children, options.repetitions)
    for child in children:
        child.close()
    roofline(rows, options.model, limits)
    report(f"engine {options.model.name}", rows, options.json, ceilings=limits, threads=options.threads)


if __name__ == "__main__":
    main()
