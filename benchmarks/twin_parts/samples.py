"""Measured TTFT and TPOT of closed loops on H100, H200 and B200 beside the roofline and the operators, nothing fitted.

    python benchmarks/twin.py samples DATA/aiconfigurator [--set test|calibration|experts]

The folder holds silicon_sample.csv (aiconfigurator, Apache-2.0) and aic_0.12.0_predictions_dense_h100_h200.csv (that
project's own predictions). Each row is a closed loop of ``batch_size`` clients against one worker: chunks within 8,192
tokens a step, decodes first, ten requests per client, prompts and answers of 0.8 to 1 times the stated lengths.

test          dense models on H100 and H200, by the roofline, beside aiconfigurator's predictions.
calibration   Llama-3.1-70B on B200 in fp8. From it come the host overhead of a step, the share of the 8-bit launch time
              that engines hide by fusing the quantisation, and the harness (ten requests, 0.8 to 1). The file does not
              say how other rows were driven; the same harness is assumed.
experts       mixtures of experts in 8 bits (Qwen3-235B-A22B, DeepSeek-V3/R1), with tensor-parallel or whole experts and
              data-parallel attention, by roofline and operators; these have no latent attention, so no DeepSeek.
"""

import argparse
import csv
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import report

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.errors import ConfigError
from diptych.simulation.costs.cost_choice import choose_cost
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.costs.roofline import RooflineCost
from diptych.simulation.hardware import load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.models import kv_capacity_tokens
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.simulation.weight_precision import GPU_WEIGHTS
from diptych.workload.spec import RequestSpec

Row = dict[str, str]
Point = dict[str, Any]
MODELS = {
    "Qwen/Qwen3-32B": "qwen3-32b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Meta-Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
}
EXPERTS = {
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
}
KINDS = ("roofline", "operators")
SYSTEMS = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200"}
PREDICTED, SAMPLES = "aic_0.12.0_predictions_dense_h100_h200.csv", "silicon_sample.csv"
STEP_TOKENS = 8192
REQUESTS_PER_CLIENT = 10
SHORTEST = 0.8
BLOCK = 32


class Clients:
    """A closed loop of clients that ask again at once, REQUESTS_PER_CLIENT times each."""

    def __init__(self, concurrency: int, prompt_tokens: int, output_tokens: int) -> None:
        self.concurrency = concurrency
        self._lengths = (prompt_tokens, output_tokens)
        self._served = [0] * concurrency

    def next_request(self, client: int, now: int) -> RequestSpec | None:
        """The client's next request, of lengths that depend on nothing but its number."""
        served = self._served[client]
        if served == REQUESTS_PER_CLIENT:
            return None
        self._served[client] += 1
        draw = random.Random(client * REQUESTS_PER_CLIENT + served)
        prompt, output = (max(2, round(length * draw.uniform(SHORTEST, 1.0))) for length in self._lengths)
        return RequestSpec(arrival_ns=now, prompt_tokens=prompt, output_tokens=output)

    def __len__(self) -> int:
        return self.concurrency * REQUESTS_PER_CLIENT


def closed_loop(row: Row, cost: CostModel, capacity: int) -> tuple[float, float]:
    """(TTFT, TPOT) in milliseconds: means over the requests of the closed loop. capacity: tokens of the KV cache."""
    clients, prompt, output = int(float(row["batch_size"])), int(row["isl"]), int(row["osl"])
    blocks = min(capacity, clients * (prompt + output + BLOCK) + STEP_TOKENS) // BLOCK
    worker = EngineConfig(
        cache=CacheConfig(num_blocks=blocks, block_size=BLOCK, enable_prefix_cache=False),
        scheduler=SchedulerConfig(
            order="fcfs", budget=BudgetConfig("fixed", STEP_TOKENS), max_num_seqs=clients, max_waiting=2 * clients
        ),
        max_model_len=prompt + output + BLOCK,
    )
    table = simulate(Scenario(engine=worker, cost=cost, workload=Clients(clients, prompt, output))).requests
    rows = table.completed_rows()
    tpots = [value for i in rows if (value := table.tpot_ns(i)) is not None]
    return statistics.fmean(table.ttft_ns(i) for i in rows) / 1e6, statistics.fmean(tpots) / 1e6


def rows_of(path: Path) -> list[Row]:
    """Points of one worker that prefills and decodes."""
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["mode"] == "agg"]


def measured(row: Row) -> Point:
    """What was measured of a point."""
    return {f"measured_{metric}_ms": round(float(row[f"silicon_{metric}_ms"]), 3) for metric in ("ttft", "tpot")}


def median_percent(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Median relative error in percent of (predicted, measured)."""
    return round(100 * statistics.median(abs(guess / truth - 1) for guess, truth in pairs), 1) if pairs else None


def error(points: Sequence[Point], metric: str, whose: str = "") -> float | None:
    """Median error in percent of one metric, as ``whose`` prediction has it."""
    return median_percent([(p[f"{whose}{metric}_ms"], p[f"measured_{metric}_ms"]) for p in points])


def dense_rows(folder: Path, which: str) -> list[Row]:
    """The test set with aiconfigurator's columns, or the calibration set."""
    rows = [
        row for row in rows_of(folder / (PREDICTED if which == "test" else SAMPLES))
        if row["batch_size"] and row["tp_size"]
    ]  # fmt: skip
    if which == "test":
        return rows
    return [
        row for row in rows
        if row["system"] == "b200_sxm" and "Llama-3.1-70B" in row["model_path"] and row["precision"] == "fp8"
    ]  # fmt: skip


def dense_point(row: Row) -> Point:
    """A dense model, priced by the roofline. Raises ConfigError where it does not fit the devices."""
    model, hardware = load_model(MODELS[row["model_path"]]), load_hardware(SYSTEMS[row["system"]])
    split, bits = Parallelism(int(row["tp_size"])), 8 if row["precision"] == "fp8" else 16
    precision: dict[str, Any] = {"weights": GPU_WEIGHTS[bits], "kv_bits": bits}
    capacity = kv_capacity_tokens(model, hardware, parallelism=split, step_tokens=STEP_TOKENS, **precision)
    ttft, tpot = closed_loop(row, RooflineCost(model, hardware, split, **precision), capacity)
    point = {"id": row["id"], "ttft_ms": round(ttft, 2), "tpot_ms": round(tpot, 3), **measured(row)}
    for metric in ("ttft", "tpot"):
        theirs = row.get(f"aic_predicted_{metric}_ms")
        point[f"aic_{metric}_ms"] = float(theirs) if theirs else None
    return point


def dense_summary(name: str, points: Sequence[Point]) -> Point:
    """Median errors of the simulator, and of aiconfigurator where it has a prediction."""
    theirs = [point for point in points if point["aic_ttft_ms"] is not None]
    line: Point = {"points": name, "num": len(points)}
    line |= {f"{metric}_error_%": error(points, metric) for metric in ("ttft", "tpot")}
    line["num_aic"] = len(theirs)
    for metric in ("ttft", "tpot"):
        line[f"{metric}_error_there_%"] = error(theirs, metric)
        line[f"aic_{metric}_error_%"] = error(theirs, metric, "aic_")
    return line


def split_of(row: Row) -> Parallelism | None:
    """How the devices share a mixture of experts; None where the columns contradict each other."""
    names = ("tp_size", "pp_size", "moe_ep_size", "attention_dp_size")
    tensor, pipeline, expert, data = (int(float(row[name] or 1)) for name in names)
    if expert * int(float(row["moe_tp_size"] or 1)) != tensor * data:
        return None
    return Parallelism(tensor, pipeline, expert, data)


def experts_rows(folder: Path) -> list[Row]:
    """Mixtures of experts in 8 bits whose split adds up."""
    rows = [row for row in rows_of(folder / SAMPLES) if row["model_path"] in EXPERTS and row["system"] in SYSTEMS]
    return [row for row in rows if row["precision"] == "fp8" and split_of(row)]


def experts_point(row: Row) -> Point:
    """A mixture of experts, priced by each cost model that knows it."""
    split = split_of(row)
    assert split is not None
    name = EXPERTS[row["model_path"]]
    point = {"id": row["id"], "split": str(split), "clients": row["batch_size"], **measured(row)}
    for kind in KINDS:
        try:
            choice = choose_cost(
                kind, model=name, hardware=SYSTEMS[row["system"]], parallelism=split, weight_bits=8
            )  # fmt: skip
        except ConfigError:
            continue
        assert choice.hardware is not None
        capacity = kv_capacity_tokens(
            load_model(name), choice.hardware, parallelism=split, weights=GPU_WEIGHTS[8], step_tokens=STEP_TOKENS
        )
        ttft, tpot = closed_loop(row, choice.cost, capacity)
        point |= {f"{kind}_ttft_ms": round(ttft, 2), f"{kind}_tpot_ms": round(tpot, 3)}
    return point


def experts_summary(name: str, points: Sequence[Point]) -> Point:
    """Median errors of one group, and which way they go."""
    line: Point = {"points": name, "num": len(points)}
    for kind in KINDS:
        priced = [point for point in points if f"{kind}_tpot_ms" in point]
        line |= {f"{kind}_{metric}_error_%": error(priced, metric, f"{kind}_") for metric in ("ttft", "tpot")}
        ratios = [point[f"{kind}_tpot_ms"] / point["measured_tpot_ms"] - 1 for point in priced]
        line[f"{kind}_tpot_bias_%"] = round(100 * statistics.median(ratios), 1) if ratios else None
    return line


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("data", type=Path)
    parser.add_argument("--set", choices=("test", "calibration", "experts"), default="test", dest="which")
    parser.add_argument("--limit", type=int, help="points at most, for a quick look")


def main(options: argparse.Namespace) -> None:
    """Predict every point, print the medians by group, and keep all points in the record."""
    groups: dict[str, list[Point]] = defaultdict(list)
    if options.which == "experts":
        for row in experts_rows(options.data)[: options.limit]:
            point = experts_point(row)
            groups[f"{row['backend']} {EXPERTS[row['model_path']]} {row['system']} {point['split']}"].append(point)
        everything = [point for points in groups.values() for point in points]
        rows = [experts_summary(*group) for group in (("all", everything), *sorted(groups.items()))]
        report("step_cost_experts", rows, options.json, points=everything)
        return
    refused = []
    for row in dense_rows(options.data, options.which)[: options.limit]:
        try:
            point = dense_point(row)
        except ConfigError as reason:
            refused.append({"id": row["id"], "reason": str(reason)})
            continue
        key = f"{row['backend']} {MODELS[row['model_path']]} {row['system']} {row['precision'] or 'bf16'}"
        groups[key].append(point)
    everything = [point for points in groups.values() for point in points]
    rows = [dense_summary(*group) for group in (("all", everything), *groups.items())]
    report(f"step_cost_roofline {options.which}", rows, options.json, refused=refused, points=everything)
