"""Measured runs of vLLM, reproduced from layer profiles.

    python benchmarks/twin.py runs DATA_FOLDER [--json reproduce_vllm_runs.json] [--only R10]

Each run is simulated with the layer table of its GPU, model and engine version; no number of a table was fitted to an
end-to-end run. vLLM's scheduler is first come, first served with decodes first and a fixed token budget: here the order
``fcfs`` with the budget ``fixed``, no caps, blocks of 16 tokens.

R7, R9: LLMServingSim's ISPASS'26 artifact, Llama-3.1-70B on four H100, 300 ShareGPT requests at 10/s. The version of
vLLM and its limits are not recorded: the defaults of that time are taken, 256 sequences and 2,048 tokens a step. TTFT
counts from the arrival in the workload to the end of the step that samples the token. Three costs, because the
artifact's profile holds neither collectives nor fused norms nor the host: "eager" adds measured all-reduces to the
profile as it is; "fused" takes norms, rotary embedding and attention from measurements of vLLM's kernels instead;
"sync" is "fused" behind the host of a synchronous engine (--engine sync-2024), and is what such an engine should take.
One more row shows what the unrecorded token budget matters: 512 tokens a step, an older default (from 2,048 up nothing
changes). SM of R9 is a mixture of experts, Mixtral-8x7B on the same GPUs, priced by measured operators.
R8, and R9's disaggregated run (PDD): one prefill and one decode instance on NVLink. TTFT is stamped on the decode side,
whose first token comes with its own first step. Transfers at the link's speed cannot explain the measured times: in the
measured system the engines stand still meanwhile, on both sides. How long for each request is the one constant; it is
found from the TPOT of R8 alone, and R8's TTFT and throughput and the whole of R9's run are predicted with it.
R9 A6000: the same workload on Llama-3.1-8B on A6000, with the KV memory that the artifact's configurations state. R10:
vLLM 0.19 on an RTX 4090 and an RTX PRO 6000, logs of single requests. Arrivals are the logged ones. The log counts from
the moment the engine takes a request in, between two steps, so its TTFT and latency lack the wait for the step under
way when the request arrives; "from arrival" adds the logged gap back.

Where DATA_FOLDER holds no measurement of a run (the curves of the A6000, Qwen3 on RTX PRO 6000) its rows say what the
simulation gives and nothing else; put the files where the published repository has them, and the rows get errors.

The worker of Diptych admits a prompt when the expected peak of all admitted fits; vLLM when the prompt fits now. Where
memory is short, ``greedy`` rows repeat the run with an expectation of nothing to come, which is vLLM's rule. ``skew``
rows add the measured effect of unequal contexts, as ``diptych simulate`` does, with longest over mean context estimated
from the lengths of the workload.
"""

import argparse
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from common import report

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.events import FirstToken, StepFinished
from diptych.control.step import SchedulerOutput
from diptych.report.statistics import percentile
from diptych.simulation.context_skew import context_skew
from diptych.simulation.costs.cost_choice import choose_cost
from diptych.simulation.costs.cost_model import CostModel, DecodeLine
from diptych.simulation.costs.layer_tables import load_layer_table
from diptych.simulation.fleet.pools import Pools
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.results import SimulationResult
from diptych.simulation.run import simulate, simulate_with_log
from diptych.simulation.scenario import Scenario, load_balancer
from diptych.workload.spec import RequestSpec

Row = dict[str, Any]
BLOCK = 16
LLAMA_70B, LLAMA_8B = "llama-3.1-70b", "llama-3.1-8b"
H100_COSTS = {  # cost and engine of choose_cost
    "eager": ("h100-llama-3.1-70b-tp4-eager", None),
    "fused": ("h100-llama-3.1-70b-tp4", None),
    "sync": ("h100-llama-3.1-70b-tp4", "sync-2024"),
}
A6000_COSTS = {
    "eager": ("a6000-llama-3.1-8b-eager", None),
    "fused": ("a6000-llama-3.1-8b", None),
    "sync": ("a6000-llama-3.1-8b", "sync-2024"),
}
TRANSFER_NS = 16_000_000  # what R8 finds, used for R9's disaggregated run
H100_BLOCKS = 40_000  # not binding: 160 GB of 320 hold the weights, a block takes 5.2 MB
A6000_BLOCKS = 11_400  # 40 GB, as configured, without 16 GB of weights; a block takes 2.1 MB


@dataclass(frozen=True)
class Cluster:
    """The machines of one set of R9's curves. costs: cost and engine by name."""

    folder: str
    model: str
    hardware: str
    devices: int
    num_blocks: int
    costs: Mapping[str, tuple[str, str | None]]

    def cost(self, name: str) -> CostModel:
        """The cost model of one of ``costs``."""
        table, engine = self.costs[name]
        parallelism = Parallelism(self.devices)
        return choose_cost(table, model=self.model, hardware=self.hardware, parallelism=parallelism, engine=engine).cost

    @property
    def engine(self) -> EngineConfig:
        """One instance of vLLM."""
        return vllm_engine_config(self.num_blocks, 256, 2048, 131072)


H100 = Cluster("H100", LLAMA_70B, "h100", 4, H100_BLOCKS, H100_COSTS)
H100_MIXTURE = Cluster("H100", "mixtral-8x7b", "h100", 4, H100_BLOCKS, {"sync": ("operators", "sync-2024")})
A6000 = Cluster("A6000", LLAMA_8B, "a6000", 1, A6000_BLOCKS, A6000_COSTS)


Requests = tuple[RequestSpec, ...]


def read_workload(path: Path, arrivals_ns: Sequence[int] | None = None, *, shared: bool = True) -> Requests:
    """Lengths and hashes of a workload; ``arrivals_ns`` replaces its arrival times."""
    specs = []
    with gzip.open(path, "rt") as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            specs.append(
                RequestSpec(
                    arrival_ns=row["arrival_time_ns"] if arrivals_ns is None else arrivals_ns[number],
                    prompt_tokens=row["input_toks"],
                    output_tokens=row["output_toks"],
                    hash_ids=tuple(row["hash_ids"]) if shared else (),
                    hash_block_tokens=BLOCK,
                )
            )
    return tuple(specs)


def vllm_engine_config(num_blocks: int, max_num_seqs: int, max_batched_tokens: int, max_model_len: int) -> EngineConfig:
    """vLLM's scheduler in our words."""
    return EngineConfig(
        cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK, watermark_blocks=0),
        scheduler=SchedulerConfig(
            order="fcfs",
            budget=BudgetConfig(kind="fixed", max_batched_tokens=max_batched_tokens),
            max_num_seqs=max_num_seqs,
        ),
        max_model_len=max_model_len,
    )


def row(run: str, metric: str, measured: float | None, simulated: float, goal: str) -> Row:
    """One comparison, or what the simulation gives where nothing was measured."""
    if measured is None:
        return {"run": run, "metric": metric, "simulated": round(simulated, 3), "goal": goal}
    return {
        "run": run,
        "metric": metric,
        "measured": round(measured, 3),
        "simulated": round(simulated, 3),
        "error_%": round(100 * (simulated / measured - 1), 2),
        "goal": goal,
    }


def mean_ms(result: SimulationResult) -> tuple[float, float, float]:
    """Mean TTFT, TPOT and latency in milliseconds."""
    table = result.requests
    rows = table.completed_rows()
    assert len(rows) == len(table), "a request failed"
    tpots = [tpot for index in rows if (tpot := table.tpot_ns(index)) is not None]
    return (
        fmean(table.ttft_ns(index) for index in rows) / 1e6,
        fmean(tpots) / 1e6,
        fmean(table.e2e_ns(index) for index in rows) / 1e6,
    )


def tsv(path: Path) -> list[list[str]]:
    """Rows of a table with tabs, without its header."""
    return [line.split("\t") for line in path.read_text().splitlines()[1:] if line]


def figure_8(folder: Path) -> list[Row]:
    """R7: one instance, no prefix caching."""
    evaluation = folder / "llmservingsim/ispass26"
    measured = next(
        line[1:] for line in tsv(evaluation / "evaluation/figure_8/reference/SD_latency.tsv") if line[0] == "vLLM"
    )
    workload = read_workload(evaluation / "dataset/sharegpt_req300_rate10_llama.lens.jsonl.gz", shared=False)
    tokens = sum(spec.output_tokens for spec in workload)
    rows = []
    for name, cost, max_batched_tokens in (
        *((name, name, 2048) for name in H100_COSTS),
        ("sync, 512 a step", "sync", 512),
    ):
        worker = vllm_engine_config(H100_BLOCKS, 256, max_batched_tokens, 131072)
        result = simulate(Scenario(engine=worker, cost=H100.cost(cost), workload=workload, cluster=load_balancer()))
        ttft, tpot, _ = mean_ms(result)
        rows += [
            row(f"R7 SD {name}", "output tokens/s", float(measured[0]), tokens / (result.duration_ns / 1e9), "3 %"),
            row(f"R7 SD {name}", "TTFT mean (ms)", float(measured[1]), ttft, "8 %"),
            row(f"R7 SD {name}", "TPOT mean (ms)", float(measured[2]), tpot, "3 %"),
        ]
    return rows


@dataclass(frozen=True)
class BlockingTransfers:
    """A cost model in which each handoff also stops the engine for a while: the prefill worker in the step that ends
    the prompt, the decode worker in the step that takes the request over."""

    cost: CostModel
    transfer_ns: int
    name: str = "with blocking transfers"

    def decode_line(self, num_seqs: int, context: int) -> DecodeLine:
        """A step of decodes alone, as the cost model inside has it."""
        return self.cost.decode_line(num_seqs, context)

    def step_ns(self, output: SchedulerOutput) -> int:
        """The step's own time, and a pause for each handoff in it."""
        transfers = len(output.resumed) + sum(chunk.is_last for chunk in output.prefills)
        return self.cost.step_ns(output) + transfers * self.transfer_ns


def disaggregated(cluster: Cluster, workload: Requests, cost: str, transfer_ns: int, **changes: Any) -> Scenario:
    """One prefill and one decode instance on NVLink."""
    kv_bytes = load_model(cluster.model).kv_bytes_per_token()
    pools = Pools(num_prefill=1, num_decode=1, kv_bytes_per_token=kv_bytes, link="nvlink4")
    blocking = BlockingTransfers(cluster.cost(cost), transfer_ns)
    return Scenario(
        engine=cluster.engine, cost=blocking, workload=workload, pools=pools, cluster=load_balancer(), **changes
    )


def stamped_on_decode(result: SimulationResult, transfer_ns: int) -> tuple[float, float]:
    """Mean TTFT and TPOT in milliseconds as a client of the decode instance sees them: its first token is the one of
    its own first step, which holds the transfer of the request, so the tokens that it counts are one fewer."""
    table = result.requests
    ttft, tpot = [], []
    for index in table.completed_rows():
        later = table.output_tokens[index] - 1
        first_ns = transfer_ns + (table.decode_ns[index] - transfer_ns) / max(1, later)
        ttft.append(table.ttft_ns(index) + table.handoff_ns[index] + first_ns)
        if later > 1:
            tpot.append((table.decode_ns[index] - first_ns) / (later - 1))
    return fmean(ttft) / 1e6, fmean(tpot) / 1e6


def figure_8_disaggregated(folder: Path) -> list[Row]:
    """R8: one prefill and one decode instance; the transfer constant is found from TPOT alone."""
    evaluation = folder / "llmservingsim/ispass26"
    lines = tsv(evaluation / "evaluation/figure_8/reference/PDD_latency.tsv")
    measured = [float(value) for value in next(line[1:] for line in lines if line[0] == "vLLM")]
    workload = read_workload(evaluation / "dataset/sharegpt_req300_rate10_llama.lens.jsonl.gz", shared=False)
    tokens = sum(spec.output_tokens for spec in workload)
    rows = []
    results = {ms: simulate(disaggregated(H100, workload, "sync", ms * 1_000_000)) for ms in range(0, 41)}
    stamped = {ms: stamped_on_decode(result, ms * 1_000_000) for ms, result in results.items()}
    best = min(stamped, key=lambda ms: abs(stamped[ms][1] - measured[2]))
    for run, transfer_ms in (("free transfers", 0), (f"{best} ms a transfer, from TPOT", best)):
        result = results[transfer_ms]
        ttft, tpot = stamped[transfer_ms]
        rows += [
            row(f"R8 PDD {run}", "output tokens/s", measured[0], tokens / (result.duration_ns / 1e9), "10 %"),
            row(f"R8 PDD {run}", "TTFT mean, decode side (ms)", measured[1], ttft, "10 %"),
            row(f"R8 PDD {run}", "TPOT mean (ms)", measured[2], tpot, "10 %" if not transfer_ms else "fitted"),
        ]
        rows.append({"run": f"R8 PDD {run}", "metric": "TTFT mean, prefill side (ms)", "simulated": mean_ms(result)[0]})
    return rows


def tokens_per_second(scenario: Scenario, seconds: int) -> list[float]:
    """Output tokens in each second of the run; a token counts when its step ends."""
    _, log = simulate_with_log(scenario)
    assert log is not None
    counts = [0.0] * (seconds + 1)

    def add(end_ns: int, number: int) -> None:
        counts[min(seconds, -(-end_ns // 1_000_000_000))] += number

    for _, event in log:
        if isinstance(event, FirstToken):
            add(event.time_ns, 1)
        elif isinstance(event, StepFinished):  # the log joins equal decode steps in a row: spread them evenly
            length = (event.end_ns - event.start_ns) / event.num_steps
            for number in range(1, event.num_steps + 1):
                add(round(event.start_ns + number * length), event.num_decodes)
    return counts


def figure_5(folder: Path) -> list[Row]:
    """R9: tokens per second over the run, one instance with prefix caching, two instances in turn, one prefill and one
    decode instance, and a mixture of experts."""
    dense = "sharegpt_req300_rate10_llama"
    rows = []
    for cluster, shape, dataset in (
        *((H100, shape, dense) for shape in ("SD+PC", "MD", "PDD")),
        (H100_MIXTURE, "SM", "sharegpt_req300_rate10_mixtral"),
        *((A6000, shape, dense) for shape in ("SD+PC", "MD", "PDD")),
    ):
        workload = read_workload(folder / f"llmservingsim/ispass26/dataset/{dataset}.lens.jsonl.gz")
        rows += [curve_row(folder, cluster, shape, name, workload) for name in cluster.costs]
    return rows


def curve_row(folder: Path, cluster: Cluster, shape: str, name: str, workload: Requests) -> Row:
    """One curve beside the measured one; the error is the mean difference as a share of the mean."""
    if shape == "PDD":
        scenario = disaggregated(cluster, workload, name, TRANSFER_NS, record_events=True)
    else:
        scenario = Scenario(
            engine=cluster.engine,
            cost=cluster.cost(name),
            workload=workload,
            num_workers=2 if shape == "MD" else 1,
            cluster=load_balancer("round_robin"),
            record_events=True,
        )
    run, metric = f"R9 {cluster.folder} {shape} {name}", "tokens/s, mean; error: mean |difference|"
    figure = folder / "llmservingsim/ispass26/evaluation/figure_5"
    path = figure / cluster.folder / f"reference/{shape}_throughput.tsv"
    if not path.exists():
        simulated = tokens_per_second(scenario, 200)
        last = max(index for index, value in enumerate(simulated) if value) + 1
        return {**row(run, metric, None, fmean(simulated[:last]), "10 %"), "series_simulated": simulated[:last]}
    measured = [float(line[1]) for line in tsv(path)]
    simulated = tokens_per_second(scenario, len(measured) + 30)
    padded = [*measured, *(0.0 for _ in simulated[len(measured) :])]
    difference = sum(abs(ours - theirs) for ours, theirs in zip(simulated, padded, strict=True))
    return {
        **row(run, metric, fmean(measured), sum(simulated) / len(measured), "10 %"),
        "error_%": round(100 * difference / sum(measured), 2),
        "series_measured": measured,
        "series_simulated": simulated[: len(measured)],
    }


@dataclass(frozen=True)
class LoggedRun:
    """A run of vLLM 0.19 whose requests may be logged. num_blocks: of 16 tokens. groups: of devices with a scheduler of
    their own, which here is one of twice the limits."""

    hardware: str
    model: str
    table: str
    workload: str
    num_blocks: int
    max_num_seqs: int
    groups: int = 1

    @property
    def engine(self) -> EngineConfig:
        """Its scheduler."""
        return vllm_engine_config(self.num_blocks, self.groups * self.max_num_seqs, self.groups * 2048, 32768)

    @property
    def name(self) -> str:
        """What its rows are called."""
        return f"R10 {self.hardware}" if self.model == "Llama-3.1-8B" else f"R10 {self.table}"


LLAMA_REQUESTS = "sharegpt-llama-3.1-8b-300-sps10"
LOGGED_RUNS = (
    LoggedRun("RTX4090", "Llama-3.1-8B", "rtx4090-llama-3.1-8b", LLAMA_REQUESTS, 2588 - 1, 256),  # one is for padding
    # not recorded below; 128 sequences never fill so many
    LoggedRun("RTXPRO6000", "Llama-3.1-8B", "rtxpro6000-llama-3.1-8b", LLAMA_REQUESTS, 30_000, 128),
    LoggedRun("RTXPRO6000", "Qwen3-32B", "rtxpro6000-qwen3-32b-tp2", "sharegpt-qwen3-32b-300-sps10", 30_000, 128),
    LoggedRun("RTXPRO6000", "Qwen3-30B-A3B-Instruct-2507", "rtxpro6000-qwen3-30b-a3b",
              "sharegpt-qwen3-30b-a3b-300-sps10", 20_000, 128),
    LoggedRun("RTXPRO6000", "Qwen3-30B-A3B-Instruct-2507", "rtxpro6000-qwen3-30b-a3b-tp2",
              "sharegpt-qwen3-30b-a3b-300-sps10", 40_000, 128),
    LoggedRun("RTXPRO6000", "Qwen3-30B-A3B-Instruct-2507", "rtxpro6000-qwen3-30b-a3b-dp2-ep2",
              "sharegpt-qwen3-30b-a3b-300-sps10", 60_000, 128, groups=2),
)  # fmt: skip


def read_logged(folder: Path, run: LoggedRun) -> tuple[list[dict[str, Any]], Requests]:
    """The log of a run (empty: none at hand) and its workload, at the logged arrivals if there are any."""
    path = folder / f"llmservingsim/bench/{run.hardware}/{run.model}/requests.jsonl"
    logged = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    workload_path = folder / f"llmservingsim/bench/workloads/{run.workload}.lens.jsonl.gz"
    arrivals = [round(1e9 * (request["arrival_time"] - logged[0]["arrival_time"])) for request in logged]
    workload = read_workload(workload_path, arrivals or None)
    lengths = [(spec.prompt_tokens, spec.output_tokens) for spec in workload]
    assert not logged or lengths == [(request["input_toks"], request["output_toks"]) for request in logged]
    return logged, workload


def single_requests(folder: Path) -> list[Row]:
    """R10: runs of vLLM 0.19 with logs of single requests."""
    rows = []
    for run in LOGGED_RUNS:
        logged, workload = read_logged(folder, run)
        scenario = Scenario(
            engine=run.engine,
            cost=load_layer_table(run.table),
            workload=workload,
            cluster=load_balancer(),
        )
        rows += logged_rows(run.name, logged, simulate(scenario))
        if run.hardware == "RTX4090":
            greedy = replace(scenario.engine, cache=replace(scenario.engine.cache, admission="greedy"))
            rows += logged_rows(f"{run.name} greedy", logged, simulate(replace(scenario, engine=greedy)))
        else:
            cost = load_layer_table(run.table, skew=context_skew(workload))
            rows += logged_rows(f"{run.name} skew", logged, simulate(replace(scenario, cost=cost)))
    return rows


def logged_rows(run: str, logged: Sequence[dict[str, Any]], result: SimulationResult) -> list[Row]:
    """Means, medians and 99th percentiles, beside the log where there is one."""
    table = result.requests
    if not logged:
        means = zip(("TTFT", "TPOT", "E2E"), mean_ms(result), strict=True)
        goals = {"TTFT": "15 %", "TPOT": "5 %", "E2E": "5 %"}
        return [row(run, f"{metric} mean (ms)", None, mean, goals[metric]) for metric, mean in means]
    ours = {table.number[index]: index for index in table.completed_rows()}
    assert len(ours) == len(logged)
    # both clocks start at the arrival of the first request: the log's queued_ts of the first is its arrival
    offset = logged[0]["queued_ts"] - logged[0]["arrival_time"]
    gaps = [request["queued_ts"] - request["arrival_time"] - offset for request in logged]
    waits = [request["first_token_ts"] - request["queued_ts"] for request in logged]
    measured = {
        "TTFT": waits,
        "TTFT from arrival": [wait + gap for wait, gap in zip(waits, gaps, strict=True)],
        "TPOT": [
            (request["last_token_ts"] - request["first_token_ts"]) / (request["output_toks"] - 1) for request in logged
        ],
        "E2E": [request["last_token_ts"] - request["queued_ts"] for request in logged],
    }
    ttft = [table.ttft_ns(ours[number]) / 1e9 for number in range(len(logged))]
    simulated = {
        "TTFT": ttft,
        "TTFT from arrival": ttft,
        "TPOT": [(table.tpot_ns(ours[number]) or 0) / 1e9 for number in range(len(logged))],
        "E2E": [table.e2e_ns(ours[number]) / 1e9 for number in range(len(logged))],
    }
    rows = []
    for metric, values in measured.items():
        goal = "15 %" if metric.startswith("TTFT") else "5 %"
        rows.append(row(run, f"{metric} mean (ms)", 1000 * fmean(values), 1000 * fmean(simulated[metric]), goal))
        for percent in (50.0, 99.0):
            theirs, mine = (percentile(sorted(times), percent) for times in (values, simulated[metric]))
            rows.append(row(run, f"{metric} p{percent:g} (ms)", 1000 * theirs, 1000 * mine, ""))
    end = max(request["last_token_ts"] for request in logged) - logged[0]["queued_ts"]
    rows.append(row(run, "duration (s)", end, result.duration_ns / 1e9, ""))
    rows.append({"run": run, "metric": "preemptions", "simulated": sum(table.preemptions)})
    return rows


RUNS = {"R7": figure_8, "R8": figure_8_disaggregated, "R9": figure_5, "R10": single_requests}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=RUNS)


def main(options: argparse.Namespace) -> None:
    """Run and compare."""
    rows = [line for name, run in RUNS.items() if options.only in (None, name) for line in run(options.folder)]
    series = {}
    for line in rows:
        if "series_simulated" in line:
            names = [name for name in ("measured", "simulated") if f"series_{name}" in line]
            series[line["run"]] = {name: line.pop(f"series_{name}") for name in names}
    report("reproduce_vllm_runs", rows, options.json, series=series)
