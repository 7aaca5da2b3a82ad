"""Splitwise's published limit (R14), from its own step-time profiles and the simulator's scheduler.

    python benchmarks/twin.py splitwise DATA_FOLDER [--json reproduce_papers-R14.json] [--seed 1] [--machines 40]

Splitwise (Patel et al., ISCA 2024). 40 DGX-H100, BLOOM-176B, lengths of the Azure conversation trace (prompts and
answers drawn independently) and Poisson arrivals for 600 s, as the authors' trace generator has it. The objective is
the paper's table 6: slowdowns at p50 / p90 / p99 against an unloaded DGX-A100 of at most 2 / 3 / 6 (TTFT) and 1.25 /
1.5 / 5 (TBT and end to end). Published: the baseline meets it at 120 requests/s and misses it at 130. The authors batch
whole prompts, up to 2,048 tokens, with as many decodes as fit; here decodes come first and prompts are cut at 2,048
tokens ("mixed"), or prompts run whole and alone ("prefill first"). Their router counts queued tokens, ours requests.
Their simulator looks the time of a decode step up by its sequences in a table of prompt tokens ("as-simulated"), which
hides most of what a large batch costs; rows "measured" take it by batch size, as it was measured.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

from common import report
from profiled_costs import ProfiledCost, TabledLaw, load_profile
from twin_parts.distserve import SEED, Lengths, Row, poisson, worker

from diptych.control.config import BudgetConfig
from diptych.report.statistics import percentile
from diptych.simulation.results import RequestTable
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.workload.distributions import Stream

PERCENTS = (50.0, 90.0, 99.0)
SLOWDOWNS = {"ttft": (2.0, 3.0, 6.0), "tbt": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}
SPLITWISE_SECONDS = 600
SPLITWISE_RATES = {"as-simulated": (100, 110, 120, 130, 140, 150), "measured": (60, 70, 80, 90, 100, 110)}
DGX_H100_BYTES = 8 * 80 * 2**30
BLOOM_BYTES = 329_000_000_000  # weights, as the authors' configuration has it

REASONS = (
    "With decode times as the authors read them, mixed steps keep the objective up to the published rate and miss it "
    "at the next, by the median TBT and narrowly: with seeds 1 to 4 its worst slowdown is 1.004, 1.010, 1.002 and "
    "1.000 of the limit at 130 requests/s (seed 4 just keeps it), and at most 0.946 at 120. Batching matters more than "
    "that: prompts that run whole and alone lose two steps of the rate.",
    "With decode times as measured the same fleet carries less: the published limit rests on the authors' reading.",
)


def splitwise(folder: Path, seed: int, num_machines: int) -> tuple[list[Row], dict[str, Any]]:
    """R14: slowdowns by rate, and the highest rate that keeps the objective."""
    trace = folder / "traces" / "azure" / "AzureLLMInferenceTrace_conv.csv"
    with trace.open() as stream:
        pairs = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(stream)]
    unloaded = load_profile("splitwise-bloom-176b-a100-80-tp8-as-simulated")
    shapes = {
        "mixed": BudgetConfig("fixed", max_batched_tokens=2048),
        "prefill first": BudgetConfig("whole", max_batched_tokens=2048),
    }
    rows, points = [], []
    for table in ("as-simulated", "measured"):
        cost = load_profile("splitwise-bloom-176b-h100-tp8" + ("-as-simulated" if table == "as-simulated" else ""))
        kv_tokens = (DGX_H100_BYTES - BLOOM_BYTES) // cost.info.kv_bytes_per_token
        for shape, budget in shapes.items():
            kept = 0
            for rate in SPLITWISE_RATES[table]:
                lengths = independent(pairs, rate * SPLITWISE_SECONDS, seed)
                scenario = Scenario(
                    engine=worker(kv_tokens, budget, 512),
                    cost=cost,
                    workload=poisson(lengths, rate, seed),
                    num_workers=num_machines,
                )
                point = slowdowns(simulate(scenario).requests, unloaded)
                points.append({"decode times": table, "batching": shape, "rate": rate, **point})
                if not point["kept"]:
                    break
                kept = rate
            worst = max(SLOWDOWNS, key=lambda name: max(ratio(points[-1], name)))
            rows.append(
                {
                    "target": "R14",
                    "decode times": table,
                    "batching": shape,
                    "kept at": kept,
                    "missed at": points[-1]["rate"],
                    "first missed": worst,
                    "worst, kept": worst_ratio(points[-2]) if kept else None,
                    "worst, missed": worst_ratio(points[-1]),
                    "published": "120 / 130",
                    "goal": kept == 120,
                }
            )
    return rows, {"splitwise": points}


def independent(pairs: Lengths, count: int, seed: int) -> Lengths:
    """Prompts and answers drawn with replacement, each for itself."""
    draw = Stream(seed, "lengths")
    last = len(pairs) - 1
    return [(pairs[draw.integer(0, last)][0], pairs[draw.integer(0, last)][1]) for _ in range(count)]


def slowdowns(table: RequestTable, unloaded: ProfiledCost) -> Row:
    """Percentiles of TTFT, TBT and end-to-end time over those of the same request alone on a DGX-A100.

    The authors look a request's unloaded time per token up by its prompt's tokens.
    """
    law = unloaded.law
    assert isinstance(law, TabledLaw)
    ratios: dict[str, list[float]] = {name: [] for name in SLOWDOWNS}
    for row in table.completed_rows():
        prompt, outputs = table.prompt_tokens[row], table.output_tokens[row]
        ttft, tbt = law.prefill(prompt), law.decode(prompt)
        ratios["ttft"].append(table.ttft_ns(row) / ttft)
        ratios["e2e"].append(table.e2e_ns(row) / (ttft + tbt * (outputs - 1)))
        if (tpot := table.tpot_ns(row)) is not None:
            ratios["tbt"].append(tpot / tbt)
    point: Row = {"requests": len(table)}
    for name, values in ratios.items():
        values.sort()
        point[name] = [round(percentile(values, percent), 3) for percent in PERCENTS]
    point["kept"] = all(max(ratio(point, name)) <= 1 for name in SLOWDOWNS)
    return point


def worst_ratio(point: Row) -> float:
    """The largest slowdown over its limit: above 1, the objective is missed."""
    return round(max(max(ratio(point, name)) for name in SLOWDOWNS), 3)


def ratio(point: Row, name: str) -> list[float]:
    """Slowdowns over their limits."""
    return [value / limit for value, limit in zip(point[name], SLOWDOWNS[name], strict=True)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--machines", type=int, default=40, help="DGX-H100; the rates are those of 40")


def main(options: argparse.Namespace) -> None:
    """Rates within the objective, and why they are what they are."""
    rows, points = splitwise(options.folder, options.seed, options.machines)
    title = f"R14: Splitwise's baseline, {options.machines} DGX-H100, BLOOM-176B: highest rate within the objective"
    report(title, rows, options.json, inputs=__doc__, reasons=REASONS, **points)
    print("\n".join(REASONS))
