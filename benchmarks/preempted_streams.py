"""How long does a running stream stand still when it loses its KV blocks? One prefill and one decode worker, simulated
with the code that serves, under more load than they hold and with little memory.

    python benchmarks/preempted_streams.py [--json preempted_streams.json]

The decode worker expects answers as long as those of late; some are longer, and then it must preempt. A preempted
stream gets its blocks back before prompts that are prefilled elsewhere get theirs. The seeds vary everything random;
rows give the median and the range over them.
"""

import argparse
import json
import subprocess
import sys
from statistics import median
from typing import Any

from common import report

LOADS = {
    "answers of 400, 10,000 tokens of KV": "--rate 8 --num-requests 1000 --kv-cache-tokens 10000 --output-tokens 400",
    "the same, first come first served": (
        "--rate 8 --num-requests 1000 --kv-cache-tokens 10000 --output-tokens 400 --order fcfs"
    ),
    "answers of 800, 20,000 tokens of KV": (
        "--rate 30 --num-requests 3000 --kv-cache-tokens 20000 --output-tokens 800 --prompt-tokens 200"
    ),
    "mooncake-conversation, 30,000 tokens of KV": (
        "--rate 12 --num-requests 2000 --kv-cache-tokens 30000 --trace mooncake-conversation"
    ),
}
FLEET = "--model llama-3-8b --hardware h100-sxm --prefill 1 --decode 1 --disaggregate always --json"


def simulate(load: str, seed: int) -> dict[str, Any]:
    """The summary of one run."""
    command = "from diptych.cli.main import main; main()"
    arguments = ["simulate", *FLEET.split(), *load.split(), "--seed", str(seed)]
    done = subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result.get("summary", result)


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{median(values):.3g} ({min(values):.3g} - {max(values):.3g})"


def main() -> None:
    """All loads with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for name, load in LOADS.items():
        runs = []
        for seed in range(options.seeds):
            runs.append(simulate(load, seed))
            print(f"{name}: seed {seed} done", file=sys.stderr)
        rows.append(
            {
                "load": name,
                "preemptions": spread([run["preemptions"] for run in runs]),
                "longest gap, s": spread([run["itl_ms"]["max"] / 1000 for run in runs]),
                "ITL p99, ms": spread([run["itl_ms"]["p99"] for run in runs]),
                "TTFT p50, s": spread([run["ttft_ms"]["p50"] / 1000 for run in runs]),
                "E2E p99, s": spread([run["e2e_ms"]["p99"] / 1000 for run in runs]),
            }
        )
    report("preempted_streams", rows, options.json)


if __name__ == "__main__":
    main()
