"""What published planners gained, by ``diptych plan`` with their own step times.

    python benchmarks/twin.py plans [--paper Splitwise] [--machines 10] [--json plan_papers.json] [--processes 2]

DistServe (Zhong et al., OSDI 2024): OPT-13B and OPT-66B on A100, ShareGPT, the authors' requests, objectives and step
times. Its search of each phase (--placement per-phase) chooses how either phase is cut; its rate per GPU at 90 %
attainment is set against vLLM's, prompts first, cut as the authors cut it. Published: the gains of figure 8, and the
choice of TP 2 for prefill and TP 1 for decode (13B), TP 4 and TP 2 with 2 stages (66B; no profile of stages was
published, so that stages are left out here).

Splitwise (Patel et al., ISCA 2024): BLOOM-176B on DGX-A100 and DGX-H100, lengths of the Azure conversation trace.
Published: up to 1.4 times the rate at 20 % lower cost, or 2.35 times the rate at the same cost and power, by splitting
the phases, on machines of one kind or of two. Set against each other are equal workers that mix whole prompts with
decodes (as their baseline, vLLM of 2023, does) and the best split or mixed fleet within the power of --machines
DGX-A100. The authors' objectives are slowdowns of the p90 request: TTFT 3 times and time between tokens 1.5 times what
a DGX-A100 without other work takes, which for these lengths is 4 s and 75 ms.
"""

import argparse
import csv
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from common import report
from profiled_costs import use_profiles
from twin_parts.distserve import DATA

from diptych.advisor.device_layout import LayoutName, PlannedDevice, WorkerKind
from diptych.advisor.layout_runs import RunOptions
from diptych.advisor.layout_space import FleetBudget, LayoutSpace
from diptych.advisor.phase_search import phase_rates
from diptych.advisor.plan_search import MeasuredLayout, PlanQuestion, PlanSearch
from diptych.search.goodput_search import SearchConfig
from diptych.simulation.hardware import catalogue_hardware
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.settings import read_settings

use_profiles()

DISTSERVE = (  # model, TTFT and TPOT in ms, tensor parallelism of vLLM, of either phase; published gain
    ("opt-13b", 250.0, 100.0, 1, (1, 2, 4), 4.60),
    ("opt-66b", 2500.0, 150.0, 4, (2, 4, 8), 2.75),
)
DISTSERVE_DEVICES = 24
ATTAINMENTS = (0.9, 0.85, 0.8)  # published is the first; with these step times vLLM does not reach it on OPT-13B
SPLITWISE_MACHINES = 40


def device(name: str) -> PlannedDevice:
    """A device of the catalogue with its price and power."""
    entry = catalogue_hardware(name)
    return PlannedDevice(name, entry.price_per_hour or None, entry.power_w)


def question(
    settings: dict[str, Any], shapes: tuple[LayoutName, ...], kinds: tuple[WorkerKind, ...], budget: FleetBudget,
    processes: int, attainment: float = 0.9,
) -> PlanQuestion:  # fmt: skip
    """All kinds of workers in every role."""
    space = LayoutSpace(shapes=shapes, kinds=kinds, prefill_kinds=kinds, decode_kinds=kinds, budget=budget)
    options = RunOptions(search=SearchConfig(tolerance=0.05, attainment=attainment), num_processes=processes)
    return PlanQuestion(base=read_settings(None, settings), space=space, options=options)


def distserve(trace: Path, processes: int) -> list[dict[str, Any]]:
    """A row for each model and attainment."""
    rows = []
    for (model, ttft_ms, tpot_ms, vllm_tp, ways, published), attainment in product(DISTSERVE, ATTAINMENTS):
        common = {
            "model": model, "workload.trace.path": str(trace), "workload.rate": 1.0, "slo.ttft_ms": ttft_ms,
            "slo.tpot_ms": tpot_ms, "memory.prefix_cache": False, "pools.link": "nvlink3",
        }  # fmt: skip
        a100 = device("a100-80gb")
        fixed = (WorkerKind(a100, Parallelism(vllm_tp)),)
        vllm = question(
            common | {"cost": f"distserve-vllm-{model}"},
            ("unified",),
            fixed,
            FleetBudget(vllm_tp),
            processes,
            attainment,
        )
        equal = PlanSearch(vllm).within_budget(vllm.space.layouts()).fleets[0]
        kinds = tuple(WorkerKind(a100, Parallelism(tp)) for tp in ways)
        budget = FleetBudget(DISTSERVE_DEVICES)
        split = question(
            common | {"cost": f"distserve-distserve-{model}"}, ("split",), kinds, budget, processes, attainment
        )
        placed = PlanSearch(split).exactly(phase_rates(split).layout(budget, None)).fleets[0]
        gain = per_device(placed) / per_device(equal) if per_device(equal) else None
        rows.append(
            {
                "paper": "DistServe",
                "model": model,
                "attainment": attainment,
                "vLLM/GPU": per_device(equal),
                "split/GPU": per_device(placed),
                "layout": str(placed.layout),
                "gain": gain,
                "published": published,
                "off": gain / published - 1 if gain else None,
            }
        )
    return rows


def splitwise(processes: int, machines: int) -> list[dict[str, Any]]:
    """Three rows for each choice of machines: mixed whole prompts on equal workers, split, and split with a mixed pool,
    all within the power of ``machines`` DGX-A100."""
    old, new = (WorkerKind(device(name), Parallelism(8)) for name in ("a100-80gb", "h100"))
    budget = FleetBudget(kilowatts=machines * old.kilowatts)
    settings = {
        "model": "bloom-176b", "cost": "splitwise-bloom-176b", "workload.lengths.pairs": "azure-conv",
        "workload.rate": 40.0, "slo.ttft_ms": 4000.0, "slo.tpot_ms": 75.0, "pools.link": "ib400", "pools.nics": 8,
        "max_model_len": 8192,  # as the authors' simulator, which knows no limit of the context
    }  # fmt: skip
    rows = []
    for name, kinds in (("A100", (old,)), ("H100", (new,)), ("both", (old, new))):
        base = question(settings, ("unified",), kinds[:1], budget, processes)
        equal = PlanSearch(base).within_budget(base.space.layouts()).fleets[0]
        asked = question(settings, ("split", "mixed"), kinds, budget, processes)
        found = PlanSearch(asked).within_budget(asked.space.layouts())
        rows += [
            {
                "paper": "Splitwise",
                "machines": name,
                "layout": str(fleet.layout),
                "rate": fleet.highest_rate_rps,
                "gain": (fleet.highest_rate_rps or 0.0) / equal.highest_rate_rps if equal.highest_rate_rps else None,
                "$/h": fleet.layout.usd_per_hour,
                "kW": fleet.layout.kilowatts,
                "published": "1.4 to 2.35",
            }
            for fleet in (equal, *found.fleets)
        ]
    return rows


def per_device(fleet: MeasuredLayout) -> float:
    """Highest rate of one GPU."""
    return (fleet.highest_rate_rps or 0.0) / fleet.layout.num_devices


def sharegpt(folder: Path) -> Path:
    """The requests of DistServe's runs as a trace."""
    path, at = folder / "sharegpt.csv", 0.0
    with DATA.open() as stream, path.open("w") as out:
        out.write("arrival_s,prompt_tokens,output_tokens\n")
        for row in csv.DictReader(line for line in stream if not line.startswith("#")):
            at += float(row["gap"])
            out.write(f"{at},{row['prompt']},{row['answer']}\n")
    return path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--paper", choices=("DistServe", "Splitwise"), help="of the two, this one only")
    parser.add_argument("--machines", type=int, default=SPLITWISE_MACHINES, help="DGX-A100 of Splitwise's budget")
    parser.add_argument("--processes", type=int, default=2)


def main(options: argparse.Namespace) -> None:
    """Both papers."""
    rows = []
    if options.paper != "Splitwise":
        with tempfile.TemporaryDirectory() as folder:
            rows += distserve(sharegpt(Path(folder)), options.processes)
    if options.paper != "DistServe":
        rows += splitwise(options.processes, options.machines)
    report("plan_papers", rows, options.json)
