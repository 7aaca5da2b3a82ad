"""The options of ``diptych simulate``: names, help, panels, and the settings that they are."""

from pathlib import Path
from typing import Annotated

import typer

from diptych.cli.options import SLO_HELP, Number, Switch, Text, Whole, option

FLEET, WORKLOAD, OBJECTIVES = "Model and fleet", "Workload", "Objectives"
SCHEDULER, MEMORY, OUTPUT = "Scheduler (details; --shape presets them)", "Memory", "Output"

# Options that are settings, by their dotted path in the file.
PATHS = {
    **{name: name for name in ("model", "hardware", "tensor_parallel", "weight_bits", "quantize")},
    **{name: name for name in ("pipeline_parallel", "expert_parallel", "data_parallel")},
    **{name: name for name in ("kv_bits", "cost", "engine", "shape")},
    **{
        name: name
        for name in ("replicas", "routing", "disaggregate", "deflection", "on_failure", "max_model_len", "seed")
    },
    **{name: f"workload.{name}" for name in ("rate", "num_requests")},
    **{name: f"pools.{name}" for name in ("prefill", "decode", "both", "link", "nics", "hosts")},
    "arrivals": "workload.arrivals.kind",
    "prompt_tokens": "workload.lengths.prompt.mean",
    "output_tokens": "workload.lengths.output.mean",
    "trace": "workload.trace.path",
    "ttft_slo_ms": "slo.ttft_ms",
    "tpot_slo_ms": "slo.tpot_ms",
    **{name: f"scheduler.{name}" for name in ("order", "budget", "max_batched_tokens", "step_target_ms")},
    **{name: f"scheduler.{name}" for name in ("max_num_seqs", "max_waiting", "max_partial_prefills")},
    **{name: f"scheduler.{name}" for name in ("max_long_partial_prefills", "long_prefill_threshold")},
    **{name: f"scheduler.{name}" for name in ("preemption", "preempt_for_priority")},
    **{name: f"memory.{name}" for name in ("block_size", "prefix_cache", "kv_cache_tokens")},
    "kv_cache_memory": "memory.kv_cache_bytes",
    "kv_host_gb": "memory.host_bytes",
    "kv_disk_gb": "memory.disk_bytes",
    "disk": "memory.disk",
    "guess_coverage": "speculation.coverage",
    "guess_acceptance": "speculation.acceptance",
    "explain_misses": "explain_misses",
}

LIST_HELP = "Print what there is, and end: models, hardware, links, engines, traces or settings."


class SimulateOptions:
    """One attribute each; options.py makes a command of them."""

    config: Annotated[Path | None, typer.Argument(help="TOML file of settings; options override it.")] = None
    model: Annotated[Text, option("Model of the catalogue, or a config.json.", FLEET)] = None
    hardware: Annotated[Text, option("Device of the catalogue, or FILE.toml with your own.", FLEET)] = None
    tensor_parallel: Annotated[Whole, option("Devices that share every matrix.", FLEET)] = None
    pipeline_parallel: Annotated[Whole, option("Stages that a worker's layers are dealt to.", FLEET)] = None
    expert_parallel: Annotated[Whole, option("Groups of devices with experts of their own.", FLEET)] = None
    data_parallel: Annotated[Whole, option("Groups of devices with sequences of their own.", FLEET)] = None
    weight_bits: Annotated[Whole, option("Bits of a weight on a GPU. Default: the checkpoint's.", FLEET)] = None
    quantize: Annotated[Text, option("Weights on a CPU, as for serve: none, int8 or int4.", FLEET)] = None
    kv_bits: Annotated[Whole, option("Bits of a cached number: 16 or 8.", FLEET)] = None
    cost: Annotated[Text, option("Step durations: auto, tables, operators, roofline, or a file.", FLEET)] = None
    engine: Annotated[Text, option("Whose host and front end: diptych, vllm-0.12, vllm-0.19, ...", FLEET)] = None
    replicas: Annotated[Whole, option("Workers that prefill and decode (without --prefill, --decode).", FLEET)] = None
    prefill: Annotated[Whole, option("Workers that only prefill (with --decode).", FLEET)] = None
    decode: Annotated[Whole, option("Workers that decode prompts of the prefill workers.", FLEET)] = None
    both: Annotated[Whole, option("Workers that do both, beside those.", FLEET)] = None
    pool: Annotated[list[str] | None, option("NAME=POOL, such as decode=4xa100-80gb:tp2. Repeatable.", FLEET)] = None
    link: Annotated[Text, option("Link between workers: ib400, eth100, nvlink4, shared_memory, ...", FLEET)] = None
    nics: Annotated[Whole, option("Network cards of a replica, each with such a link.", FLEET)] = None
    hosts: Annotated[Whole, option("Hosts whose workers share memory (0: each worker has its own).", FLEET)] = None
    routing: Annotated[Text, option("kv_aware or round_robin.", FLEET)] = None
    disaggregate: Annotated[Text, option("Separate prefill from decode: auto, always or never.", FLEET)] = None
    deflection: Annotated[Text, option("Prompts of a busy decode worker: short, or objective.", FLEET)] = None
    on_failure: Annotated[Text, option("Requests of a lost worker: retry, local or fail.", FLEET)] = None
    max_model_len: Annotated[Whole, option("Context length. Default: the model's own.", FLEET)] = None
    rate: Annotated[Number, option("Requests per second.", WORKLOAD)] = None
    num_requests: Annotated[Whole, option("Requests in all.", WORKLOAD)] = None
    arrivals: Annotated[Text, option("poisson, gamma, constant, on_off or closed.", WORKLOAD)] = None
    prompt_tokens: Annotated[Number, option("Mean length of a prompt.", WORKLOAD)] = None
    output_tokens: Annotated[Number, option("Mean length of an answer.", WORKLOAD)] = None
    trace: Annotated[Text, option("azure-conv, mooncake-conversation, or a file.", WORKLOAD)] = None
    seed: Annotated[Whole, option("Seed of everything random; equal seeds give equal runs.", WORKLOAD)] = None
    slo: Annotated[Text, option(SLO_HELP, OBJECTIVES)] = None
    ttft_slo_ms: Annotated[Number, option("Time to first token, for requests that name none.", OBJECTIVES)] = None
    tpot_slo_ms: Annotated[Number, option("Time per later token, for requests that name none.", OBJECTIVES)] = None
    find_goodput: Annotated[bool, option("Search the highest rate that meets them.", OBJECTIVES)] = False
    fewest_devices: Annotated[bool, option("Search the smallest fleet that meets them.", OBJECTIVES)] = False
    attainment: Annotated[Number, option("Share of requests that must meet them: 0.9 or 90.", OBJECTIVES)] = None
    tolerance: Annotated[Number, option("The search ends at two rates this close. Default: 0.05.", OBJECTIVES)] = None
    probe: Annotated[Text, option("Shortest run of a search. Default: 60s.", OBJECTIVES)] = None
    shape: Annotated[Text, option("unified: prompts first. chunked: between decodes.", OBJECTIVES)] = None
    guess_coverage: Annotated[Number, option("Share of tokens behind which tokens are guessed.", OBJECTIVES)] = None
    guess_acceptance: Annotated[Number, option("Probability that a guessed token is right.", OBJECTIVES)] = None
    order: Annotated[Text, option("fcfs, priority, shortest or deadline.", SCHEDULER)] = None
    budget: Annotated[Text, option("What limits a step: whole, fixed or slo.", SCHEDULER)] = None
    max_batched_tokens: Annotated[Whole, option("Tokens of one step at most.", SCHEDULER)] = None
    step_target_ms: Annotated[Number, option("Time of one step with --budget slo.", SCHEDULER)] = None
    max_num_seqs: Annotated[Whole, option("Requests running at once.", SCHEDULER)] = None
    max_waiting: Annotated[Whole, option("Requests that may wait per worker.", SCHEDULER)] = None
    max_partial_prefills: Annotated[Whole, option("Prompts partly computed at once (0: no limit).", SCHEDULER)] = None
    max_long_partial_prefills: Annotated[Whole, option("Of these, long ones (0: no limit).", SCHEDULER)] = None
    long_prefill_threshold: Annotated[Whole, option("A prompt with more uncached tokens is long.", SCHEDULER)] = None
    preemption: Annotated[Text, option("When a decode loses its KV blocks: recompute or swap.", SCHEDULER)] = None
    preempt_for_priority: Annotated[Switch, option("Displace running requests of lower priority.", SCHEDULER)] = None
    block_size: Annotated[Whole, option("Tokens per KV block.", MEMORY)] = None
    kv_cache_tokens: Annotated[Whole, option("KV cache in tokens. Default: what fits.", MEMORY)] = None
    kv_cache_memory: Annotated[Text, option("KV cache of each GPU, such as 20GiB.", MEMORY)] = None
    kv_host_gb: Annotated[Number, option("Host memory per worker for evicted and preempted KV, in GB.", MEMORY)] = None
    kv_disk_gb: Annotated[Number, option("Disk per worker below it, in GB.", MEMORY)] = None
    disk: Annotated[Text, option("Which disk: nvme4, nvme3, sata or virtual. Default: nvme4.", MEMORY)] = None
    prefix_cache: Annotated[Switch, option("Reuse the KV of equal prompt beginnings.", MEMORY)] = None
    explain_misses: Annotated[Switch, option("Say what prefills were spent on.", OUTPUT)] = None
    assign: Annotated[list[str] | None, option("Any setting: PATH=VALUE. Repeatable.", OUTPUT, "--set")] = None
    sweep: Annotated[list[str] | None, option("NAME=from:to:step or a,b,c. Twice: a grid.", OUTPUT)] = None
    processes: Annotated[Whole, option("Processes of a sweep. Default: one per core.", OUTPUT)] = None
    list_: Annotated[Text, option(LIST_HELP, OUTPUT, "--list")] = None
    as_json: Annotated[bool, option("One JSON object on standard output.", OUTPUT, "--json")] = False
    records: Annotated[Path | None, option("Write one JSON line per request.", OUTPUT)] = None
    report: Annotated[Path | None, option("Write a page with charts (HTML).", OUTPUT)] = None
    timeline: Annotated[Path | None, option("Write a trace for Perfetto (JSON).", OUTPUT)] = None
    timeline_window: Annotated[Text, option("Part of it, in seconds: from:to.", OUTPUT)] = None
