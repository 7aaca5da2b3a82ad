"""Does anything get lost, whatever goes wrong? Seeded random fleets (2 to 64 workers of all roles, on one host or many,
with little memory, tiny leases, impatient clients) under random faults, with every law of the cluster checked.

    python benchmarks/fault_schedules.py [--schedules 20000] [--first 0] [--processes 2] [--hosts]
                                         [--restarts] [--json fault_schedules.json] [--within SECONDS] [--resume]

A million take hours. With --within, a run ends after so much time with what it has until then, and with --resume it
begins behind the last schedule that --json FILE holds, and adds its counts to those there: repeated with the same
arguments, both come to --schedules in the end. A range that was broken off is run again.

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
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import RESULTS, report

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


def row_of(kind: str, counts: Counter[str]) -> dict[str, Any]:
    """What the report says of all schedules together."""
    names = ["schedules", "workers", "requests", "faults", "handoffs", "steps into borrowed blocks", "transfers"]
    names += ["streams without blocks", "revoked"]
    if kind == "front_end_faults":
        names.append("streams resumed")
    names += ["lost_worker", "lost_transfer", "lost_attempt", "leases_expired", "paths_broken", "retried", "poison"]
    return {name: counts[name] for name in [*names, "laws broken", "seconds"]}


def done_before(kind: str, file: str | None, first: int) -> tuple[Counter[str], int]:
    """The counts of an earlier run, and the schedule behind its last one. Without such a file: none."""
    path = file and (Path(file) if os.sep in file else RESULTS / file)
    if not path or not path.exists():
        return Counter(), first
    record = json.loads(path.read_text())
    [row] = record["rows"]
    if record["benchmark"] != kind or row.get("first", 0) != first:
        sys.exit(f"{path} holds other schedules: {record['benchmark']}, from {row.get('first', 0)}")
    return Counter(row), first + row["schedules"] + row["laws broken"]


def main() -> None:
    """All schedules, with progress."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--restarts", action="store_true")
    parser.add_argument("--within", type=float, default=float("inf"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    kind = "front_end_faults" if options.restarts else "host_faults" if options.hosts else "fault_schedules"
    begun = time.perf_counter()
    counts, start = done_before(kind, options.json if options.resume else None, options.first)
    earlier_s, firsts = counts["seconds"], range(start, options.first + options.schedules, BATCH)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for number, (some, bad) in enumerate(pool.imap(partial(run_batch, kind=kind), firsts), 1):
            counts += some
            counts["laws broken"] += len(bad)
            for line in bad:
                print(line, file=sys.stderr)
            spent_s = time.perf_counter() - begun
            if number % 20 == 0:
                print(f"{start - options.first + number * BATCH} schedules, {spent_s:.0f} s", file=sys.stderr)
            if spent_s > options.within:
                break
    counts["seconds"] = earlier_s + round(time.perf_counter() - begun)
    report(kind, [{"first": options.first} | row_of(kind, counts)], options.json)
    sys.exit(bool(counts["laws broken"]))


if __name__ == "__main__":
    main()
