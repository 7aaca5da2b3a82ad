"""Prompts on decode workers while the prefill workers are full: how much of the tail of TTFT goes? (arXiv 2607.02043)

    python benchmarks/deflection.py [--json deflection.json] [--requests 1500]

The paper serves DeepSeek-V2-Lite on two prefill and two decode nodes of A100 under bursty traces of production. Of the
95th percentile of TTFT only 2 to 23 % is prefill, the rest is queueing and the transfer of KV. Decode nodes that run
prompts in chunks, within the objective of their streams, take up to 81 % off it and raise attainment by up to 79 %.

Here: the same fleet with Llama-3-8B (measured layers of an A100), lengths of the Azure conversation trace, arrivals in
bursts (gamma gaps, coefficient of variation 3). "always": every prompt runs on a prefill worker and is handed over;
"short" and "objective": --deflection, where the router takes the cheaper of a pair and a decode worker that serves the
request whole. Changes are against "by price, always".
"""

import argparse
from typing import Any

from common import report

from diptych.control.slo import NS_PER_MS
from diptych.report.statistics import percentile
from diptych.simulation.results import RequestTable
from diptych.simulation.settings import read_settings
from diptych.simulation.sweep import run_here

RATES = (4.0, 6.0, 8.0, 10.0, 12.0, 16.0)
WAYS = {
    "in turn, always": {"routing": "round_robin", "disaggregate": "always"},
    "by price, always": {"disaggregate": "always"},
    "by price, short": {"deflection": "short"},
    "by price, objective": {"deflection": "objective"},
}
FLEET = {
    "model": "llama-3-8b", "hardware": "a100-80gb", "pools": {"prefill": 2, "decode": 2, "link": "eth100"},
    "slo.ttft_ms": 1000.0, "slo.tpot_ms": 50.0, "workload.arrivals": {"kind": "gamma", "cv": 3.0},
    "workload.lengths.pairs": "azure-conv", "seed": 1, "admit_all": True,
}  # fmt: skip


def tail_ms(table: RequestTable, rank: float = 95.0) -> tuple[float, float]:
    """(TTFT at this percentile, and the mean share of the prompt's own computing in the TTFT of requests beyond it)."""
    rows = sorted(table.completed_rows(), key=table.ttft_ns)
    beyond = rows[int(len(rows) * rank / 100) :]
    shares = [table.prefill_ns[row] / table.ttft_ns(row) for row in beyond]
    return percentile([table.ttft_ns(row) for row in rows], rank) / NS_PER_MS, sum(shares) / len(shares)


def run(way: str, rate: float, requests: int) -> dict[str, Any]:
    """One fleet at one rate."""
    done = run_here(read_settings(None, FLEET | WAYS[way] | {"workload.rate": rate, "workload.num_requests": requests}))
    ttft, share = tail_ms(done.result.requests)
    summary = done.point["summary"]
    return {
        "requests/s": rate,
        "way": way,
        "TTFT p95 ms": ttft,
        "of it prefill": share,
        "TPOT p99 ms": summary["tpot_ms"]["p99"],
        "attainment": summary["attainment"],
        "goodput/s": summary["goodput_rps"],
    }


def main() -> None:
    """Every rate with every way, and what prices and deflection gain over the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--requests", type=int, default=1500)
    options = parser.parse_args()
    rows = []
    for rate in RATES:
        points = [run(way, rate, options.requests) for way in WAYS]
        for point in points:
            point["TTFT p95 change"] = point["TTFT p95 ms"] / points[1]["TTFT p95 ms"] - 1
            point["attainment change"] = point["attainment"] - points[1]["attainment"]
        rows += points
    report("deflection", rows, options.json)


if __name__ == "__main__":
    main()
