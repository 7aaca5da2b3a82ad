"""DistServe's figure 8 (Zhong et al., OSDI 2024), from its own step-time profiles: R5 of reproduce_papers.py.

Share of requests that meet TTFT and TPOT, by rate per GPU: OPT-13B, 66B and 175B on A100, ShareGPT, each with the
authors' parallelism, limits and size of run (100, 25 and 25 requests a GPU; points here are means over enough runs for
NUM_REQUESTS). Surrogates: the lengths (ShareGPT under another tokenizer; conversations of at most 2,048 tokens,
reweighted so that their means are the paper's 755.5 and 200.3; "unweighted" takes them as they are); the profile of
OPT-175B, which was not published, extrapolated from the fits of OPT-66B (see ``opt_175b``).

DistServe's two pools run as two simulations: prefill workers answer with one token; then decode workers whose cost
model prices a prompt at nothing (its KV came over a link) take each request when its KV is there. The pools do not
hold each other up, and nothing waits for room on the other side. A pipeline of p stages is p workers that each take a
whole pass and have a share of its memory.
"""

import csv
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.slo import NS_PER_S, Slo
from diptych.control.step import SchedulerOutput
from diptych.report.plots import Line, LineChart, Scale
from diptych.simulation.costs.cost_model import DecodeLine
from diptych.simulation.costs.profiled import FittedLaw, ProfiledCost, ProfileInfo, load_profile
from diptych.simulation.results import RequestTable
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.workload.distributions import Stream, exp
from diptych.workload.spec import RequestSpec

Row = dict[str, Any]
Lengths = list[tuple[int, int]]  # (prompt, answer) in tokens
Curve = list[tuple[float, float]]  # (rate per GPU, attainment in percent)
BLOCK = 16
NUM_REQUESTS = 2000  # per point
SEED = 1


Requests = tuple[RequestSpec, ...]


def poisson(lengths: Lengths, rate: float, seed: int = SEED) -> Requests:
    """Requests of these lengths at exponential gaps; every rate stretches the same gaps."""
    gaps = Stream(seed, "arrivals")
    times = accumulate(gaps.exponential() for _ in lengths)
    return tuple(
        RequestSpec(arrival_ns=round(time / rate * NS_PER_S), prompt_tokens=prompt, output_tokens=output)
        for time, (prompt, output) in zip(times, lengths, strict=True)
    )


def worker(kv_tokens: int, budget: BudgetConfig, max_num_seqs: int) -> EngineConfig:
    """First come, first served, in blocks of 16 tokens, nothing shared."""
    return EngineConfig(
        CacheConfig(kv_tokens // BLOCK, block_size=BLOCK, enable_prefix_cache=False),
        SchedulerConfig(order="fcfs", budget=budget, max_num_seqs=max_num_seqs, max_waiting=1_000_000),
        max_model_len=32_768,
    )


@dataclass(frozen=True)
class Setting:
    """One panel of figure 8. prefill, decode: (tensor parallel, pipeline stages) of DistServe's two instances.

    requests_per_gpu: of one run, as published.
    """

    model: str
    slo: Slo
    vllm_tp: int
    prefill: tuple[int, int]
    decode: tuple[int, int]
    requests_per_gpu: int
    rates: tuple[float, ...]

    @property
    def distserve_gpus(self) -> int:
        """GPUs of one prefill and one decode instance."""
        return self.prefill[0] * self.prefill[1] + self.decode[0] * self.decode[1]


def seconds(ttft: float, tpot: float) -> Slo:
    """Objectives given in seconds."""
    return Slo(ttft_ns=round(ttft * NS_PER_S), tpot_ns=round(tpot * NS_PER_S))


RATES_13B = (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.25, 2.5, 3)
RATES_66B = (0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125)
RATES_175B = tuple(i / 32 for i in range(1, 13))
SETTINGS = (
    Setting("opt-13b", seconds(0.25, 0.1), 1, (2, 1), (1, 1), 100, RATES_13B),
    Setting("opt-66b", seconds(2.5, 0.15), 4, (4, 1), (2, 2), 25, RATES_66B),
    Setting("opt-175b", seconds(4.0, 0.2), 8, (3, 3), (4, 3), 25, RATES_175B),
)
KV_TOKENS_175B = {(8, 1): 59_520, (4, 3): 126_160, (3, 3): 76_192}  # max_num_tokens.csv, by (tp, pp)
PUBLISHED_GAIN = {"opt-13b": 4.60, "opt-66b": 2.75, "opt-175b": 1.99}
PAPER_MEANS = (755.5, 200.3)  # ShareGPT: prompt and answer
CONTEXT = 2048  # of OPT
NVLINK_BYTES_PER_S = 300e9  # one way; DistServe sends between GPUs of one node
PARAMETERS_RATIO = 174.6 / 65.7  # OPT-175B over OPT-66B
WIDTH_RATIO = (96 * 12_288) / (64 * 9_216)  # layers times hidden size: attention, activations, all-reduce
LAYERS_RATIO = 96 / 64
KV_BYTES_175B = 2 * 2 * 96 * 12_288


def profile(engine: str, model: str, tp: int) -> ProfiledCost:
    """The profile of this model, or what stands in for it."""
    if model == "opt-175b":
        return opt_175b(engine, tp)
    return load_profile(f"distserve-{engine}-{model}-a100-tp{tp}")


def opt_175b(engine: str, tp: int) -> ProfiledCost:
    """OPT-175B from the fits of OPT-66B at 2, 3, 4 and 8 GPUs.

    Intercepts and costs per token are split by least squares over the GPUs into a part that is shared out and one that
    is not, x + y / tp. y is work on weights: times the ratio of parameters. x is work per layer: of an intercept, times
    the ratio of layers; of a token, times that of layers and hidden size, like attention (context, squares).
    """
    fits = {n: load_profile(f"distserve-{engine}-opt-66b-a100-tp{n}") for n in (2, 3, 4, 8)}
    laws = {n: fit.law for n, fit in fits.items() if isinstance(fit.law, FittedLaw)}

    def scaled(part: Callable[[FittedLaw], tuple[int, int, int]], attention: int) -> tuple[int, int, int]:
        values = []
        for index in range(3):
            if index == attention:
                values.append(round(part(laws[tp])[index] * WIDTH_RATIO))
                continue
            fixed, shared = line([(1 / n, part(law)[index]) for n, law in laws.items()])
            fixed_ratio = LAYERS_RATIO if index == 0 else WIDTH_RATIO
            values.append(round(fixed * fixed_ratio + shared / tp * PARAMETERS_RATIO))
        return values[0], values[1], values[2]

    law = FittedLaw(
        scaled(lambda one: one.prefill, 2),
        scaled(lambda one: one.decode_small, 1),
        scaled(lambda one: one.decode_large, 1),
        laws[tp].threshold,
    )
    limits = {pp: tokens for (of_tp, pp), tokens in KV_TOKENS_175B.items() if of_tp == tp}
    name = f"{engine}-opt-175b-extrapolated-tp{tp}"
    info = replace(fits[tp].info, name=name, model="opt-175b", kv_tokens=limits, kv_bytes_per_token=KV_BYTES_175B)
    return ProfiledCost(info, law)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: (value at 0, slope)."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def share_gpt(folder: Path) -> Lengths:
    """ShareGPT's lengths that fit in OPT's context."""
    path = folder / "sarathi-serve" / "traces" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
    with path.open() as stream:
        rows = [(int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in csv.DictReader(stream)]
    return [(prompt, output) for prompt, output in rows if prompt + output <= CONTEXT and output > 0]


def draw(lengths: Lengths, weights: Sequence[float], count: int) -> Lengths:
    """``count`` of the lengths, with replacement."""
    edges = list(accumulate(weights))
    uniform = Stream(SEED, "lengths").uniform
    return [lengths[min(bisect_right(edges, uniform() * edges[-1]), len(lengths) - 1)] for _ in range(count)]


def weights_for_means(lengths: Lengths, means: tuple[float, float]) -> list[float]:
    """Weights exp(u * prompt + v * answer) under which the means are these (Newton's method): of all weights that
    reach them, the ones of least relative entropy."""
    u = v = 0.0
    weights: list[float] = []
    for _ in range(60):
        weights = [exp(u * (p - means[0]) + v * (a - means[1])) for p, a in lengths]
        total = sum(weights)
        gp = sum(w * (p - means[0]) for w, (p, _) in zip(weights, lengths, strict=True)) / total
        ga = sum(w * (a - means[1]) for w, (_, a) in zip(weights, lengths, strict=True)) / total
        if abs(gp) + abs(ga) < 1e-6:
            break
        pp = sum(w * (p - means[0]) ** 2 for w, (p, _) in zip(weights, lengths, strict=True)) / total - gp * gp
        aa = sum(w * (a - means[1]) ** 2 for w, (_, a) in zip(weights, lengths, strict=True)) / total - ga * ga
        pa = sum(w * (p - means[0]) * (a - means[1]) for w, (p, a) in zip(weights, lengths, strict=True)) / total
        pa -= gp * ga
        determinant = pp * aa - pa * pa
        u -= (aa * gp - pa * ga) / determinant
        v -= (pp * ga - pa * gp) / determinant
    return weights


def vllm_met(setting: Setting, lengths: Lengths, rate: float, seed: int) -> int:
    """How many requests of a run are within both objectives: one unified instance, prefill first."""
    cost = profile("vllm", setting.model, setting.vllm_tp)
    budget = BudgetConfig("whole", max_batched_tokens=16_384)
    table = pool(cost, 1, poisson(lengths, rate, seed), budget, max_num_seqs=1024)
    return sum(is_met(setting.slo, table.ttft_ns(row), table.tpot_ns(row)) for row in table.completed_rows())


def distserve_met(setting: Setting, lengths: Lengths, rate: float, seed: int) -> int:
    """The same of one prefill instance and one decode instance."""
    arrivals = poisson(lengths, rate, seed)
    tp, stages = setting.prefill
    cost = profile("distserve", setting.model, tp)
    first = tuple(replace(spec, output_tokens=1) for spec in arrivals)
    prefills = pool(cost, stages, first, BudgetConfig("whole", max_batched_tokens=8192), max_num_seqs=128)
    ttft = {number: prefills.ttft_ns(row) for row, number in enumerate(prefills.number)}
    handoffs = []
    for number, spec in enumerate(arrivals):
        transfer_ns = round(spec.prompt_tokens * cost.info.kv_bytes_per_token / NVLINK_BYTES_PER_S * NS_PER_S)
        handoffs.append((spec.arrival_ns + ttft[number] + transfer_ns, transfer_ns, number, spec))
    handoffs.sort(key=lambda handoff: (handoff[0], handoff[2]))
    tp, stages = setting.decode
    received = DecodeOnly(profile("distserve", setting.model, tp))
    second = tuple(replace(spec, arrival_ns=ready_ns) for ready_ns, _, _, spec in handoffs)
    decodes = pool(received, stages, second, BudgetConfig("whole", max_batched_tokens=65_536), max_num_seqs=1024)
    met = 0
    for row in decodes.completed_rows():
        _, transfer_ns, number, spec = handoffs[decodes.number[row]]
        later = spec.output_tokens - 1
        tpot = (transfer_ns + decodes.e2e_ns(row)) // later if later else None
        met += is_met(setting.slo, ttft[number], tpot)
    return met


@dataclass(frozen=True)
class DecodeOnly:
    """The cost model of a worker to which KV is sent: taking in a prompt costs nothing, decode steps as profiled."""

    cost: ProfiledCost
    name: str = "decode only"

    @property
    def info(self) -> ProfileInfo:
        """That of the profile."""
        return self.cost.info

    def decode_line(self, num_seqs: int, context: int) -> DecodeLine:
        """See CostModel."""
        return self.cost.decode_line(num_seqs, context)

    def step_ns(self, output: SchedulerOutput) -> int:
        """See CostModel."""
        return 1 if output.prefills else self.cost.step_ns(output)


def pool(
    cost: ProfiledCost | DecodeOnly, stages: int, requests: Requests, budget: BudgetConfig, max_num_seqs: int
) -> RequestTable:
    """One instance of ``stages`` pipeline stages."""
    config = worker(cost.info.kv_tokens[stages] // stages, budget, max_num_seqs)
    return simulate(Scenario(engine=config, cost=cost, workload=requests, num_workers=stages)).requests


def is_met(slo: Slo, ttft_ns: int, tpot_ns: int | None) -> bool:
    """Both objectives."""
    assert slo.ttft_ns is not None and slo.tpot_ns is not None
    return ttft_ns <= slo.ttft_ns and (tpot_ns is None or tpot_ns <= slo.tpot_ns)


# -------------------------------------------------------------------------------------------------------- comparison


def attainment(setting: Setting, system: str, lengths: Lengths, rate: float) -> float:
    """Percent of requests within both objectives, over runs of the published size."""
    gpus, met = (setting.vllm_tp, vllm_met) if system == "vLLM" else (setting.distserve_gpus, distserve_met)
    size = setting.requests_per_gpu * gpus
    runs = [lengths[at : at + size] for at in range(0, -(-NUM_REQUESTS // size) * size, size)]
    return 100 * sum(met(setting, run, rate * gpus, seed) for seed, run in enumerate(runs)) / (len(runs) * size)


def crossing(curve: Curve, target: float = 90.0) -> float | None:
    """The first rate at which the curve falls through the target; None when it does not."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y0 >= target > y1:
            return x0 + (y0 - target) / (y0 - y1) * (x1 - x0)
    return None


def difference(ours: Curve, theirs: Curve) -> float:
    """Mean absolute difference in points of attainment, at the published rates; ours linear between its own."""
    gaps = []
    for rate, value in theirs:
        (x0, y0), (x1, y1) = next(pair for pair in pairwise(ours) if pair[0][0] <= rate <= pair[1][0])
        gaps.append(abs(y0 + (rate - x0) / (x1 - x0) * (y1 - y0) - value))
    return sum(gaps) / len(gaps)


def published(folder: Path) -> dict[tuple[str, str], Curve]:
    """The digitised curves, by (model, system)."""
    curves: dict[tuple[str, str], Curve] = {}
    with (folder / "distserve" / "fig8_attainment_digitised.csv").open() as stream:
        for row in csv.DictReader(stream):
            if row["x_kind"] == "per_gpu_rate" and row["panel"].startswith("fig8_rate_") and row["system"] != "MII":
                model = row["panel"].split("_")[2].replace("opt", "opt-")
                curves.setdefault((model, row["system"]), []).append(
                    (float(row["x"]), float(row["slo_attainment_pct"]))
                )
    return {key: sorted(curve) for key, curve in curves.items()}


def compare(folder: Path) -> tuple[list[Row], dict[str, Any], dict[tuple[str, str, str], Curve]]:
    """R5: rates at 90 % attainment, ours and published; the curves as data, and to draw."""
    every = share_gpt(folder)
    chosen = {"reweighted": weights_for_means(every, PAPER_MEANS), "unweighted": [1.0] * len(every)}
    truth = published(folder)
    curves: dict[tuple[str, str, str], Curve] = {}
    rows: list[Row] = []
    for kind, weights in chosen.items():
        lengths = draw(every, weights, 2 * NUM_REQUESTS)
        for setting in SETTINGS:
            rates: dict[str, float | None] = {}
            for system in ("vLLM", "DistServe"):
                curve = [(rate, attainment(setting, system, lengths, rate)) for rate in setting.rates]
                curves[setting.model, system, kind] = curve
                ours, theirs = crossing(curve), crossing(truth[setting.model, system])
                if theirs is None:  # its point above 90 % lies under another marker
                    theirs = (crossing(truth[setting.model, "DistServe"]) or 0.0) / PUBLISHED_GAIN[setting.model]
                rates[system] = ours
                error = None if ours is None else round(100 * (ours / theirs - 1), 1)
                rows.append(
                    {
                        "target": "R5",
                        "model": setting.model,
                        "system": system,
                        "lengths": kind,
                        "rate at 90 %": None if ours is None else round(ours, 4),
                        "published": round(theirs, 4),
                        "error_%": error,
                        "goal (25 %)": error is not None and abs(error) <= 25,
                        "points off": round(difference(curve, truth[setting.model, system]), 1),
                        "gain": None,
                        "published gain": None,
                    }
                )
            low, high = rates["vLLM"], rates["DistServe"]
            rows[-1]["gain"] = round(high / low, 2) if low and high else None
            rows[-1]["published gain"] = PUBLISHED_GAIN[setting.model]
    data = {"/".join(key): [(x, round(y, 2)) for x, y in curve] for key, curve in curves.items()}
    for (model, system), curve in truth.items():
        curves[model, system, "published"] = curve
    return rows, {"figure 8": data}, curves


STYLE = (
    "svg{background:#fff}text{font:12px sans-serif;fill:#444}.end{text-anchor:end}.middle{text-anchor:middle}"
    ".grid{stroke:#ddd}.axis{stroke:#444}.line{fill:none;stroke-width:2}.chart .name{fill:#111;font-weight:600}"
    ".v{stroke:#b4610f}.d{stroke:#1f7393}.line.p{stroke-dasharray:5 4}circle.v{fill:#b4610f}circle.d{fill:#1f7393}"
)


def figure(curves: dict[tuple[str, str, str], Curve]) -> str:
    """The three panels, side by side: published points dashed, ours (reweighted lengths) solid."""
    panels = []
    for index, setting in enumerate(SETTINGS):
        lines = []
        for system, style in (("vLLM", "v"), ("DistServe", "d")):
            lines.append(Line(f"{system}, simulated", curves[setting.model, system, "reweighted"], style))
            lines.append(Line(f"{system}, published", curves[setting.model, system, "published"], f"{style} p", True))
        x = Scale(0.0, setting.rates[-1], "requests/s per GPU")
        y = Scale(0.0, 100.0, f"{setting.model}: % of requests within both objectives", ticks=(0, 25, 50, 75, 90, 100))
        chart = LineChart(setting.model, "", "Attainment by rate.", lines, x, y).svg()
        panels.append(chart.replace("<svg ", f'<svg x="{440 * index}" width="440" height="264" ', 1))
    keys = (
        ("v", "vLLM, simulated"),
        ("v p", "vLLM, published"),
        ("d", "DistServe, simulated"),
        ("d p", "DistServe, published"),
    )
    legend = "".join(
        f'<path class="line {style}" d="M{60 + 240 * i} 280h36"/><text x="{104 + 240 * i}" y="284">{words}</text>'
        for i, (style, words) in enumerate(keys)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1320 296"><style>{STYLE}</style>'
        f"{''.join(panels)}{legend}</svg>\n"
    )
