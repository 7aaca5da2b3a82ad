"""Chats and long documents at once, on one machine: how many requests per second meet their objectives, by shape.

    python benchmarks/goodput.py MODEL_DIR [--vllm VENV] [--rates 0.25,0.5,1,2] [--seconds 40] [--ttft 2] [--itl-ms 60]
                                 [--shapes 1P1D,chunked,unified,vllm] [--json FILE]

Load: open loop, Poisson; of ten requests nine are chats (about 200 prompt tokens, 64 out), one is a document (3,000
in, 64 out). A request is good when its first token came within --ttft seconds of when it should have been sent, and
the 99th percentile of its own gaps between tokens is at most --itl-ms. Servers run one after another on the same
cores, each rate with the same seed; `diptych bench` makes the load, beside the server. Goodput: good requests per
second of the load; the highest rate with at least 90 % good is the figure to compare.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos import ServerProcess
from client import percentile
from common import report
from engine import vllm_environment
from interference import PORT, URL, Server

WORKLOAD = """
[workload]
classes = [
    { kind = "chat", share = 9, lengths.prompt = { kind = "uniform", min = 100, max = 300 }, lengths.output.mean = 64 },
    { kind = "document", share = 1, lengths = { prompt = { mean = 3000 }, output = { mean = 64 } } },
]
"""
TARGET = 0.9


def load(url: str, rate: float, seconds: float, workload: Path, folder: Path, seed: int) -> list[dict[str, Any]]:
    """One run of the load: a record per request."""
    records = folder / "records.jsonl"
    records.unlink(missing_ok=True)
    command = [
        str(Path(sys.executable).parent / "diptych"), "bench", "--url", url, "--workload", str(workload),
        "--rate", str(rate), "--num-requests", str(max(8, round(rate * seconds))), "--warmup", "2",
        "--seed", str(seed), "--records", str(records), "--gaps", "--token-ids", "300:16000", "--timeout", "120s",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    if not records.exists():
        raise RuntimeError(f"bench failed: {result.stdout[-500:]}{result.stderr[-1500:]}")
    return [json.loads(line) for line in records.read_text().splitlines()]


def is_good(record: dict[str, Any], ttft_s: float, itl_ms: float) -> bool:
    """Whether a request met its objectives."""
    if record["outcome"] != "completed":
        return False
    gaps = record["gaps_ms"]
    return record["ttft_s"] <= ttft_s and (not gaps or percentile(gaps, 99) <= itl_ms)


def measure(url: str, options: argparse.Namespace, label: str, folder: Path) -> list[dict[str, Any]]:
    """All rates against the server that is running, rising until too few are good."""
    workload = folder / "load.toml"
    workload.write_text(WORKLOAD)
    load(url, 1.0, 6, workload, folder, options.seed + 1000)  # warm up
    rows: list[dict[str, Any]] = []
    for rate in options.rates:
        records = load(url, rate, options.seconds, workload, folder, options.seed)
        good = [is_good(one, options.ttft, options.itl_ms) for one in records]
        chats = [one for one in records if one["kind"] == "chat"]
        gaps = [gap for one in records for gap in one.get("gaps_ms", ())]
        share = sum(good) / len(good)
        rows.append({
            "server": label,
            "rate": rate,
            "requests": len(records),
            "good": round(share, 3),
            "goodput": round(share * rate, 3),
            "chat TTFT p50 s": round(percentile([one["ttft_s"] for one in chats if one["ttft_s"]], 50), 3),
            "TTFT p90 s": round(percentile([one["ttft_s"] for one in records if one["ttft_s"]], 90), 3),
            "ITL p50 ms": round(percentile(gaps, 50), 1),
            "ITL p99 ms": round(percentile(gaps, 99), 1),
            "failed": sum(one["ttft_s"] is None for one in records),
        })  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
        if share < 0.5:
            break
    return rows


def best(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per server the highest rate that held, and the most good requests per second at any rate."""
    held = []
    for label in dict.fromkeys(row["server"] for row in rows):
        own = [row for row in rows if row["server"] == label]
        rates = [row["rate"] for row in own if row["good"] >= TARGET]
        most = max(row["goodput"] for row in own)
        held.append(
            {"server": label, "highest rate with 90 % good": max(rates, default=0.0), "most good a second": most}
        )
    return held


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--rates", type=lambda text: [float(one) for one in text.split(",")], default=[0.5, 1, 2, 3])
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--ttft", type=float, default=2.0)
    parser.add_argument("--itl-ms", type=float, default=60.0)
    parser.add_argument("--shapes", default="1P1D,chunked,unified,vllm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    slo = ["--ttft-slo-ms", str(int(1000 * options.ttft)), "--tpot-slo-ms", str(int(0.8 * options.itl_ms))]
    base = ["--model", str(options.model)]
    shapes = {
        "1P1D": [*base, *slo, "--prefill", "1", "--decode", "1"],
        "1P1D always": [*base, *slo, "--prefill", "1", "--decode", "1", "--disaggregate", "always"],
        "2 both": [*base, *slo, "--both", "2"],
        "chunked": [*base, *slo, "--shape", "chunked"],
        "unified": [*base, "--shape", "unified"],
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for label in options.shapes.split(","):
            if label == "vllm":
                if options.vllm is None:
                    continue
                command = [str(options.vllm / "bin/vllm"), "serve", str(options.model), "--dtype", "bfloat16"]
                command += ["--port", str(PORT), "--host", "127.0.0.1", "--max-model-len", "8192"]
                command += ["--max-num-seqs", "64", "--served-model-name", options.model.name]
                peer = Server(command, vllm_environment(options.vllm))
                try:
                    rows += measure(URL, options, "vLLM", Path(name))
                finally:
                    peer.close()
                continue
            server = ServerProcess(shapes[label])
            try:
                rows += measure(server.url, options, label, Path(name))
            finally:
                server.close()
    summary = best(rows)
    report(f"goodput {options.model.name}", rows, options.json, summary=summary)
    for line in summary:
        print(line)


if __name__ == "__main__":
    main()
