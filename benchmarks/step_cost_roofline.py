"""Measured TTFT and TPOT of dense models on H100 and H200, beside the simulator with its roofline, and aiconfigurator.

    python benchmarks/step_cost_roofline.py DATA [--set test|calibration] [--json step_cost_roofline.json]

DATA holds silicon_sample.csv (aiconfigurator, Apache-2.0) and aic_0.12.0_predictions_dense_h100_h200.csv (that
project's own predictions). Each row is a closed loop of ``batch_size`` clients against one worker: chunks within 8,192
tokens a step, decodes first, ten requests per client, prompts and answers of 0.8 to 1 times the stated lengths.

Nothing is fitted to the rows of the test set. The calibration set is Llama-3.1-70B on B200 in fp8: from it come the
host overhead of a step, the share of the 8-bit launch time that engines hide by fusing the quantisation, and the
harness (ten requests, 0.8 to 1). The file does not say how other rows were driven; the same harness is assumed.
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
from diptych.simulation.costs.roofline import RooflineCost
from diptych.simulation.hardware import load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.models import kv_capacity_tokens
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.simulation.weight_precision import GPU_WEIGHTS
from diptych.workload.spec import RequestSpec

MODELS = {
    "Qwen/Qwen3-32B": "qwen3-32b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Meta-Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
}
SYSTEMS = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200"}
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
        """See ClosedLoop."""
        served = self._served[client]
        if served == REQUESTS_PER_CLIENT:
            return None
        self._served[client] += 1
        draw = random.Random(client * REQUESTS_PER_CLIENT + served)
        prompt, output = (max(2, round(length * draw.uniform(SHORTEST, 1.0))) for length in self._lengths)
        return RequestSpec(arrival_ns=now, prompt_tokens=prompt, output_tokens=output)

    def __len__(self) -> int:
        return self.concurrency * REQUESTS_PER_CLIENT


def predict(row: dict[str, str], **settings: Any) -> tuple[float, float]:
    """(TTFT, TPOT) in milliseconds: means over the requests of the closed loop."""
    model, hardware = load_model(MODELS[row["model_path"]]), load_hardware(SYSTEMS[row["system"]])
    size = int(row["tp_size"])
    is_fp8 = row["precision"] == "fp8"
    bits: dict[str, Any] = {"weights": GPU_WEIGHTS[8 if is_fp8 else 16], "kv_bits": 8 if is_fp8 else 16}
    clients, prompt, output = int(row["batch_size"]), int(row["isl"]), int(row["osl"])
    capacity = kv_capacity_tokens(model, hardware, parallelism=Parallelism(size), step_tokens=STEP_TOKENS, **bits)
    blocks = min(capacity, clients * (prompt + output + BLOCK) + STEP_TOKENS) // BLOCK
    worker = EngineConfig(
        cache=CacheConfig(num_blocks=blocks, block_size=BLOCK, enable_prefix_cache=False),
        scheduler=SchedulerConfig(
            order="fcfs", budget=BudgetConfig("fixed", STEP_TOKENS), max_num_seqs=clients, max_waiting=2 * clients
        ),
        max_model_len=prompt + output + BLOCK,
    )
    cost = RooflineCost(model, hardware, Parallelism(size), **bits, **settings)
    result = simulate(Scenario(engine=worker, cost=cost, workload=Clients(clients, prompt, output)))
    table = result.requests
    rows = table.completed_rows()
    tpots = [value for i in rows if (value := table.tpot_ns(i)) is not None]
    return statistics.fmean(table.ttft_ns(i) for i in rows) / 1e6, statistics.fmean(tpots) / 1e6


def read_rows(folder: Path, which: str) -> list[dict[str, str]]:
    """Aggregated points of one worker: the test set with aiconfigurator's columns, or the calibration set."""
    name = "aic_0.12.0_predictions_dense_h100_h200.csv" if which == "test" else "silicon_sample.csv"
    with (folder / name).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] == "agg" and row["batch_size"] and row["tp_size"]]
    if which == "test":
        return rows
    return [
        row
        for row in rows
        if row["system"] == "b200_sxm" and "Llama-3.1-70B" in row["model_path"] and row["precision"] == "fp8"
    ]


def median_percent(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Median relative error in percent of (predicted, measured)."""
    return round(100 * statistics.median(abs(guess / truth - 1) for guess, truth in pairs), 1) if pairs else None


def summary(name: str, points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table: median errors of the simulator, and of aiconfigurator where it has a prediction."""
    theirs = [point for point in points if point["aic_ttft_ms"] is not None]
    line: dict[str, Any] = {"points": name, "num": len(points)}
    for metric in ("ttft", "tpot"):
        line[f"{metric}_error_%"] = median_percent([(p[f"{metric}_ms"], p[f"measured_{metric}_ms"]) for p in points])
    line["num_aic"] = len(theirs)
    for metric in ("ttft", "tpot"):
        line[f"{metric}_error_there_%"] = median_percent(
            [(p[f"{metric}_ms"], p[f"measured_{metric}_ms"]) for p in theirs]
        )
        line[f"aic_{metric}_error_%"] = median_percent(
            [(p[f"aic_{metric}_ms"], p[f"measured_{metric}_ms"]) for p in theirs]
        )
    return line


def main() -> None:
    """Predict every point, print the medians by group, and keep all points in the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--set", choices=("test", "calibration"), default="test", dest="which")
    parser.add_argument("--json")
    options = parser.parse_args()
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    refused = []
    for row in read_rows(options.data, options.which):
        try:
            ttft, tpot = predict(row)
        except ConfigError as error:
            refused.append({"id": row["id"], "reason": str(error)})
            continue
        point: dict[str, Any] = {"id": row["id"], "ttft_ms": round(ttft, 2), "tpot_ms": round(tpot, 3)}
        for metric in ("ttft", "tpot"):
            point[f"measured_{metric}_ms"] = round(float(row[f"silicon_{metric}_ms"]), 3)
            theirs = row.get(f"aic_predicted_{metric}_ms")
            point[f"aic_{metric}_ms"] = float(theirs) if theirs else None
        key = f"{row['backend']} {MODELS[row['model_path']]} {row['system']} {row['precision'] or 'bf16'}"
        groups[key].append(point)
    everything = [point for points in groups.values() for point in points]
    rows = [summary("all", everything), *(summary(key, points) for key, points in groups.items())]
    report(f"step_cost_roofline {options.which}", rows, options.json, refused=refused, points=everything)


if __name__ == "__main__":
    main()
