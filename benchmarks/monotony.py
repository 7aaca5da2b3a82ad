"""Do cost models keep the laws of order over the whole catalogue? Random pairs of steps, one never slower by law.

    python benchmarks/monotony.py [--pairs 10000] [--first 0] [--json monotony.json]

The laws (tests/simulation/monotony.py): fewer bits of weights or KV, more bandwidth, a shorter context and a smaller
batch are never slower; more devices are never slower by more than what they send to each other. Over every model and
device of the catalogue, the cost models roofline, operators, every layer table and auto (which scales those to fewer
bits), 16, 8 and 4 bits, and splits over up to 16 x 8 x 4 devices. A seed gives one pair of setups, tried with ``STEPS``
pairs of steps.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from common import report

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.simulation.monotony import LAWS, random_pairs

STEPS = 10
KINDS = ("roofline", "operators", "auto", "layer tables")
SHOWN = 20


def main() -> None:
    """Print how often each law was tried and broken, and some of the pairs that break one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args()
    begun = time.perf_counter()
    tried: Counter[tuple[str, str]] = Counter()
    broken: Counter[tuple[str, str]] = Counter()
    found = []
    for seed in range(options.first, options.first + -(-options.pairs // STEPS)):
        for pair in random_pairs(seed, STEPS):
            kind = pair.more[0].kind
            key = pair.law, kind if kind in KINDS else "layer tables"
            tried[key] += 1
            violation = pair.violation()
            if violation is not None:
                broken[key] += 1
                found.append(f"seed {seed}: {violation}")
    rows = [
        {"law": law, "cost": kind, "pairs": tried[law, kind], "violations": broken[law, kind]}
        for law in LAWS
        for kind in KINDS
        if tried[law, kind]
    ]
    rows.append({"law": "all", "cost": "", "pairs": sum(tried.values()), "violations": len(found)})
    for line in found[:SHOWN]:
        print(line, file=sys.stderr)
    report("monotony", rows, options.json, seconds=round(time.perf_counter() - begun, 1), found=found[:SHOWN])


if __name__ == "__main__":
    main()
