"""What one scheduling decision costs: begin_step + end_step with N running decodes, without executing anything.

    python benchmarks/overhead.py scheduler [--json scheduler.json]

recorded_p50_us: of the core that workers have, which keeps its newest inputs for the day it fails. It and the bare one
take turns, and the best of some rounds counts: other processes only ever add. audit_us: what comparing counts adds to a
step, on average.

Measured with the control code compiled, where it is (scripts/compile), and as Python, in processes of their own. Steps
are timed one by one over several block boundaries, with requests that end and others that are admitted in their place,
so that the mean holds the whole upkeep and not only the quiet steps.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

from common import report, run_as, ways_to_run

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.engine.engine_audit import STEPS_BETWEEN, check_step
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.recording import RecordingEngineCore
from diptych.control.request import Request
from diptych.control.step import StepResult
from diptych.serving.failures.recorded_cores import recent_of_engine, written_to

STEP_NS = 10_000_000
ROUNDS, AUDITS = 7, 1000


def steps(core: EngineCore, requests: Iterator[Request], num_running: int, num_steps: int) -> list[float]:
    """Microseconds of begin_step + end_step for each of ``num_steps`` steps."""
    now, seconds = 0, []
    for _ in range(num_running):
        core.add_request(next(requests), now)
    while core.scheduler.waiting or core.scheduler.prefilling:  # fill up first
        output = core.begin_step(now)
        assert output is not None
        core.end_step(StepResult(output.step_id), now := now + STEP_NS)
    for _ in range(num_steps):
        while len(core.requests) < num_running:
            core.add_request(next(requests), now)
        began = time.perf_counter()
        output = core.begin_step(now)
        assert output is not None
        core.end_step(StepResult(output.step_id), now := now + STEP_NS)
        seconds.append((time.perf_counter() - began) * 1e6)
    return seconds


def make_requests() -> Iterator[Request]:
    """Endless requests of 500 prompt tokens with answers of 300 to 500."""
    number = 0
    while True:
        yield Request(f"r{number}", 500, 300 + number * 7919 % 200)
        number += 1


def audit_us(core: EngineCore) -> float:
    """A step's share of comparing the counts of this core."""
    best = float("inf")
    for _ in range(AUDITS):
        began = time.perf_counter()
        check_step(core.requests, core.leases, core.scheduler, core.kv)
        best = min(best, time.perf_counter() - began)
    return best * 1e6 / STEPS_BETWEEN


def measure(num_running: int, num_steps: int) -> dict[str, Any]:
    """One batch size, in this process."""
    config = EngineConfig(
        cache=CacheConfig(num_blocks=num_running * 40 + 100, block_size=32),
        scheduler=SchedulerConfig(
            order="fcfs", budget=BudgetConfig("fixed", 4096 + num_running), max_num_seqs=num_running
        ),
    )
    core = EngineCore(config)
    samples = steps(core, make_requests(), num_running, num_steps)
    ordered = sorted(samples)
    bare, recorded = [], []
    for _ in range(ROUNDS):
        bare.append(statistics.median(steps(EngineCore(config), make_requests(), num_running, num_steps)))
        again = RecordingEngineCore(config, *written_to(recent_of_engine(), None))
        recorded.append(statistics.median(steps(again, make_requests(), num_running, num_steps)))
    return {
        "running": num_running,
        "mean_us": round(statistics.fmean(samples), 1),
        "p50_us": round(ordered[len(ordered) // 2], 1),
        "p99_us": round(ordered[int(len(ordered) * 0.99)], 1),
        "bare_p50_us": round(min(bare), 2),
        "recorded_p50_us": round(min(recorded), 2),
        "audit_us": round(audit_us(core), 3),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--running", default="1,32,256,1024,2048")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> None:
    """Measure several batch sizes and print a table."""
    if options.one:
        print(json.dumps(measure(options.one, options.steps)))
        return
    rows = [
        {"code": way, **run_as(way, "overhead", "scheduler", "--one", num_running, "--steps", str(options.steps))}
        for way in ways_to_run()
        for num_running in options.running.split(",")
    ]
    report("scheduler", rows, options.json)
