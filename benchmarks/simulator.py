"""How fast the simulator is, and whether its price per request stays flat as the fleet grows.

    python benchmarks/simulator.py [--json simulator.json] [--repeats 3] [--requests-per-worker 10000]

trace: the Azure 2023 conversation trace (19,366 requests in 3,502 s) on one worker, Llama-3-8B on an H100, shape
chunked, step durations from measured layers. strides off: the same run, every decode step on its own (the same log).
fleet: 1, 10 and 100 such workers, each with the trace's rate and lengths (Poisson), least-loaded routing; with the
default, 100 workers see 1,000,000 requests. Each run is a process of its own on one core; memory is its peak.
"""

import argparse
import json
import resource
import subprocess
import sys
from statistics import median
from typing import Any

from common import report

from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.slo import NS_PER_MS, Slo
from diptych.simulation.costs.layer_tables import load_layer_table
from diptych.simulation.results import SimulationResult, summarize
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.workload.build import build
from diptych.workload.description import LengthsConfig, TraceConfig, WorkloadConfig

RATE = 19_366 / 3_502  # requests per second and worker


def scenario(workload: WorkloadConfig, num_workers: int = 1, *, fast_forward: bool = True) -> Scenario:
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
        fast_forward=fast_forward,
    )


def run(case: str, requests_per_worker: int) -> dict[str, Any]:
    """One case, in this process."""
    kind, _, count = case.partition(" ")
    if kind == "fleet":
        workers = int(count)
        config = WorkloadConfig(
            num_requests=requests_per_worker * workers,
            rate=RATE * workers,
            lengths=LengthsConfig(pairs="azure-conv"),
        )
        result = simulate(scenario(config, workers))
    else:
        trace = WorkloadConfig(trace=TraceConfig(path="azure-conv"))
        result = simulate(scenario(trace, fast_forward=kind == "trace"))
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


def main() -> None:
    """Every case in turn, ``--repeats`` times; medians and the fastest and slowest run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests-per-worker", type=int, default=10_000)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one, options.requests_per_worker)))
        return
    cases = ["trace", "strides off", "fleet 1", "fleet 10", "fleet 100"]
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    for repeat in range(options.repeats):
        for case in cases:
            if case == "fleet 100" and repeat:
                continue  # minutes long, and long enough to be steady
            command = [sys.executable, __file__, "--one", case]
            command += ["--requests-per-worker", str(options.requests_per_worker)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            runs[case].append(json.loads(output))
            print(f"{case}: {runs[case][-1]['seconds']:.1f} s", file=sys.stderr)
    rows = []
    for case in cases:
        seconds = sorted(one["seconds"] for one in runs[case])
        middle = next(one for one in runs[case] if one["seconds"] >= median(seconds))
        rows.append({"case": case, **middle, "fastest s": seconds[0], "slowest s": seconds[-1], "runs": len(seconds)})
    report("simulator", rows, options.json)


if __name__ == "__main__":
    main()
