"""Mixed or exclusive batches: what do prompts in a step with decodes cost? (arXiv 2606.00516)

    python benchmarks/exclusive_batching.py [--json exclusive_batching.json] [--clients 512] [--requests 1536]

The paper measures that a step with prompts and decodes costs more per token than one of decodes alone once decodes are
more than 20 % of its tokens on an RTX PRO 6000 (1.8 TB/s), and only beyond 80 % on an H200 (4.8 TB/s); that exclusive
batches (either prompts or decodes in a step) reach up to 41.9 % more throughput on the former; and that mixed ones stay
ahead on the latter.

Steps: one with a chunk and decodes, over two with one of them each, from tables in which mixed steps were measured (RTX
PRO 6000, vLLM's kernels) or from operators that add up (H200: interference is not in them). Throughput: clients that
ask again at once; "mixed" is chunked prefill of 2,048 tokens a step, "exclusive" runs prompts whole and alone, as soon
as there is a place (the paper waits until several places are free, and gains more).
"""

import argparse
from typing import Any

from common import report

from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.prepare import prepare
from diptych.simulation.settings import read_settings
from diptych.simulation.sweep import run_here

DEVICES = (("rtx-pro-6000", "llama-3.1-8b", "tables"), ("h200", "llama-3.1-8b", "operators"))
SHARES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
CONTEXT = 1024  # of a decode
TOKENS = 1024  # of a step
LOADS = {"prompt-heavy": (2048, 128), "balanced": (512, 256), "answer-heavy": (256, 1024)}  # tokens
MIXED = {"scheduler.budget": "fixed", "scheduler.max_batched_tokens": 2048}
EXCLUSIVE = {"shape": "unified"}


def step_ns(cost: CostModel, prompt_tokens: int, decodes: int) -> int:
    """Duration of one step with one chunk and so many decodes."""
    prefills = (ScheduledPrefill("prompt", 0, prompt_tokens, (), True),) if prompt_tokens else ()
    attention = chunk_attention(0, prompt_tokens)
    features = StepFeatures(prompt_tokens, attention, decodes, decodes * CONTEXT)
    return cost.step_ns(SchedulerOutput(1, prefills=prefills, num_decodes=decodes, features=features))


def mixing_row(device: str, model: str, kind: str) -> dict[str, Any]:
    """One step with a chunk and decodes, over two steps with one of them each; below 1, mixing saves time."""
    settings = read_settings(None, {"model": model, "hardware": device, "cost": kind})
    cost = prepare(settings).scenario.cost
    ratios = {}
    for share in SHARES:
        decodes = round(share * TOKENS)
        prompt = TOKENS - decodes
        apart = step_ns(cost, prompt, 0) + step_ns(cost, 0, decodes)
        ratios[f"{share:.0%} decodes"] = round(step_ns(cost, prompt, decodes) / apart, 3)
    return {"device": device, "durations": kind, **ratios}


def throughput_row(device: str, model: str, kind: str, load: str, clients: int, requests: int) -> dict[str, Any]:
    """Tokens per second of both kinds of batches under one load."""
    prompt, output = LOADS[load]
    common = {
        "model": model, "hardware": device, "cost": kind, "workload.arrivals.kind": "closed",
        "workload.arrivals.concurrency": clients, "workload.num_requests": requests, "scheduler.max_num_seqs": clients,
        "workload.lengths.prompt": {"kind": "lognormal", "mean": prompt, "sigma": 0.3},
        "workload.lengths.output": {"kind": "lognormal", "mean": output, "sigma": 0.3}, "admit_all": True,
    }  # fmt: skip
    rates = [
        run_here(read_settings(None, common | how)).point["summary"]["total_tokens_per_s"] for how in (MIXED, EXCLUSIVE)
    ]
    gain = rates[1] / rates[0] - 1
    return {"device": device, "load": load, "mixed tok/s": rates[0], "exclusive tok/s": rates[1], "gain": gain}


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--requests", type=int, default=1536)
    options = parser.parse_args()
    rows = [mixing_row(*device) for device in DEVICES]
    rows += [throughput_row(*device, load, options.clients, options.requests) for device in DEVICES for load in LOADS]
    report("exclusive_batching", rows, options.json)


if __name__ == "__main__":
    main()
