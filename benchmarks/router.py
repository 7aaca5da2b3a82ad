"""What a routing decision costs, and what it is worth.

    python benchmarks/router.py [--json router.json]

decision: 64 replicas whose caches hold 100,000 blocks in all, prompts of 256 blocks of which a random part is known:
the time of Router.route with all that it does (match, cost, pick, remember), and of taking in an event of 16 blocks.
trace: Mooncake's conversation trace on 8 replicas (Llama-3.1-70B on four H100 each), least-loaded against kv_aware:
prompt tokens found in the cache, TTFT, and how wrong the router's picture of the caches was.
"""

import argparse
import random
import time
from statistics import median
from typing import Any

from common import report

from diptych.control.config import CacheConfig, ReplicaConfig, shape_preset
from diptych.control.router.load import LoadReport
from diptych.control.router.router import Router
from diptych.control.slo import NS_PER_MS, Slo
from diptych.simulation.costs.layer_tables import load_layer_table
from diptych.simulation.results import summarize
from diptych.simulation.run import simulate
from diptych.simulation.scenario import RoutingName, Scenario
from diptych.simulation.workload.traces import load_trace

REPLICAS, BLOCKS, PROMPT_BLOCKS = 64, 100_000, 256


def decisions(count: int = 2000) -> list[dict[str, Any]]:
    """Microseconds of one decision and of one event."""
    rng = random.Random(1)
    router = Router(REPLICAS, 32)
    chains = [[rng.randbytes(16) for _ in range(PROMPT_BLOCKS)] for _ in range(BLOCKS // PROMPT_BLOCKS)]
    for number, chain in enumerate(chains):
        replica = number % REPLICAS
        router.index.on_events(replica, number // REPLICAS + 1, stored=chain)
    for replica in range(REPLICAS):
        load = LoadReport(0, rng.randrange(10**8), 10_000, rng.randrange(9000), 1e4, 0.3)
        router.on_report(replica, load)
    decided, heard = [], []
    for number in range(count):
        chain = rng.choice(chains)[: rng.randrange(PROMPT_BLOCKS)]
        prompt = chain + [rng.randbytes(16) for _ in range(PROMPT_BLOCKS - len(chain))]
        begun = time.perf_counter()
        router.route(str(number), PROMPT_BLOCKS * 32, prompt, number * NS_PER_MS)
        decided.append(1e6 * (time.perf_counter() - begun))
        replica = number % REPLICAS
        sequence = len(chains[replica::REPLICAS]) + number // REPLICAS + 1
        begun = time.perf_counter()
        assert router.index.on_events(replica, sequence, stored=prompt[-16:])
        heard.append(1e6 * (time.perf_counter() - begun))
        router.on_ended(str(number))
    rows = []
    for what, times in (("decision", decided), ("event of 16 blocks", heard)):
        ordered = sorted(times)
        rows.append({"what": what, "median us": median(times), "p99 us": ordered[int(0.99 * len(ordered))]})
    return rows


def trace(routing: RoutingName, num_replicas: int = 8) -> dict[str, Any]:
    """One run."""
    replica = ReplicaConfig(
        CacheConfig(num_blocks=1000, block_size=512),
        shape_preset("chunked", max_waiting=100_000),
        Slo(10_000 * NS_PER_MS, 100 * NS_PER_MS),
        max_model_len=200_000,
    )
    workload = load_trace("mooncake-conversation").rows(0, 4000)
    cost = load_layer_table("h100-llama-3.1-70b-tp4")
    scenario = Scenario(replica=replica, cost=cost, workload=workload, num_replicas=num_replicas, routing=routing)
    result = simulate(scenario)
    summary = summarize(result)
    return {
        "what": f"trace, {routing}",
        "cached share": summary["cached_token_share"],
        "TTFT p50 ms": summary["ttft_ms"]["p50"],
        "TTFT p99 ms": summary["ttft_ms"]["p99"],
        "TPOT p99 ms": summary["tpot_ms"]["p99"],
        "attainment": summary["attainment"],
        "picture wrong by": result.hit_error,
        "seconds": result.wall_s,
    }


def main() -> None:
    """Both questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    options = parser.parse_args()
    costs = decisions()  # first: on a heap that is still small
    traces = [trace("least_loaded"), trace("kv_aware")]
    report("router: what it is worth", traces)
    report("router: what a decision costs", costs, options.json, traces=traces)


if __name__ == "__main__":
    main()
