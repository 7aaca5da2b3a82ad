"""How long does a running stream stand still when it loses its KV blocks? Fleets of all shapes, simulated with the code
that serves, under more load than they hold and with little memory.

    python benchmarks/preempted_streams.py [--seeds 5] [--only WORD] [--json preempted_streams.json]

A worker expects answers as long as those of late; some are longer, and then a stream loses its blocks. It waits for
other streams to end, never for prompts (see diptych.control.engine.scheduler.scheduler). The seeds vary everything
random; rows give the median and the range over them. "streams' lives" puts the longest gap in relation: the time that
the median stream takes from its first token to its last.
"""

import argparse
import json
import subprocess
import sys
from statistics import median
from typing import Any

from common import report

ALWAYS = "--disaggregate always"
ONE_AND_ONE, TWO_AND_TWO = f"--prefill 1 --decode 1 {ALWAYS}", f"--prefill 2 --decode 2 {ALWAYS}"
SMALL = "--rate 8 --num-requests 1000 --kv-cache-tokens 10000 --output-tokens 400"
LONG = "--rate 20 --num-requests 1000 --kv-cache-tokens 60000 --prompt-tokens 4000 --output-tokens 300"
LOADS = {
    "1P1D, answers of 400, 10,000 tokens of KV": f"{ONE_AND_ONE} {SMALL}",
    "the same, first come first served": f"{ONE_AND_ONE} {SMALL} --order fcfs",
    "1P1D, answers of 800, 20,000 tokens of KV": (
        f"{ONE_AND_ONE} --rate 30 --num-requests 3000 --kv-cache-tokens 20000 --output-tokens 800 --prompt-tokens 200"
    ),
    "1P1D, mooncake-conversation, 30,000 tokens of KV": (
        f"{ONE_AND_ONE} --rate 12 --num-requests 2000 --kv-cache-tokens 30000 --trace mooncake-conversation"
    ),
    "1P1D, prompts of 4,000, 60,000 tokens of KV": f"{ONE_AND_ONE} {LONG}",
    "2P2D, the same": f"{TWO_AND_TWO} {LONG}",
    "2P2D on one host, the same": f"{TWO_AND_TWO} {LONG} --set pools.hosts=1",
    "2P2D, the same, first come first served": f"{TWO_AND_TWO} {LONG} --order fcfs",
    "one chunked worker, answers of 400": SMALL,
    "one chunked worker, prompts of 4,000": LONG,
    "one unified worker, answers of 400": f"{SMALL} --shape unified",
    "one unified worker, prompts of 4,000": f"{LONG} --shape unified",
}
COMMON = "--model llama-3-8b --hardware h100-sxm --json"


def simulate(load: str, seed: int) -> dict[str, Any]:
    """The summary of one run."""
    command = "from diptych.cli.main import main; main()"
    arguments = ["simulate", *COMMON.split(), *load.split(), "--seed", str(seed)]
    done = subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result.get("summary", result)


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{median(values):.3g} ({min(values):.3g} - {max(values):.3g})"


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
        "E2E p99, s": spread([run["e2e_ms"]["p99"] / 1000 for run in runs]),
        "duration, s": spread([run["duration_s"] for run in runs]),
    }


def main() -> None:
    """All loads with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for name, load in LOADS.items():
        if options.only in name:
            rows.append(row(name, [simulate(load, seed) for seed in range(options.seeds)]))
            print(f"{name}: done", file=sys.stderr)
    report("preempted_streams", rows, options.json)


if __name__ == "__main__":
    main()
