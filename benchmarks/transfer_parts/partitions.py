"""Partitions at named points of the protocol: what is lost, what comes twice, and how long streams stand still.

    python benchmarks/transfer.py partitions [--repeats 50] [--fleets 4] [--silence 3] [--points NAME,NAME] [--seed 0]
                                    [--json partitions.json]

A prefill worker and a decode worker have joined a front end (real agents, processes, TLS and the bundled model); two
clients ask one request after the other. The way between the front end and a worker, or that of KV, is cut at a message
(27 points), in one direction, the other, or both, ``--repeats`` times each; a fifth of the partitions end before
anybody gives anything up, the others when the clients were served without the way. Every token is compared with that of
an undisturbed run. recovery: the longest time without a token for a client, from the cut on. whole: from the end of the
partition until both workers can be used. silence: ``--heartbeat-timeout`` of the server. Fleets run side by side, since
a trial is mostly waiting.
"""

import argparse
import asyncio
import logging
import sys
from itertools import groupby
from typing import Any

from common import ROOT, names_of, report

sys.path.insert(0, str(ROOT / "tests" / "serving"))

from partition_trials import POINTS, Outcome, Trial, cut_fleet, summary, trials


async def run_all(waiting: list[Trial], num_fleets: int, silence_s: float) -> list[Outcome]:
    """All trials, shared among fleets."""
    outcomes: list[Outcome] = []

    async def work() -> None:
        while waiting:
            async with cut_fleet(silence_s) as fleet:
                while waiting:
                    outcome = await fleet.run(waiting.pop())
                    outcomes.append(outcome)
                    if outcome.problems:  # this fleet may not be what it was
                        print(f"{outcome.trial}: {'; '.join(outcome.problems)}", file=sys.stderr, flush=True)
                        break

    await asyncio.gather(*(work() for _ in range(num_fleets)))
    return outcomes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--fleets", type=int, default=4)
    parser.add_argument("--silence", type=float, default=3.0)
    names = [point.name for point in POINTS]
    parser.add_argument("--points", type=names_of(names), default=names, help="with commas; default: all")
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace) -> None:
    """Run the trials, and sum them up by point."""
    logging.disable(logging.CRITICAL)
    waiting = [trial for trial in trials(options.repeats, options.seed) if trial.point.name in options.points]
    outcomes = asyncio.run(run_all(waiting, options.fleets, options.silence))
    outcomes.sort(key=lambda outcome: [point.name for point in POINTS].index(outcome.trial.point.name))
    rows: list[dict[str, Any]] = [
        {"point": name, **summary(list(found))} for name, found in groupby(outcomes, lambda each: each.trial.point.name)
    ]
    rows.append({"point": f"all, silence {options.silence:g} s", **summary(outcomes)})
    report("partitions", rows, options.json)
