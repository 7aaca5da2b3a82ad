"""Measured runs of vLLM, reproduced from layer profiles.

    python benchmarks/reproduce_vllm_runs.py DATA_FOLDER [--json reproduce_vllm_runs.json] [--only R10]

Each run is simulated with the layer table of its GPU, model and engine version; no number of a table was fitted to an
end-to-end run. vLLM's scheduler is first come, first served with decodes first and a fixed token budget: here the order
``fcfs`` with the budget ``fixed``, no caps, blocks of 16 tokens.

R7, R9: LLMServingSim's ISPASS'26 artifact, Llama-3.1-70B on four H100, 300 ShareGPT requests at 10/s. The version of
vLLM and its limits are not recorded: the defaults of that time are taken, 256 sequences and 2,048 tokens a step. TTFT
counts from the arrival in the workload to the end of the step that samples the token. Three tables, because the
artifact's profile holds neither collectives nor fused norms nor the host: "eager" adds measured all-reduces to the
profile as it is; "fused" takes norms, rotary embedding and attention from measurements of vLLM's kernels instead;
"sync" also adds the measured host time of a synchronous engine, and is what such an engine should take. One more row
shows what the unrecorded token budget matters: 512 tokens a step, an older default (from 2,048 up nothing changes).
R8, and R9's disaggregated run (PDD): one prefill and one decode instance on NVLink. TTFT is stamped on the decode side,
whose first token comes with its own first step. Transfers at the link's speed cannot explain the measured times: in the
measured system the engines stand still meanwhile, on both sides. How long for each request is the one constant; it is
found from the TPOT of R8 alone, and R8's TTFT and throughput and the whole of R9's run are predicted with it.
R10: vLLM 0.19 on an RTX 4090 and an RTX PRO 6000, logs of single requests. Arrivals are the logged ones. The log counts
from the moment the engine takes a request in, between two steps, so its TTFT and latency lack the wait for the step
under way when the request arrives; "from arrival" adds the logged gap back.

The worker of Diptych admits a prompt when the expected peak of all admitted fits; vLLM when the prompt fits now. Where
memory is short, ``greedy`` rows repeat the run with an expectation of nothing to come, which is vLLM's rule. ``skew``
rows add the measured effect of unequal contexts, with longest over mean context taken from the lengths of the workload.
"""

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from common import report

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.events import FirstToken, StepFinished
from diptych.control.step import SchedulerOutput
from diptych.report.statistics import percentile
from diptych.simulation.costs.cost_model import CostModel, DecodeLine
from diptych.simulation.costs.layer_tables import load_layer_table
from diptych.simulation.fleet.pools import Pools
from diptych.simulation.results import SimulationResult
from diptych.simulation.run import simulate, simulate_with_log
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import RequestSpec

Row = dict[str, Any]
BLOCK = 16
H100_TABLES = {
    "eager": "h100-llama-3.1-70b-tp4-eager",
    "fused": "h100-llama-3.1-70b-tp4",
    "sync": "h100-llama-3.1-70b-tp4-sync",
}
TRANSFER_NS = 16_000_000  # what R8 finds, used for R9's disaggregated run
H100_BLOCKS = 40_000  # not binding: 160 GB of 320 hold the weights, a block takes 5.2 MB


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


def row(run: str, metric: str, measured: float, simulated: float, goal: str) -> Row:
    """One comparison."""
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
    tpots = [tpot for one in rows if (tpot := table.tpot_ns(one)) is not None]
    return (
        fmean(table.ttft_ns(one) for one in rows) / 1e6,
        fmean(tpots) / 1e6,
        fmean(table.e2e_ns(one) for one in rows) / 1e6,
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
    for name, table, max_batched_tokens in (
        *((name, table, 2048) for name, table in H100_TABLES.items()),
        ("sync, 512 a step", H100_TABLES["sync"], 512),
    ):
        worker = vllm_engine_config(H100_BLOCKS, 256, max_batched_tokens, 131072)
        result = simulate(Scenario(engine=worker, cost=load_layer_table(table), workload=workload))
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
        """See CostModel."""
        return self.cost.decode_line(num_seqs, context)

    def step_ns(self, output: SchedulerOutput) -> int:
        """See CostModel."""
        transfers = len(output.resumed) + sum(chunk.is_last for chunk in output.prefills)
        return self.cost.step_ns(output) + transfers * self.transfer_ns


def disaggregated(workload: Requests, table: str, transfer_ns: int, **changes: Any) -> Scenario:
    """One prefill and one decode instance on NVLink."""
    worker = vllm_engine_config(H100_BLOCKS, 256, 2048, 131072)
    pools = Pools(num_prefill=1, num_decode=1, kv_bytes_per_token=327_680, link="nvlink4")
    cost = BlockingTransfers(load_layer_table(table), transfer_ns)
    return Scenario(engine=worker, cost=cost, workload=workload, pools=pools, **changes)


def stamped_on_decode(result: SimulationResult) -> tuple[float, float]:
    """Mean TTFT and TPOT in milliseconds as a client of the decode instance sees them: its first token is the one of
    its own first step, so the tokens that it counts are one fewer."""
    table = result.requests
    ttft, tpot = [], []
    for one in table.completed_rows():
        later = table.output_tokens[one] - 1
        step_ns = table.decode_ns[one] / max(1, later)
        ttft.append(table.ttft_ns(one) + table.handoff_ns[one] + step_ns)
        if later > 1:
            tpot.append((table.decode_ns[one] - step_ns) / (later - 1))
    return fmean(ttft) / 1e6, fmean(tpot) / 1e6


def figure_8_disaggregated(folder: Path) -> list[Row]:
    """R8: one prefill and one decode instance; the transfer constant is found from TPOT alone."""
    evaluation = folder / "llmservingsim/ispass26"
    lines = tsv(evaluation / "evaluation/figure_8/reference/PDD_latency.tsv")
    measured = [float(value) for value in next(line[1:] for line in lines if line[0] == "vLLM")]
    workload = read_workload(evaluation / "dataset/sharegpt_req300_rate10_llama.lens.jsonl.gz", shared=False)
    tokens = sum(spec.output_tokens for spec in workload)
    rows = []
    results = {ms: simulate(disaggregated(workload, H100_TABLES["sync"], ms * 1_000_000)) for ms in range(0, 41, 2)}
    best = min(results, key=lambda ms: abs(stamped_on_decode(results[ms])[1] - measured[2]))
    for run, transfer_ms in (("free transfers", 0), (f"{best} ms a transfer, from TPOT", best)):
        result = results[transfer_ms]
        ttft, tpot = stamped_on_decode(result)
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
    """R9: tokens per second over the run, one instance with prefix caching and two instances in turn."""
    evaluation = folder / "llmservingsim/ispass26"
    workload = read_workload(evaluation / "dataset/sharegpt_req300_rate10_llama.lens.jsonl.gz")
    rows = []
    for shape, num_workers in (("SD+PC", 1), ("MD", 2), ("PDD", 2)):
        path = evaluation / f"evaluation/figure_5/H100/reference/{shape}_throughput.tsv"
        measured = [float(line[1]) for line in tsv(path)]
        for name, table in H100_TABLES.items():
            if shape == "PDD":
                scenario = disaggregated(workload, table, TRANSFER_NS, record_events=True)
            else:
                scenario = Scenario(
                    engine=vllm_engine_config(H100_BLOCKS, 256, 2048, 131072),
                    cost=load_layer_table(table),
                    workload=workload,
                    num_workers=num_workers,
                    routing="round_robin",
                    record_events=True,
                )
            simulated = tokens_per_second(scenario, len(measured) + 30)
            padded = [*measured, *(0.0 for _ in simulated[len(measured) :])]
            difference = sum(abs(ours - theirs) for ours, theirs in zip(simulated, padded, strict=True))
            rows.append(
                {
                    "run": f"R9 {shape} {name}",
                    "metric": "tokens/s, mean; error: mean |difference|",
                    "measured": round(fmean(measured), 1),
                    "simulated": round(sum(simulated) / len(measured), 1),
                    "error_%": round(100 * difference / sum(measured), 2),
                    "goal": "10 %",
                    "series_measured": measured,
                    "series_simulated": simulated[: len(measured)],
                }
            )
    return rows


def single_requests(folder: Path) -> list[Row]:
    """R10: two runs of vLLM 0.19 with logs of single requests."""
    rows = []
    workload_path = folder / "llmservingsim/bench/workloads/sharegpt-llama-3.1-8b-300-sps10.lens.jsonl.gz"
    for hardware, table, num_blocks, max_num_seqs in (
        ("RTX4090", "rtx4090-llama-3.1-8b", 2588 - 1, 256),  # vLLM keeps one block for padding
        ("RTXPRO6000", "rtxpro6000-llama-3.1-8b", 30_000, 128),  # not recorded; 128 sequences never fill so many
    ):
        text = (folder / f"llmservingsim/bench/{hardware}/Llama-3.1-8B/requests.jsonl").read_text()
        logged = [json.loads(line) for line in text.splitlines()]
        first = logged[0]["arrival_time"]
        workload = read_workload(workload_path, [round(1e9 * (one["arrival_time"] - first)) for one in logged])
        lengths = [(one["input_toks"], one["output_toks"]) for one in logged]
        assert [(spec.prompt_tokens, spec.output_tokens) for spec in workload] == lengths
        scenario = Scenario(
            engine=vllm_engine_config(num_blocks, max_num_seqs, 2048, 32768),
            cost=load_layer_table(table),
            workload=workload,
        )
        rows += logged_rows(f"R10 {hardware}", logged, simulate(scenario))
        if hardware == "RTX4090":
            greedy = replace(scenario.engine, cache=replace(scenario.engine.cache, admission="greedy"))
            rows += logged_rows(f"R10 {hardware} greedy", logged, simulate(replace(scenario, engine=greedy)))
        else:
            contexts = [prompt + answer / 2 for prompt, answer in lengths]
            cost = load_layer_table(table, skew=max(contexts) / fmean(contexts))
            rows += logged_rows(f"R10 {hardware} skew", logged, simulate(replace(scenario, cost=cost)))
    return rows


def logged_rows(run: str, logged: Sequence[dict[str, Any]], result: SimulationResult) -> list[Row]:
    """Means, medians and 99th percentiles beside the log."""
    table = result.requests
    ours = {table.number[one]: one for one in table.completed_rows()}
    assert len(ours) == len(logged)
    # both clocks start at the arrival of the first request: the log's queued_ts of the first is its arrival
    offset = logged[0]["queued_ts"] - logged[0]["arrival_time"]
    gaps = [one["queued_ts"] - one["arrival_time"] - offset for one in logged]
    measured = {
        "TTFT": [one["first_token_ts"] - one["queued_ts"] for one in logged],
        "TTFT from arrival": [
            one["first_token_ts"] - one["queued_ts"] + gap for one, gap in zip(logged, gaps, strict=True)
        ],
        "TPOT": [(one["last_token_ts"] - one["first_token_ts"]) / (one["output_toks"] - 1) for one in logged],
        "E2E": [one["last_token_ts"] - one["queued_ts"] for one in logged],
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
            theirs, mine = (percentile(sorted(one), percent) for one in (values, simulated[metric]))
            rows.append(row(run, f"{metric} p{percent:g} (ms)", 1000 * theirs, 1000 * mine, ""))
    end = max(one["last_token_ts"] for one in logged) - logged[0]["queued_ts"]
    rows.append(row(run, "duration (s)", end, result.duration_ns / 1e9, ""))
    rows.append({"run": run, "metric": "preemptions", "simulated": sum(table.preemptions)})
    return rows


RUNS = {"R7": figure_8, "R8": figure_8_disaggregated, "R9": figure_5, "R10": single_requests}


def main() -> None:
    """Run and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json")
    parser.add_argument("--only", choices=RUNS)
    options = parser.parse_args()
    rows = [one for name, run in RUNS.items() if options.only in (None, name) for one in run(options.folder)]
    series = {}
    for one in rows:
        if "series_measured" in one:
            series[one["run"]] = {key: one.pop(f"series_{key}") for key in ("measured", "simulated")}
    report("reproduce_vllm_runs", rows, options.json, series=series)


if __name__ == "__main__":
    main()
