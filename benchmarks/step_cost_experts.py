"""Measured TTFT and TPOT of mixtures of experts, split in several ways, beside the simulator's two general cost models.

    python benchmarks/step_cost_experts.py DATA [--json step_cost_experts.json]

DATA holds silicon_sample.csv (aiconfigurator, Apache-2.0). The rows are one worker with 8-bit experts (Qwen3-235B-A22B
and DeepSeek-V3/R1 on H100, H200 and B200), with tensor-parallel or whole experts and data-parallel attention, driven as
in step_cost_roofline.py. Nothing is fitted to them. ``operators`` has no latent attention, so no DeepSeek.
"""

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import report
from step_cost_roofline import BLOCK, STEP_TOKENS, SYSTEMS, Clients, median_percent

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.errors import ConfigError
from diptych.simulation.costs.cost_choice import choose_cost
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.models import kv_capacity_tokens
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.simulation.weight_precision import GPU_WEIGHTS

MODELS = {
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
}
KINDS = ("roofline", "operators")


def read_rows(folder: Path) -> list[dict[str, str]]:
    """Rows of these models in 8 bits on one worker, whose split adds up."""
    with (folder / "silicon_sample.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] == "agg" and row["model_path"] in MODELS]
    return [row for row in rows if row["system"] in SYSTEMS and row["precision"] == "fp8" and split_of(row)]


def split_of(row: dict[str, str]) -> Parallelism | None:
    """How the devices share the model; None where the columns contradict each other."""
    names = ("tp_size", "pp_size", "moe_ep_size", "attention_dp_size")
    tensor, pipeline, expert, data = (int(float(row[name] or 1)) for name in names)
    if expert * int(float(row["moe_tp_size"] or 1)) != tensor * data:
        return None
    return Parallelism(tensor, pipeline, expert, data)


def predict(row: dict[str, str], kind: str) -> tuple[float, float]:
    """(TTFT, TPOT) in milliseconds, means over a closed loop. Raises ConfigError where there is no such cost model."""
    split = split_of(row)
    assert split is not None
    name, hardware = MODELS[row["model_path"]], SYSTEMS[row["system"]]
    choice = choose_cost(kind, model=name, hardware=hardware, parallelism=split, weight_bits=8)
    clients, prompt, output = int(float(row["batch_size"])), int(row["isl"]), int(row["osl"])
    assert choice.hardware is not None
    capacity = kv_capacity_tokens(
        load_model(name), choice.hardware, parallelism=split, weights=GPU_WEIGHTS[8], step_tokens=STEP_TOKENS
    )
    worker = EngineConfig(
        cache=CacheConfig(
            num_blocks=min(capacity, clients * (prompt + output + BLOCK) + STEP_TOKENS) // BLOCK,
            block_size=BLOCK,
            enable_prefix_cache=False,
        ),
        scheduler=SchedulerConfig(
            order="fcfs", budget=BudgetConfig("fixed", STEP_TOKENS), max_num_seqs=clients, max_waiting=2 * clients
        ),
        max_model_len=prompt + output + BLOCK,
    )
    table = simulate(Scenario(engine=worker, cost=choice.cost, workload=Clients(clients, prompt, output))).requests
    rows = table.completed_rows()
    tpots = [value for i in rows if (value := table.tpot_ns(i)) is not None]
    return statistics.fmean(table.ttft_ns(i) for i in rows) / 1e6, statistics.fmean(tpots) / 1e6


def summary(name: str, points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median errors of one group, and which way they go."""
    line: dict[str, Any] = {"points": name, "num": len(points)}
    for kind in KINDS:
        for metric in ("ttft", "tpot"):
            pairs = [
                (point[f"{kind}_{metric}_ms"], point[f"measured_{metric}_ms"])
                for point in points
                if f"{kind}_{metric}_ms" in point
            ]
            line[f"{kind}_{metric}_error_%"] = median_percent(pairs)
            if metric == "tpot":
                ratios = [guess / truth - 1 for guess, truth in pairs]
                line[f"{kind}_tpot_bias_%"] = round(100 * statistics.median(ratios), 1) if ratios else None
    return line


def main() -> None:
    """Predict every point, print the medians by group, and keep all points in the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--json")
    options = parser.parse_args()
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read_rows(options.data):
        point: dict[str, Any] = {"id": row["id"], "split": str(split_of(row)), "clients": row["batch_size"]}
        for metric in ("ttft", "tpot"):
            point[f"measured_{metric}_ms"] = round(float(row[f"silicon_{metric}_ms"]), 3)
        for kind in KINDS:
            try:
                ttft, tpot = predict(row, kind)
            except ConfigError:
                continue
            point |= {f"{kind}_ttft_ms": round(ttft, 2), f"{kind}_tpot_ms": round(tpot, 3)}
        groups[f"{row['backend']} {MODELS[row['model_path']]} {row['system']} {point['split']}"].append(point)
    everything = [point for points in groups.values() for point in points]
    rows = [summary("all", everything), *(summary(key, points) for key, points in sorted(groups.items()))]
    report("step_cost_experts", rows, options.json, points=everything)


if __name__ == "__main__":
    main()
