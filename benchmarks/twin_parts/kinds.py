"""The same published points priced by layer tables, by measured operators and by the roofline, device by device.

    python benchmarks/twin.py kinds DATA_FOLDER [--json cost_kinds.json] [--only A100]

Median error of each cost model on the points that all cost models of a row price; none where one does not exist.
Nothing is fitted to any of the points: the device's part is the catalogue's, the host's part that of the named engine
(none: the table's own, or step_overhead_s).

    served    closed loops of TensorRT-LLM, vLLM and SGLang (part served, "plain"); no engine
    ISPASS    vLLM, Llama-3.1-70B on four H100 (R7 of part runs); engine sync-2024
    requests  vLLM 0.19 on RTX 4090 and RTX PRO 6000 (R10); no engine
    prompts   Llama-2-70B on 2, 4 and 8 GPUs of a DGX: prompts of 2,048 to 8,192 tokens, batch 1 (Splitwise's
              perf_model.csv, medians; its decode steps hold 20 ms of a host of 2023 that no source measures apart)
    Yi-34B    prefill steps of 512 to 16,384 tokens on two A100 (Sarathi-Serve, figure 2)
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import report
from twin_parts import runs as vllm_runs
from twin_parts import served as served_points

from diptych.control.errors import ConfigError
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.report.statistics import percentile
from diptych.simulation.context_skew import context_skew
from diptych.simulation.costs.cost_choice import choose_cost
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario, load_balancer

KINDS = ("tables", "operators", "roofline")
Row = dict[str, Any]
Errors = dict[str, list[float]]  # relative errors by metric


def cost_of(kind: str, model: str, hardware: str, devices: int, *, bits: int = 16, **settings: Any) -> CostModel | None:
    """The cost model of a kind, if there is one."""
    parallelism = Parallelism(devices)
    try:
        return choose_cost(
            kind, model=model, hardware=hardware, parallelism=parallelism, weight_bits=bits, **settings
        ).cost
    except ConfigError:
        return None


def rows_of(device: str, points: str, found: dict[str, Errors]) -> Iterable[Row]:
    """One row a metric."""
    for metric in next(iter(found.values())):
        values = {kind: found[kind][metric] if kind in found else [] for kind in KINDS}
        errors = {f"{kind}_%": round(100 * middle(of), 1) if of else None for kind, of in values.items()}
        yield {"device": device, "points": points, "metric": metric, "number": max(map(len, values.values())), **errors}


def middle(errors: Iterable[float]) -> float:
    """Median of the absolute values."""
    return percentile(sorted(abs(error) for error in errors), 50)


def served(folder: Path, device: str) -> Iterable[Row]:
    """Closed loops on H100 and H200: those with 16 bits that have a layer table, and all."""
    points = served_points.read_points(folder / "aiconfigurator" / "aic_0.12.0_predictions_dense_h100_h200.csv")
    priced: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for point in points:
        if point.hardware.upper() != device:
            continue
        for kind in KINDS:
            model = served_points.MODELS[point.model]
            cost = cost_of(kind, model, point.hardware, point.devices, bits=point.weight_bits)
            if cost is not None:
                setting = served_points.plain(point)
                ttft, tpot = served_points.served(point, cost, setting.budget, setting.shortest)[setting.skip]
                priced[point.name][kind] = (ttft / point.ttft_ms - 1, tpot / point.tpot_ms - 1)
    for name, kinds in (("served, with a table", KINDS), ("served, all", KINDS[1:])):
        shared = [errors for errors in priced.values() if all(kind in errors for kind in kinds)]
        if shared:
            found = {
                kind: {"TTFT": [errors[kind][0] for errors in shared], "TPOT": [errors[kind][1] for errors in shared]}
                for kind in kinds
            }
            yield from rows_of(device, name, found)


def ispass(folder: Path) -> Iterable[Row]:
    """R7 on H100."""
    root = folder / "llmservingsim/ispass26"
    lines = vllm_runs.tsv(root / "evaluation/figure_8/reference/SD_latency.tsv")
    measured = [float(value) for value in next(line[1:] for line in lines if line[0] == "vLLM")]
    workload = vllm_runs.read_workload(root / "dataset/sharegpt_req300_rate10_llama.lens.jsonl.gz", shared=False)
    found: dict[str, Errors] = {}
    for kind in KINDS:
        cost = cost_of(kind, vllm_runs.LLAMA_70B, "h100", 4, engine="sync-2024")
        assert cost is not None
        scenario = Scenario(engine=vllm_runs.H100.engine, cost=cost, workload=workload, cluster=load_balancer())
        ttft, tpot, _ = vllm_runs.mean_ms(simulate(scenario))
        found[kind] = {"TTFT": [ttft / measured[1] - 1], "TPOT": [tpot / measured[2] - 1]}
    yield from rows_of("H100", "ISPASS", found)


def requests(folder: Path, hardware: str) -> Iterable[Row]:
    """R10 on one device."""
    run = next(run for run in vllm_runs.LOGGED_RUNS if run.hardware == hardware)
    logged, workload = vllm_runs.read_logged(folder, run)
    engine = replace(run.engine, cache=replace(run.engine.cache, admission="greedy"))
    found: dict[str, Errors] = {}
    for kind in KINDS:
        cost = cost_of(kind, vllm_runs.LLAMA_8B, hardware, 1, skew=context_skew(workload))
        if cost is not None:
            scenario = Scenario(engine=engine, cost=cost, workload=workload, cluster=load_balancer())
            rows = vllm_runs.logged_rows(run.name, logged, simulate(scenario))
            errors = {row["metric"]: row["error_%"] / 100 for row in rows if "error_%" in row}
            found[kind] = {name: [errors[f"{name} mean (ms)"]] for name in ("TTFT", "TPOT", "E2E")}
    yield from rows_of(hardware, "requests", found)


def prompt_ms(cost: CostModel, num_tokens: int) -> float:
    """A step with one whole prompt."""
    features = StepFeatures(num_tokens, chunk_attention(0, num_tokens), 0, 0)
    prefills = (ScheduledPrefill("", 0, num_tokens, (), True),)
    return cost.step_ns(SchedulerOutput(0, prefills, 0, features=features)) / 1e6


def prompt_errors(points: Sequence[tuple[str, str, int, int, float]]) -> dict[str, Errors]:
    """Errors of prompts (model, hardware, devices, tokens, measured ms), by each kind that prices all of them."""
    found: dict[str, Errors] = {}
    for kind in KINDS:
        costs = [cost_of(kind, model, hardware, devices) for model, hardware, devices, _, _ in points]
        if None not in costs:
            found[kind] = {
                "prompt": [
                    prompt_ms(cost, tokens) / measured - 1
                    for cost, (_, _, _, tokens, measured) in zip(costs, points, strict=True)
                    if cost is not None
                ]
            }
    return found


def prompts(folder: Path, device: str) -> Iterable[Row]:
    """Splitwise's prompts of Llama-2-70B."""
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    with (folder / "splitwise-sim/perf_model.csv").open() as lines:
        for row in csv.DictReader(lines):
            tokens = int(row["prompt_size"])
            if row["model"] == "llama2-70b" and row["hardware"] == f"{device.lower()}-80gb" and tokens >= 2048:
                times[int(row["tensor_parallel"]), tokens].append(float(row["prompt_time"]))
    hardware = "a100-80gb" if device == "A100" else "h100"
    points = [
        ("llama-2-70b", hardware, devices, tokens, sorted(values)[len(values) // 2])
        for (devices, tokens), values in sorted(times.items())
    ]
    yield from rows_of(device, "prompts", prompt_errors(points))


def yi(folder: Path) -> Iterable[Row]:
    """Sarathi's prefill steps."""
    with (folder / "sarathi-serve/osdi/figure-2/prefill.csv").open() as lines:
        measured = [
            (int(row["batch_num_prefill_tokens"]), 1e3 * float(row["batch_execution_time"]))
            for row in csv.DictReader(lines)
        ]
    points = [("yi-34b", "a100-80gb", 2, tokens, time) for tokens, time in measured if 512 <= tokens <= 16384]
    yield from rows_of("A100", "Yi-34B", prompt_errors(points))


SOURCES = {
    "H100": lambda folder: [*served(folder, "H100"), *ispass(folder), *prompts(folder, "H100")],
    "H200": lambda folder: [*served(folder, "H200")],
    "A100": lambda folder: [*prompts(folder, "A100"), *yi(folder)],
    "RTX4090": lambda folder: [*requests(folder, "RTX4090")],
    "RTXPRO6000": lambda folder: [*requests(folder, "RTXPRO6000")],
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=SOURCES)


def main(options: argparse.Namespace) -> None:
    """All devices, or one."""
    rows = [row for name, read in SOURCES.items() if options.only in (None, name) for row in read(options.folder)]
    report("cost_kinds", rows, options.json)
