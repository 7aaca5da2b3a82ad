"""Mooncake's question: of 16 nodes, how many should prefill and how many decode? (R15)

    python benchmarks/twin.py pools [--json reproduce_pools.json] [--rate-scale 1]

The paper (Mooncake, FAST'25, on the ratio of prefill to decode nodes) serves a model of Llama-2-70B's dimensions on
nodes of eight A800 each and finds that TTFT falls and the time between tokens rises as nodes move from decode to
prefill, with the balance near 8:8. Here: the published conversation trace at its own pace (prefix hash ids of
512-token blocks), nodes of eight A100 (an A800 is an A100 with NVLink cut to 400 GB/s), step durations from the
roofline with measured efficiencies, one 400 Gb/s network card per node and direction, least-loaded routing, chunks
sent as they are computed. Objectives: TTFT 30 s, TPOT 100 ms. Compared is the shape, not a number: seven prefill
nodes are the fewest that keep up with the trace, and beyond eight more of them buy little; the decode nodes of this
model are far from their limit at this load, so what they lose as they become fewer is visible and small.
"""

import argparse
from typing import Any

from common import report

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.slo import NS_PER_MS, Slo
from diptych.simulation.costs.roofline import RooflineCost
from diptych.simulation.fleet.pools import Pools
from diptych.simulation.hardware import load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.models import kv_capacity_tokens
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.results import summarize
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.workload.traces import load_trace

NODES = 16
BLOCK = 512
SPLITS = ((4, 12), (6, 10), (7, 9), (8, 8), (9, 7), (10, 6), (12, 4))


def run(num_prefill: int, num_decode: int, rate_scale: float) -> dict[str, Any]:
    """One split."""
    model, hardware = load_model("llama-2-70b"), load_hardware("a100-80gb")
    tokens = kv_capacity_tokens(model, hardware, parallelism=Parallelism(8))
    worker = EngineConfig(
        CacheConfig(num_blocks=tokens // BLOCK, block_size=BLOCK),
        SchedulerConfig(order="fcfs", budget=BudgetConfig("fixed", 4096), max_num_seqs=256, max_waiting=100_000),
        Slo(30_000 * NS_PER_MS, 100 * NS_PER_MS),
        max_model_len=200_000,
    )
    pools = Pools(
        num_prefill=num_prefill, num_decode=num_decode, kv_bytes_per_token=model.kv_bytes_per_token(), link="eth400"
    )
    cost = RooflineCost(model, hardware, Parallelism(8))
    workload = load_trace("mooncake-conversation").scaled(rate_scale)
    result = simulate(Scenario(engine=worker, cost=cost, workload=workload, pools=pools))
    summary = summarize(result)
    return {
        "prefill:decode": f"{num_prefill}:{num_decode}",
        "TTFT mean s": summary["ttft_ms"]["mean"] / 1000,
        "TTFT p90 s": summary["ttft_ms"]["p90"] / 1000,
        "TPOT mean ms": summary["tpot_ms"]["mean"],
        "ITL p99 ms": summary["itl_ms"]["p99"],
        "handoff mean ms": summary["handoff_ms"]["mean"],
        "attainment": summary["attainment"],
        "goodput/s": summary["goodput_rps"],
        "failed": summary["num_failed"],
        "simulated in s": round(result.wall_s, 1),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--rate-scale", type=float, default=1.0)


def main(options: argparse.Namespace) -> None:
    """All splits."""
    report("reproduce_pools", [run(*split, options.rate_scale) for split in SPLITS], options.json)
