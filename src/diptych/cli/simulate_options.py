"""The options of ``diptych simulate``: names, help, panels, and the settings that they are."""

from pathlib import Path
from typing import Annotated

import typer

from diptych.cli import shared_help
from diptych.cli.options import Number, Switch, Text, Whole, option

FLEET, WORKLOAD, OBJECTIVES = "Model and fleet", "Workload", "Objectives"
SCHEDULER, MEMORY, OUTPUT = "Scheduler (details; --shape presets them)", "Memory", "Output"

# Options that are settings, by their dotted path in the file.
PATHS = {
    **{name: name for name in ("model", "hardware", "tensor_parallel", "weight_bits", "quantize")},
    **{name: name for name in ("pipeline_parallel", "expert_parallel", "data_parallel")},
    **{name: name for name in ("kv_bits", "cost", "force_calibration", "engine", "shape")},
    **{
        name: name
        for name in ("replicas", "routing", "disaggregate", "local_prefill", "on_failure", "max_model_len", "seed")
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
    "draft_coverage": "speculation.coverage",
    "draft_acceptance": "speculation.acceptance",
    "explain_misses": "explain_misses",
}

LIST_HELP = "List models, hardware, links, engines, traces or settings, and end. Default: simulate."


class SimulateOptions:
    """One attribute each; options.py makes a command of them."""

    config: Annotated[
        Path | None, typer.Argument(help="TOML file of settings; options override it. Default: none.")
    ] = None
    model: Annotated[
        Text, option("Model of the catalogue, or a config.json. Default: that of CONFIG or --cost.", FLEET)
    ] = None
    hardware: Annotated[
        Text, option("Device of the catalogue, or FILE.toml with your own. Default: that of CONFIG or --cost.", FLEET)
    ] = None
    tensor_parallel: Annotated[Whole, option("Devices that share every matrix. Default: 1.", FLEET)] = None
    pipeline_parallel: Annotated[Whole, option("Stages that a worker's layers are dealt to. Default: 1.", FLEET)] = None
    expert_parallel: Annotated[Whole, option("Groups of devices with experts of their own. Default: 1.", FLEET)] = None
    data_parallel: Annotated[Whole, option("Groups of devices with sequences of their own. Default: 1.", FLEET)] = None
    weight_bits: Annotated[Whole, option(shared_help.WEIGHT_BITS, FLEET)] = None
    quantize: Annotated[
        Text, option("Weights on a CPU: none, int8 or int4. Default: none, or as calibrated.", FLEET)
    ] = None
    kv_bits: Annotated[Whole, option(shared_help.KV_BITS, FLEET)] = None
    cost: Annotated[Text, option(shared_help.COST, FLEET)] = None
    force_calibration: Annotated[Switch, option(shared_help.FORCE_CALIBRATION, FLEET)] = None
    engine: Annotated[Text, option(shared_help.SIMULATED_ENGINE, FLEET)] = None
    replicas: Annotated[
        Whole, option("Workers that prefill and decode (without --prefill, --decode). Default: 1.", FLEET)
    ] = None
    prefill: Annotated[Whole, option("Workers that only prefill (with --decode). Default: 0.", FLEET)] = None
    decode: Annotated[Whole, option("Workers that only decode (with --prefill). Default: 0.", FLEET)] = None
    both: Annotated[Whole, option("Workers that do both, beside --prefill and --decode. Default: 0.", FLEET)] = None
    pool: Annotated[
        list[str] | None,
        option("Pool of workers, NAME=POOL: decode=4xa100-80gb:tp2. Repeatable. Default: none.", FLEET),
    ] = None
    link: Annotated[
        Text, option("Link between workers: ib400, eth100, nvlink4, shared_memory, ... Default: ib400.", FLEET)
    ] = None
    nics: Annotated[Whole, option("Network cards of a replica, each with a link of its own. Default: 1.", FLEET)] = None
    hosts: Annotated[
        Whole, option("Hosts whose workers share memory (0: each worker has its own). Default: 0.", FLEET)
    ] = None
    routing: Annotated[Text, option("Router: kv_aware or round_robin. Default: kv_aware.", FLEET)] = None
    disaggregate: Annotated[
        Text, option("Separate prefill from decode: auto, always or never. Default: auto.", FLEET)
    ] = None
    local_prefill: Annotated[
        Text, option("Prompts that a busy decode worker prefills itself: short, or objective. Default: short.", FLEET)
    ] = None
    on_failure: Annotated[
        Text, option("What becomes of the requests of a lost worker: retry, local or fail. Default: retry.", FLEET)
    ] = None
    max_model_len: Annotated[Whole, option(shared_help.MAX_MODEL_LEN, FLEET)] = None
    rate: Annotated[Number, option(shared_help.RATE, WORKLOAD)] = None
    num_requests: Annotated[Whole, option("Requests in all. Default: 1000, or the trace.", WORKLOAD)] = None
    arrivals: Annotated[Text, option(shared_help.ARRIVALS, WORKLOAD)] = None
    prompt_tokens: Annotated[Number, option(shared_help.PROMPT_TOKENS, WORKLOAD)] = None
    output_tokens: Annotated[Number, option(shared_help.OUTPUT_TOKENS, WORKLOAD)] = None
    trace: Annotated[Text, option(shared_help.TRACE, WORKLOAD)] = None
    seed: Annotated[Whole, option("Seed of everything random; equal seeds give equal runs. Default: 0.", WORKLOAD)] = (
        None
    )
    slo: Annotated[Text, option(shared_help.SLO, OBJECTIVES)] = None
    ttft_slo_ms: Annotated[Number, option(shared_help.TTFT_SLO_MS, OBJECTIVES)] = None
    tpot_slo_ms: Annotated[Number, option(shared_help.TPOT_SLO_MS, OBJECTIVES)] = None
    find_goodput: Annotated[bool, option(shared_help.FIND_GOODPUT, OBJECTIVES)] = False
    fewest_devices: Annotated[bool, option("Search the smallest fleet that meets the objectives.", OBJECTIVES)] = False
    attainment: Annotated[Number, option(shared_help.ATTAINMENT, OBJECTIVES)] = None
    tolerance: Annotated[Number, option(shared_help.TOLERANCE, OBJECTIVES)] = None
    probe: Annotated[Text, option("Shortest run of a search. Default: 60s.", OBJECTIVES)] = None
    shape: Annotated[
        Text,
        option("Scheduling preset. unified: prompts first; chunked: between decodes. Default: chunked.", OBJECTIVES),
    ] = None
    draft_coverage: Annotated[
        Number, option("Share of tokens that are followed by draft tokens. Default: 0.", OBJECTIVES)
    ] = None
    draft_acceptance: Annotated[
        Number, option("Probability that a draft token is accepted. Default: none are drafted.", OBJECTIVES)
    ] = None
    order: Annotated[
        Text, option("Order of the queue: fcfs, priority, shortest or deadline. Default: by --shape.", SCHEDULER)
    ] = None
    budget: Annotated[Text, option("What limits a step: whole, fixed or slo. Default: by --shape.", SCHEDULER)] = None
    max_batched_tokens: Annotated[Whole, option(shared_help.MAX_BATCHED_TOKENS, SCHEDULER)] = None
    step_target_ms: Annotated[Number, option(shared_help.STEP_TARGET_MS, SCHEDULER)] = None
    max_num_seqs: Annotated[Whole, option(shared_help.MAX_NUM_SEQS, SCHEDULER)] = None
    max_waiting: Annotated[Whole, option("Requests that may wait on each worker. Default: 4096.", SCHEDULER)] = None
    max_partial_prefills: Annotated[Whole, option(shared_help.MAX_PARTIAL_PREFILLS, SCHEDULER)] = None
    max_long_partial_prefills: Annotated[Whole, option(shared_help.MAX_LONG_PARTIAL_PREFILLS, SCHEDULER)] = None
    long_prefill_threshold: Annotated[Whole, option(shared_help.LONG_PREFILL_THRESHOLD, SCHEDULER)] = None
    preemption: Annotated[
        Text,
        option(
            "How a decode that loses its KV blocks gets them back: recompute or swap. Default: recompute.", SCHEDULER
        ),
    ] = None
    preempt_for_priority: Annotated[
        Switch, option("Displace running requests of lower priority. Default: off.", SCHEDULER)
    ] = None
    block_size: Annotated[Whole, option("Tokens per KV block. Default: 32.", MEMORY)] = None
    kv_cache_tokens: Annotated[Whole, option("KV cache in tokens. Default: what fits.", MEMORY)] = None
    kv_cache_memory: Annotated[Text, option("KV cache of each GPU, such as 20GiB. Default: what fits.", MEMORY)] = None
    kv_host_gb: Annotated[
        Number, option("Host memory per worker for evicted and preempted KV, in GB. Default: 0.", MEMORY)
    ] = None
    kv_disk_gb: Annotated[Number, option("Disk per worker below host memory, in GB. Default: 0.", MEMORY)] = None
    disk: Annotated[Text, option("Which disk: nvme4, nvme3, sata or virtual. Default: nvme4.", MEMORY)] = None
    prefix_cache: Annotated[Switch, option("Reuse the KV of equal prompt beginnings. Default: on.", MEMORY)] = None
    explain_misses: Annotated[Switch, option("Explain what prefills were spent on. Default: off.", OUTPUT)] = None
    assign: Annotated[list[str] | None, option(shared_help.SETTING, OUTPUT, "--set")] = None
    sweep: Annotated[
        list[str] | None,
        option("Simulate a setting's values: NAME=from:to:step or a,b,c. Twice: a grid. Default: none.", OUTPUT),
    ] = None
    processes: Annotated[Whole, option("Processes of a sweep. Default: one per core.", OUTPUT)] = None
    list_: Annotated[Text, option(LIST_HELP, OUTPUT, "--list")] = None
    as_json: Annotated[bool, option(shared_help.JSON_OBJECT, OUTPUT, "--json")] = False
    records: Annotated[
        Path | None, option("Write one JSON line per request to this file. Default: not written.", OUTPUT)
    ] = None
    report: Annotated[Path | None, option(shared_help.REPORT, OUTPUT)] = None
    timeline: Annotated[
        Path | None, option("Write a trace for Perfetto (JSON) to this file. Default: not written.", OUTPUT)
    ] = None
    timeline_window: Annotated[Text, option("Part of --timeline, in seconds: from:to. Default: all.", OUTPUT)] = None
