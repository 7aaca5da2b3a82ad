"""How fast the simulator is, and whether its price per request stays flat as the fleet grows.

    python benchmarks/twin.py speed [--json simulator.json] [--repeats 3] [--requests-per-worker 10000]

trace: the Azure 2023 conversation trace (19,366 requests in 3,502 s) on one worker, Llama-3-8B on an H100, shape
chunked, step durations from measured layers. strides off: the same run, every decode step on its own (the same log).
fleet: 1, 10 and 100 such workers behind the front end of ``diptych serve`` (kv_aware, admission queue), each with
the trace's rate and lengths (Poisson); with the default, 100 workers see 1,000,000 requests. balanced: the same behind
a load balancer that counts requests. Each run is a process of its own on one core; memory is its peak. All of it
with control code and simulator compiled, where they are (scripts/compile), and as Python: --ways names them.
"""

import argparse
import json
import resource
import sys
from statistics import median
from typing import Any

from common import report, run_as, ways_to_run

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.slo import NS_PER_MS, Slo
from diptych.simulation.costs.layer_tables import load_layer_table
from diptych.simulation.results import SimulationResult, summarize
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario, load_balancer
from diptych.workload.build import build
from diptych.workload.description import LengthsConfig, TraceConfig, WorkloadConfig

RATE = 19_366 / 3_502  # requests per second and worker


def scenario(workload: WorkloadConfig, cluster: ClusterConfig, num_workers: int = 1, **changes: Any) -> Scenario:
    """Llama-3-8B on H100s."""
    return Scenario(
        engine=EngineConfig(
            CacheConfig(num_blocks=13_000),
            shape_preset("chunked"),
            Slo(2_000 * NS_PER_MS, 50 * NS_PER_MS),
            max_model_len=16_384,
        ),
        cost=load_layer_table("h100-llama-3.1-8b"),
        workload=build(workload, seed=1),
        num_workers=num_workers,
        cluster=cluster,
        **changes,
    )


def run(case: str, requests_per_worker: int) -> dict[str, Any]:
    """One case, in this process."""
    kind, _, count = case.partition(" ")
    if kind in ("fleet", "balanced"):
        workers = int(count)
        config = WorkloadConfig(
            num_requests=requests_per_worker * workers,
            rate=RATE * workers,
            lengths=LengthsConfig(pairs="azure-conv"),
        )
        result = simulate(scenario(config, load_balancer() if kind == "balanced" else ClusterConfig(), workers))
    else:
        trace = WorkloadConfig(trace=TraceConfig(path="azure-conv"))
        result = simulate(scenario(trace, ClusterConfig(), fast_forward=kind == "trace"))
    return row(result)


def row(result: SimulationResult) -> dict[str, Any]:
    """What a run took."""
    requests = len(result.requests)
    summary = summarize(result)
    return {
        "requests": requests,
        "steps": sum(one.num_steps for one in result.workers),
        "seconds": result.wall_s,
        "us/request": 1e6 * result.wall_s / requests,
        "requests/s": requests / result.wall_s,
        "x real time": result.duration_ns / 1e9 / result.wall_s,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "TTFT p99 ms": summary["ttft_ms"]["p99"],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests-per-worker", type=int, default=10_000)
    parser.add_argument("--cases", default="trace,strides off,fleet 1,fleet 10,fleet 100,balanced 1,balanced 100")
    parser.add_argument("--ways", default=",".join(ways_to_run()))
    parser.add_argument("--one", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> None:
    """Every case in turn, ``--repeats`` times; medians and the fastest and slowest run."""
    if options.one:
        print(json.dumps(run(options.one, options.requests_per_worker)))
        return
    cases = [(way, case) for case in options.cases.split(",") for way in options.ways.split(",")]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {case: [] for case in cases}
    for repeat in range(options.repeats):
        for way, case in cases:
            if case.endswith(" 100") and repeat:
                continue  # minutes long, and long enough to be steady
            found = run_as(
                way, "twin", "speed", "--one", case, "--requests-per-worker", str(options.requests_per_worker)
            )
            runs[way, case].append(found)
            print(f"{case}, {way}: {found['seconds']:.1f} s", file=sys.stderr)
    rows = []
    for (way, case), found in runs.items():
        seconds = sorted(one["seconds"] for one in found)
        middle = next(one for one in found if one["seconds"] >= median(seconds))
        spread = {"fastest s": seconds[0], "slowest s": seconds[-1], "runs": len(seconds)}
        rows.append({"case": case, "code": way, **middle, **spread})
    report("simulator", rows, options.json)
