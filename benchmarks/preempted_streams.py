"""How long does a running stream stand still when it loses its KV blocks? Fleets of all shapes, simulated with the code
that serves, under more load than they hold and with little memory.

    python benchmarks/preempted_streams.py [--seeds 3] [--only WORD] [--json preempted_streams.json]

A worker expects answers as long as those of late; some are longer, and then a stream loses its blocks. It waits for
other streams to end, never for prompts (see diptych.control.engine.scheduler.scheduler). The seeds vary everything
random; rows give the median and the range over them. "streams' lives" puts the longest gap in relation: the time that
the median stream takes from its first token to its last.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import report, spread

ALWAYS = "--disaggregate always"
ONE_AND_ONE, TWO_AND_TWO = f"--prefill 1 --decode 1 {ALWAYS}", f"--prefill 2 --decode 2 {ALWAYS}"
SMALL = "--rate 8 --num-requests 1000 --kv-cache-tokens 10000 --output-tokens 400"
SHIFT, SHIFT_LONG = "--kv-cache-tokens 30000 --trace {shift}", "--kv-cache-tokens 100000 --trace {long}"
SWAP = "--preemption swap --set memory.host_bytes=10000000000"
LOADS = {
    "1P1D, answers of 400": f"{ONE_AND_ONE} {SMALL}",
    "the same, first come first served": f"{ONE_AND_ONE} {SMALL} --order fcfs",
    "1P1D, answers of 800": (
        f"{ONE_AND_ONE} --rate 30 --num-requests 3000 --kv-cache-tokens 20000 --output-tokens 800 --prompt-tokens 200"
    ),
    "1P1D, mooncake-conversation": (
        f"{ONE_AND_ONE} --rate 12 --num-requests 2000 --kv-cache-tokens 30000 --trace mooncake-conversation"
    ),
    "1P1D, answers get longer": f"{ONE_AND_ONE} {SHIFT}",
    "the same, one host": f"{ONE_AND_ONE} {SHIFT} --set pools.hosts=1",
    "the same, swapped to the host": f"{ONE_AND_ONE} {SHIFT} {SWAP}",
    "1P1D, answers get longer, long prompts": f"{ONE_AND_ONE} {SHIFT_LONG}",
    "2P2D, the same, fcfs": f"{TWO_AND_TWO} {SHIFT_LONG} --order fcfs",
    "chunked, answers of 400": SMALL,
    "chunked, answers get longer": SHIFT,
    "the same, TPOT 10 ms": f"{SHIFT} --ttft-slo-ms 5000 --tpot-slo-ms 10",
    "unified, answers of 400": f"{SMALL} --shape unified",
    "unified, answers get longer": f"{SHIFT} --shape unified",
    "unified, prompts without answers": (
        "--trace {flood} --shape unified --kv-cache-tokens 100000 --set admit_all=true"
    ),
}
COMMON = "--model llama-3-8b --hardware h100-sxm --json"


def write_shift(path: Path, prompts: range, seed: int) -> None:
    """A load of 12/s whose answers have 10 to 40 tokens for the first 200 requests, and 300 to 900 from then on."""
    rng = random.Random(seed)
    arrival_s, lines = 0.0, ["arrival_s,prompt_tokens,output_tokens"]
    for number in range(600):
        arrival_s += rng.expovariate(12)
        answer = rng.randrange(10, 40) if number < 200 else rng.randrange(300, 900)
        lines.append(f"{arrival_s:.6f},{rng.choice(prompts)},{answer}")
    path.write_text("\n".join(lines) + "\n")


def write_flood(path: Path, seed: int) -> None:
    """Twenty streams of 400 tokens, then 1,500 prompts of 1,000 to 3,000 tokens with answers of one token, at 50/s."""
    rng = random.Random(seed)
    arrival_s, lines = 1.0, ["arrival_s,prompt_tokens,output_tokens"]
    lines += [f"{number * 0.01:.6f},300,400" for number in range(20)]
    for _ in range(1500):
        arrival_s += rng.expovariate(50)
        lines.append(f"{arrival_s:.6f},{rng.randrange(1000, 3000)},1")
    path.write_text("\n".join(lines) + "\n")


def simulate(load: str, seed: int) -> dict[str, Any]:
    """The summary of one run."""
    command = "from diptych.cli.main import main; main()"
    with tempfile.TemporaryDirectory() as folder:
        shift, long, flood = (Path(folder) / f"{name}.csv" for name in ("shift", "long", "flood"))
        write_shift(shift, range(100, 900), seed)
        write_shift(long, range(2000, 6000), seed)
        write_flood(flood, seed)
        load = load.format(shift=shift, long=long, flood=flood)
        arguments = ["simulate", *COMMON.split(), *load.split(), "--seed", str(seed)]
        done = subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result.get("summary", result)


def row(name: str, runs: list[dict[str, Any]]) -> dict[str, str]:
    """What the runs of one load gave."""
    lives = [run["e2e_ms"]["p50"] - run["ttft_ms"]["p50"] for run in runs]
    gaps = [run["itl_ms"]["max"] for run in runs]
    return {
        "load": name,
        "preemptions": spread([run["preemptions"] for run in runs]),
        "longest gap, s": spread([gap / 1000 for gap in gaps]),
        "streams' lives": spread([gap / life for gap, life in zip(gaps, lives, strict=True)]),
        "ITL p99, ms": spread([run["itl_ms"]["p99"] for run in runs]),
        "TTFT p50, s": spread([run["ttft_ms"]["p50"] / 1000 for run in runs]),
        "E2E mean, s": spread([run["e2e_ms"]["mean"] / 1000 for run in runs]),
        "E2E p99, s": spread([run["e2e_ms"]["p99"] / 1000 for run in runs]),
    }


def main() -> None:
    """All loads with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for name, load in LOADS.items():
        if options.only in name:
            rows.append(row(name, [simulate(load, seed) for seed in range(options.seeds)]))
            print(f"{name}: done", file=sys.stderr)
    report("preempted_streams", rows, options.json)


if __name__ == "__main__":
    main()
