"""Served points of dense models on H100 and H200 (R11), predicted from the operator tables.

    python benchmarks/twin.py served DATA_FOLDER [--json reproduce_served_points.json]

The points are mean TTFT and TPOT of SGLang, TensorRT-LLM and vLLM at some concurrency (aiconfigurator's silicon
samples, with its own predictions of most of them beside: median error TPOT 11.5 %, TTFT 43.9 %). They are averages over
a closed loop, so each is simulated as one: ``concurrency`` clients, six rounds of requests, the model's KV memory, and
the operator tables for the steps. Much of a measured TTFT is waiting for the prompts of the others, which arrive
together when all answers are equally long.

``plain`` is that with nothing fitted: lengths all equal, the first round left out, at most 8,192 tokens a step
(SGLang: whole prompts before decodes), the host at 0. No number is fitted, but leaving the first round out was decided
after seeing both: ``plain, first round counted`` is the other.

``fitted`` chooses on the training rows what the source does not record, for each group of rows:
    lengths all equal or uniform in [0.8, 1] of the stated ones; the first round counted or not; prompts in chunks of a
    step of 2,048 or 8,192 tokens, or whole and before decodes; host time of a step = a + b * concurrency; time in front
    of the engine = f + g * concurrency (added to TTFT).
Training and tested rows never meet: ``half`` trains on the rows whose id has an even SHA-256 (groups: engine, model,
GPU); ``model`` trains on Qwen3-32B and tests the Llama models (groups: engine); ``engine`` trains on the same half as
``half`` with one group for each engine generation (vLLM 0.12: Qwen3-32B only, see below) and a constant time in front
of the engine: what catalogue/engines.toml holds of vllm-0.12, trtllm and sglang. The host's a and b are fitted to
TPOT, because each token waits for one step; then all rows are simulated again with them. What there is to choose from
was drawn up with all rows in sight; the choice itself sees training rows only. ``shared`` rows are those that
aiconfigurator predicts, without any fit to them: ``plain`` is the even comparison.

What remains. Llama-3.1-8B-FP8 with vLLM on H200: at the stated concurrency these rows answer up to 118,000 prompt
tokens a second and GPU, 83 % of the peak of its 8-bit arithmetic in matrix products alone (a step of 8,192 tokens
reaches 55 % in the tables); fewer requests in flight than stated, or cached prompts, would explain it, and a closed
loop is too slow (TPOT twice the measured). SGLang with Llama-3.1-8B on H200: 512 clients wait up to 8 s although
prompts take 0.1 s, as if fewer could run; no limit is recorded. TensorRT-LLM with Llama-3.1-8B: TTFT holds about one
answer's time over the concurrency, as if one client more than there are places were always there, and at 128 clients
up to 2 s more. TensorRT-LLM with Llama-3.1-70B: mostly faster than the tables, whose 8-bit products contain the
conversion of their input as kernels of their own (engines may fuse it), and whose KV has 16 bits here (the rows do not
say). Across models (``model``) host and clients of one campaign do not carry over to another.
"""

import argparse
import csv
import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from common import report

from diptych.control.config import BudgetConfig, BudgetName, CacheConfig, EngineConfig, SchedulerConfig
from diptych.report.statistics import percentile
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.costs.interpolation import Curve
from diptych.simulation.costs.layer_tables import LayerTableCost
from diptych.simulation.costs.operator_tables import operator_table_cost
from diptych.simulation.hardware import load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.models import kv_capacity_tokens
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario, load_balancer
from diptych.simulation.weight_precision import GPU_WEIGHTS
from diptych.workload.spec import RequestSpec

Row = dict[str, Any]
BLOCK = 16
ROUNDS = 6
SHORTEST = 0.8  # of the stated length, where lengths vary
MODELS = {
    "Qwen/Qwen3-32B": "qwen3-32b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Meta-Llama-3.1-70B": "llama-3.1-70b",
}
BUDGETS: tuple[tuple[BudgetName, int], ...] = (("fixed", 2048), ("fixed", 8192), ("whole", 8192))
STEP_US = (0, 250, 500, 750, 1000, 1500, 2000, 2500, 3000, 4000, 6000)
STEP_US_PER_CLIENT = (0, 2, 5, 10, 20, 30, 50)
FRONT_MS = (0, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300)
FRONT_MS_PER_CLIENT = (0, 0.25, 0.5, 1, 2, 3, 4, 6)


@dataclass(frozen=True)
class Point:
    """One measured point. Times in milliseconds; predicted: aiconfigurator's, where it has any."""

    name: str
    engine: str
    model: str
    hardware: str
    devices: int
    weight_bits: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    predicted: tuple[float, float] | None

    @property
    def is_even(self) -> bool:
        """Half of the points, by their names."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 0


@dataclass(frozen=True)
class Setting:
    """What the source does not record. step_us: host time of a step and its growth with the concurrency."""

    budget: tuple[BudgetName, int]
    shortest: float = 1.0
    skip: int = 1
    step_us: tuple[float, float] = (0.0, 0.0)
    front_ms: tuple[float, float] = (0.0, 0.0)


@dataclass
class Clients:
    """``concurrency`` clients, each asks again as soon as it has its answer."""

    concurrency: int
    point: Point
    shortest: float
    given: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def next_request(self, client: int, now: int) -> RequestSpec | None:
        """The next request at once; None when all were given."""
        if self.given == len(self):
            return None
        self.given += 1
        prompt, output = (
            max(1, round(tokens * self.rng.uniform(self.shortest, 1.0)))
            for tokens in (self.point.prompt_tokens, self.point.output_tokens)
        )
        return RequestSpec(arrival_ns=now, prompt_tokens=prompt, output_tokens=output)

    def __len__(self) -> int:
        return self.concurrency * ROUNDS


def read_points(path: Path) -> list[Point]:
    """The points with prefill and decode on the same GPUs."""
    points = []
    with path.open() as lines:
        for row in csv.DictReader(lines):
            if row["mode"] != "agg" or not row["tp_size"] or not row["batch_size"]:
                continue
            predicted = row["aic_predicted_ttft_ms"], row["aic_predicted_tpot_ms"]
            points.append(
                Point(
                    name=row["id"],
                    engine=row["backend"],
                    model=row["model_path"],
                    hardware=row["system"].removesuffix("_sxm"),
                    devices=int(float(row["tp_size"])),
                    weight_bits=8 if row["gemm_quant_mode"].startswith("fp8") else 16,
                    concurrency=int(float(row["batch_size"])),
                    prompt_tokens=int(row["isl"]),
                    output_tokens=int(row["osl"]),
                    ttft_ms=float(row["silicon_ttft_ms"]),
                    tpot_ms=float(row["silicon_tpot_ms"]),
                    predicted=(float(predicted[0]), float(predicted[1])) if all(predicted) else None,
                )
            )
    return points


@cache
def operators_of(model: str, hardware: str, devices: int, weight_bits: int) -> LayerTableCost:
    """The operator tables of a worker, without the host."""
    return operator_table_cost(
        load_model(MODELS[model]),
        load_hardware(hardware),
        Parallelism(devices),
        weight_bits=weight_bits,
        step_overhead_s=0.0,
    )


@cache
def simulated(
    point: Point, budget: tuple[BudgetName, int], shortest: float, host_us: float
) -> list[tuple[float, float]]:
    """``served`` with the operator tables and a constant host."""
    operators = operators_of(point.model, point.hardware, point.devices, point.weight_bits)
    return served(point, operators.with_host(Curve((1.0,), (host_us,)), "given"), budget, shortest)


def served(point: Point, cost: CostModel, budget: tuple[BudgetName, int], shortest: float) -> list[tuple[float, float]]:
    """(mean TTFT, mean TPOT) in milliseconds of the closed loop, with the first round left out or not."""
    model, hardware = load_model(MODELS[point.model]), load_hardware(point.hardware)
    capacity = kv_capacity_tokens(
        model, hardware, parallelism=Parallelism(point.devices), weights=GPU_WEIGHTS[point.weight_bits]
    )
    kind, tokens = budget
    worker = EngineConfig(
        cache=CacheConfig(
            num_blocks=capacity // BLOCK,
            block_size=BLOCK,
            watermark_blocks=0,
            enable_prefix_cache=False,
            admission="greedy",
        ),
        scheduler=SchedulerConfig(
            order="fcfs",
            budget=BudgetConfig(kind=kind, max_batched_tokens=tokens),
            max_num_seqs=point.concurrency,
        ),
        max_model_len=point.prompt_tokens + point.output_tokens,
    )
    clients = Clients(point.concurrency, point, shortest)
    scenario = Scenario(engine=worker, cost=cost, workload=clients, cluster=load_balancer())
    table = simulate(scenario).requests
    rows = sorted(table.completed_rows(), key=lambda row: (table.arrival_ns[row], table.number[row]))
    assert len(rows) == len(clients), "a request failed"
    means = []
    for skip in (0, 1):
        counted = rows[skip * point.concurrency :]
        tpots = [tpot for row in counted if (tpot := table.tpot_ns(row)) is not None]
        means.append((fmean(table.ttft_ns(row) for row in counted) / 1e6, fmean(tpots) / 1e6))
    return means


def predict(point: Point, setting: Setting) -> tuple[float, float]:
    """(TTFT, TPOT) in milliseconds."""
    host_us = setting.step_us[0] + setting.step_us[1] * point.concurrency
    ttft, tpot = simulated(point, setting.budget, setting.shortest, host_us)[setting.skip]
    return ttft + setting.front_ms[0] + setting.front_ms[1] * point.concurrency, tpot


def middle(errors: Iterable[float]) -> float:
    """Median of the absolute values."""
    return percentile(sorted(abs(error) for error in errors), 50)


def best_line(
    points: Sequence[Point], base: Sequence[float], measured: Sequence[float], steps: Sequence[tuple[float, float]]
) -> tuple[float, tuple[float, float]]:
    """(median error, (fixed, per client)) of the best addition to ``base``."""

    def error(pair: tuple[float, float]) -> float:
        return middle(
            (low + pair[0] + pair[1] * point.concurrency) / high - 1
            for point, low, high in zip(points, base, measured, strict=True)
        )

    return min((error(pair), pair) for pair in steps)


def fit(points: Sequence[Point], front_per_client: Sequence[float] = FRONT_MS_PER_CLIENT) -> Setting:
    """The setting with the least sum of median errors of TTFT and TPOT on these points."""
    host = [(a / 1000, b / 1000) for a, b in product(STEP_US, STEP_US_PER_CLIENT)]
    front = list(product(FRONT_MS, front_per_client))
    choices = []
    for budget, shortest, skip in product(BUDGETS, (1.0, SHORTEST), (0, 1)):
        setting = Setting(budget, shortest, skip)
        means = [predict(point, setting) for point in points]
        tpot, (a, b) = best_line(points, [mean[1] for mean in means], [point.tpot_ms for point in points], host)
        ttft, _ = best_line(points, [mean[0] for mean in means], [point.ttft_ms for point in points], front)
        choices.append((tpot + ttft, len(choices), replace(setting, step_us=(1000 * a, 1000 * b))))
    chosen = min(choices)[2]
    base = [predict(point, chosen)[0] for point in points]
    _, extra = best_line(points, base, [point.ttft_ms for point in points], front)
    return replace(chosen, front_ms=extra)


def plain(point: Point) -> Setting:
    """Nothing fitted."""
    return Setting(("whole", 8192) if point.engine == "sglang" else ("fixed", 8192))


def errors(name: str, points: Sequence[Point], setting_of: Callable[[Point], Setting]) -> Row:
    """Median errors of some points, and on those that aiconfigurator predicts also its own."""
    found = [(point, predict(point, setting_of(point))) for point in points]
    shared = [(point, ours) for point, ours in found if point.predicted]

    def percent(pairs: Iterable[float]) -> float | None:
        values = list(pairs)
        return round(100 * middle(values), 1) if values else None

    return {
        "rows": name,
        "points": len(found),
        "TPOT_%": percent(ours[1] / point.tpot_ms - 1 for point, ours in found),
        "TTFT_%": percent(ours[0] / point.ttft_ms - 1 for point, ours in found),
        "shared": len(shared),
        "shared_TPOT_%": percent(ours[1] / point.tpot_ms - 1 for point, ours in shared),
        "shared_TTFT_%": percent(ours[0] / point.ttft_ms - 1 for point, ours in shared),
        "aic_TPOT_%": percent(point.predicted[1] / point.tpot_ms - 1 for point, _ in shared if point.predicted),
        "aic_TTFT_%": percent(point.predicted[0] / point.ttft_ms - 1 for point, _ in shared if point.predicted),
    }


def grouped(points: Iterable[Point], key: Callable[[Point], str]) -> dict[str, list[Point]]:
    """Points by group, in order of the groups."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        groups[key(point)].append(point)
    return dict(sorted(groups.items()))


def group_of(point: Point) -> str:
    """Engine, model, GPU."""
    return f"{point.engine} {point.model.split('/')[-1]} {point.hardware}"


def generation(point: Point) -> str:
    """The engine of the catalogue that a point belongs to; "": of an unrecorded version, or impossible (see above)."""
    if point.engine == "vllm":
        return "vllm-0.12" if point.model == "Qwen/Qwen3-32B" else ""
    return "" if point.model == "meta-llama/Meta-Llama-3.1-70B" else point.engine


def split_rows(
    name: str,
    train: Sequence[Point],
    test: Sequence[Point],
    key: Callable[[Point], str],
    front_per_client: Sequence[float] = FRONT_MS_PER_CLIENT,
) -> tuple[list[Row], list[Row]]:
    """Errors of one split, and the settings that were chosen."""
    settings = {group: fit(points, front_per_client) for group, points in grouped(train, key).items()}
    known = [point for point in test if key(point) in settings]

    def setting_of(point: Point) -> Setting:
        return settings[key(point)]

    rows = [
        errors(f"{name}: training", train, setting_of),
        errors(f"{name}: tested, fitted", known, setting_of),
        errors(f"{name}: tested, plain", known, plain),
    ]
    rows += [
        errors(f"{name}: tested, {group}", points, setting_of) for group, points in grouped(known, group_of).items()
    ]
    chosen = [{"split": name, "group": group, **vars(setting)} for group, setting in settings.items()]
    return rows, chosen


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("folder", type=Path)


def main(options: argparse.Namespace) -> None:
    """Both splits."""
    points = read_points(options.folder / "aiconfigurator" / "aic_0.12.0_predictions_dense_h100_h200.csv")
    rows = [errors("all, plain", points, plain)]
    rows.append(errors("all, plain, first round counted", points, lambda point: replace(plain(point), skip=0)))
    rows += [errors(f"plain, {group}", found, plain) for group, found in grouped(points, group_of).items()]
    even, odd = [p for p in points if p.is_even], [p for p in points if not p.is_even]
    known = [[p for p in half if generation(p)] for half in (even, odd)]
    qwen = [p for p in points if p.model.startswith("Qwen")]
    llama = [p for p in points if not p.model.startswith("Qwen")]
    settings = []
    for found, chosen in (
        split_rows("engine", *known, generation, (0.0,)),
        split_rows("half", even, odd, group_of),
        split_rows("model", qwen, llama, lambda point: point.engine),
    ):
        rows += found
        settings += chosen
    report("served points (R11)", rows, options.json, settings=settings)
