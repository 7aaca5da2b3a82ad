"""What choosing workers by cost is worth, beside choosing by load alone.

    python benchmarks/routing.py [--json routing.json]

Mooncake's conversation trace (its first 4,000 requests) on 8 workers (Llama-3.1-70B on four H100 each), simulated with
every routing there is: prompt tokens found in the cache, latencies, and how wrong the picture of the caches was. Equal
inputs give equal figures, whatever else the machine does; only "seconds" (of simulating) depends on it.
"""

import argparse
from typing import Any, get_args

from common import report

from diptych.control.cluster.cluster_config import cluster_config
from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.router.routing import RoutingName
from diptych.control.slo import NS_PER_MS, Slo
from diptych.simulation.costs.layer_tables import load_layer_table
from diptych.simulation.results import summarize
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.workload.traces import load_trace


def trace(routing: RoutingName, num_workers: int = 8) -> dict[str, Any]:
    """One run."""
    worker = EngineConfig(
        CacheConfig(num_blocks=1000, block_size=512),
        shape_preset("chunked", max_waiting=100_000),
        Slo(10_000 * NS_PER_MS, 100 * NS_PER_MS),
        max_model_len=200_000,
    )
    workload = load_trace("mooncake-conversation").rows(0, 4000)
    cost = load_layer_table("h100-llama-3.1-70b-tp4")
    front_end = cluster_config(routing=routing)
    scenario = Scenario(engine=worker, cost=cost, workload=workload, num_workers=num_workers, cluster=front_end)
    result = simulate(scenario)
    summary = summarize(result)
    return {
        "routing": routing,
        "cached share": summary["cached_token_share"],
        "TTFT p50 ms": summary["ttft_ms"]["p50"],
        "TTFT p99 ms": summary["ttft_ms"]["p99"],
        "TPOT p99 ms": summary["tpot_ms"]["p99"],
        "attainment": summary["attainment"],
        "picture wrong by": result.hit_error,
        "seconds": result.wall_s,
    }


def main() -> None:
    """All kinds of routing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    options = parser.parse_args()
    report("routing", [trace(routing) for routing in get_args(RoutingName)], options.json)


if __name__ == "__main__":
    main()
