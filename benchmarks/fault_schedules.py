"""Does anything get lost, whatever goes wrong? Seeded random fleets (2 to 64 workers of all roles, on one host or many,
with little memory, tiny leases, impatient clients) under random faults, with every law of the cluster checked.

    python benchmarks/fault_schedules.py [--schedules 20000] [--first 0] [--processes 2] [--hosts]
                                         [--restarts] [--json fault_schedules.json]

The laws (tests/simulation/fault_schedules.py): each request ends exactly once; what it was given is contiguous and,
unless an error says otherwise, complete; no block is written after its release, in borrowed blocks or in copied ones;
no block, lease, transfer or table entry is left at the end; nothing waits for ever; attempts are bounded; a stream that
lost its blocks waits for other streams alone, for no more steps than these need (tests/control/stream_law.py). In two
schedules of seven there is so little memory that this happens. One schedule in eight is run step by step as well and
must give the same event log, byte for byte.

With --hosts the fleets are on hosts that share no memory, in up to three racks, and what fails are replicas, hosts,
racks and the ways between two of them: workers that only the front end does not reach, partitions in one direction or
both, KV messages and control messages that are late, doubled, repeated later or out of order. One law more: after the
last fault, what is left takes at most the time in which one worker does the whole load, and 5 s
(tests/simulation/host_schedules.py).

With --restarts these fleets lose their front end, too, up to four times: workers keep their caches, clients come again
and their streams go on after the tokens that they have. Two laws more: a stream goes on with no other token than the
next, and a worker holds no attempt when it comes back.
"""

import argparse
import gc
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import report

from diptych.simulation.scenario import Scenario

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.simulation.fault_schedules import check_strides, random_schedule, run_schedule
from tests.simulation.host_schedules import check_spread_strides, restart_schedule, run_spread, spread_schedule

BATCH = 50
STRIDES_EVERY = 8
SPREAD: dict[str, Callable[..., Scenario]] = {"host_faults": spread_schedule, "front_end_faults": restart_schedule}


def run_batch(first: int, kind: str = "fault_schedules") -> tuple[Counter[str], list[str]]:
    """Some schedules: what happened in them, and what was wrong."""
    make = SPREAD.get(kind)
    gc.disable()
    counts: Counter[str] = Counter()
    wrong = []
    for seed in range(first, first + BATCH):
        scenario = make(seed) if make else random_schedule(seed)
        try:
            cluster = run_spread(seed, make) if make else run_schedule(scenario)
            if seed % STRIDES_EVERY == 0:
                check_spread_strides(seed, cluster, make) if make else check_strides(seed, cluster)
        except Exception as error:  # the report names it; the exit code says that there was one
            wrong.append(f"seed {seed}: {type(error).__name__}: {error}")
            continue
        counts += cluster.counts
        counts["schedules"] += 1
        counts["workers"] += len(cluster.workers)
        counts["requests"] += len(cluster.collector.requests)
        counts["faults"] += len(scenario.faults)
        counts["steps into borrowed blocks"] += cluster.num_borrowed_steps
        counts["transfers"] += cluster.num_arrivals
        counts["streams without blocks"] += cluster.num_waits
        counts["streams resumed"] += cluster.num_resumed
    gc.collect()
    return counts, wrong


def main() -> None:
    """All schedules, with progress."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--restarts", action="store_true")
    options = parser.parse_args()
    kind = "front_end_faults" if options.restarts else "host_faults" if options.hosts else "fault_schedules"
    begun = time.perf_counter()
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    firsts = range(options.first, options.first + options.schedules, BATCH)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for number, (some, bad) in enumerate(pool.imap_unordered(partial(run_batch, kind=kind), firsts), 1):
            counts += some
            wrong += bad
            for line in bad:
                print(line, file=sys.stderr)
            if number % 20 == 0:
                print(f"{number * BATCH} schedules, {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    handoffs = {name: counts[name] for name in ("handoffs", "steps into borrowed blocks", "transfers")}
    handoffs |= {name: counts[name] for name in ("streams without blocks", "recalled")}
    if options.restarts:
        handoffs["streams resumed"] = counts["streams resumed"]
    losses = {
        name: counts[name]
        for name in ("lost_worker", "lost_transfer", "lost_attempt", "leases_expired", "paths_broken")
    }
    row: dict[str, Any] = {name: counts[name] for name in ("schedules", "workers", "requests", "faults")}
    row |= handoffs | losses | {"retried": counts["retried"], "poison": counts["poison"], "laws broken": len(wrong)}
    report(kind, [row | {"seconds": round(time.perf_counter() - begun)}], options.json)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
