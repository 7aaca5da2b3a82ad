"""The options of ``diptych serve``: names, help and panels. Those of its door and of batches are shared with others
(http_options.py, batch_options.py)."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from diptych.cli import shared_help
from diptych.cli.http_options import SERVER
from diptych.cli.options import KERNEL_NAMES, Number, Strings, Text, Whole, option
from diptych.control.cluster.cluster_config import OnFailure
from diptych.control.config import (
    BudgetName,
    DTypeName,
    KVDTypeName,
    ModelImplName,
    OrderName,
    PreemptionName,
    PresetName,
    QuantizeName,
)
from diptych.control.planner.planner_config import PlanMode
from diptych.control.router.routing import Disaggregate, LocalPrefill, RoutingName
from diptych.runtime.tiers.extent_format import DiskCodecName
from diptych.runtime.transfer import CONNECTORS
from diptych.runtime.transfer.connector import CodecName
from diptych.serving.link.engine_options import (
    DeviceName,
    ExplainMisses,
    InstructionSetName,
    SpeculationName,
)

MODEL, OBJECTIVES, WORKERS = "Model", "Objectives", "Workers"
SCHEDULER, MEMORY, MACHINE = "Scheduler (details; --shape presets them)", "Memory", "Machine"
MODEL_HELP = "Model directory, GGUF file, or a name of the Hub that is in its cache. Default: the bundled model."
TRANSFERS = "|".join(("auto", *CONNECTORS))  # FleetOptions refuses other names
ISA_HELP = "Kernels that compute: instructions of a CPU, triton on a GPU, or torch; auto: this machine's best."
QUANTIZE_HELP = "Quantise the checkpoint's weights to 8 or 4 bits at load; on a CPU."
SPECULATION_HELP = (
    "Draft tokens by n-gram lookup in prompt and answer, and verify several at once; auto: where no token changes."
)
IN_FLIGHT_HELP = "Requests per worker whose prefill is not done; more wait in the queue (0: none wait). Default: 64."
BOTH_HELP = "Workers that do both. Default: 1 if there is no other."
CORE_SPLIT_HELP = (
    "Cores by role, such as prefill=3,decode=1 (weights); divided again when a role changes. Default: alike."
)
FLEET_HELP = "TOML file of unequal workers: tables pools.NAME, as for diptych simulate. Default: equal workers."
SURVIVE_HELP = (
    "Record streams in this directory: clients go on with Last-Event-ID, also after a restart. Default: not recorded."
)
LISTEN_HELP = "Take workers of other hosts at this address (diptych worker --join). Default: none."
KEY_HELP = "File with the key that workers must have to join: 32 to 4096 bytes. Default: none may join."
LAUNCHER_HELP = "What starts the workers: this host, or Ray on its hosts (they join by --listen-workers)."
PLAIN_HELP = "Send KV unencrypted between hosts (--listen-workers), on a network that you trust."
POOL_HELP = (
    "Pool of unequal workers, NAME=POOL: large=1:max_model_len=131072,kv_cache_bytes=8GiB. Repeatable. Default: "
    "equal workers."
)
LOCAL_PREFILL_HELP = (
    "Prompts that a busy decode worker prefills itself: short ones, or any that keep its streams' TPOT "
    "objective. Default: short."
)
MAX_QUEUED_HELP = "Requests that may wait in the queue; more get 429. Default: 4096."
MISSES_HELP = "Explain prefix-cache misses. text: keep prompts in memory, to show what differs."
KV_CACHE_HELP = (
    "KV cache per worker, such as 2GiB. Default: a quarter of the free memory, divided among workers, at most 2 GiB "
    "each; on a GPU, what is free there."
)
FIT_HELP = (
    "Choose --quantize, --max-model-len and --kv-cache-memory for the free memory of this machine, and print them; "
    "what is given stays. On a CPU."
)
KV_HOST_HELP = "Host memory per worker for evicted KV and preempted requests, in GB."
TOOL_FORMAT_HELP = (
    "Format of tool calls: auto (as the chat template says, else generic), generic (described in the first "
    "message), none (tools are refused), or a format of docs/structured.md."
)
RESPONSES_HELP = "Most bytes of kept responses, such as 1GiB. Default: 256MiB in memory, 4GiB in a file."
SHAPE_HELP = (
    "Scheduling preset. unified: prompts first; chunked: between decodes. Default: chunked, and --plan may change it."
)
PLAN_HELP = "Change roles, shapes and --core-split to fit the load (auto), or only say so (advise). Default: advise."


DOWNLOAD_HELP = "Download a model of the Hub that is not in its cache (extra hub), as diptych pull does."
REVISION_HELP = "Branch, tag or commit of a model of the Hub. Default: main, else the newest that is here."
NAME_HELP = "Name for clients; repeat it for more, of which replies have the first. Default: the model's own."


class ModelOptions:
    """What is served (see ``takes``)."""

    place: Annotated[Text, typer.Argument(metavar="[MODEL]", help=MODEL_HELP)] = None
    model: Annotated[Text, option(shared_help.SAME_MODEL, MODEL)] = None
    model_impl: Annotated[ModelImplName, option(shared_help.MODEL_IMPL, MODEL)] = "auto"
    download: Annotated[bool, option(DOWNLOAD_HELP, MODEL)] = False
    revision: Annotated[Text, option(REVISION_HELP, MODEL)] = None
    served_model_name: Annotated[Strings, option(NAME_HELP, MODEL)] = None
    max_model_len: Annotated[Whole, option(shared_help.MAX_MODEL_LEN, MODEL)] = None
    dtype: Annotated[DTypeName, option(shared_help.DTYPE, MODEL)] = "auto"
    tool_format: Annotated[str, option(TOOL_FORMAT_HELP, MODEL, metavar="auto|generic|none|NAME")] = "auto"


class ServeOptions:
    """How it is served."""

    max_waiting: Annotated[
        Whole, option("Requests that may wait on each worker; more get 429. Default: 4096.", SERVER)
    ] = None
    strict: Annotated[bool, option("Refuse fields of requests that this server does not know.", SERVER)] = False
    responses: Annotated[Path | None, option("Keep /v1/responses in this SQLite file. Default: memory.", SERVER)] = None
    max_responses: Annotated[Text, option(RESPONSES_HELP, SERVER)] = None
    verbose: Annotated[bool, option("Print the engine's configuration at start-up.", SERVER)] = False
    prefill: Annotated[int, option("Workers that only prefill.", WORKERS)] = 0
    decode: Annotated[int, option("Workers that only decode.", WORKERS)] = 0
    both: Annotated[Whole, option(BOTH_HELP, WORKERS, "--both", "--workers")] = None
    listen_workers: Annotated[Text, option(LISTEN_HELP, WORKERS, metavar="HOST:PORT")] = None
    key_file: Annotated[Path | None, option(KEY_HELP, WORKERS)] = None
    launcher: Annotated[Literal["local", "ray"], option(LAUNCHER_HELP, WORKERS)] = "local"
    ray_address: Annotated[
        Text, option("Address of the Ray cluster. Default: auto, the one of this host.", WORKERS)
    ] = None
    ray_cpus: Annotated[float | None, option("CPUs that Ray keeps for each worker. Default: 1.", WORKERS)] = None
    ray_gpus: Annotated[float | None, option("GPUs that Ray keeps for each worker. Default: 0.", WORKERS)] = None
    ray_wait: Annotated[float | None, option("Seconds for Ray to find room. Default: 300.", WORKERS)] = None
    survive_restart: Annotated[Path | None, option(SURVIVE_HELP, SERVER)] = None
    transfer_plain: Annotated[bool, option(PLAIN_HELP, WORKERS)] = False
    max_workers: Annotated[
        Whole,
        option(
            "Upper bound on workers, including those added at run time. Default: "
            "those of the start, more with --listen-workers.",
            WORKERS,
        ),
    ] = None
    fleet: Annotated[Path | None, option(FLEET_HELP, WORKERS)] = None
    pool: Annotated[Strings, option(POOL_HELP, WORKERS)] = None
    plan: Annotated[PlanMode | None, option(PLAN_HELP, WORKERS)] = None
    routing: Annotated[RoutingName | None, option("How the router chooses workers. Default: kv_aware.", WORKERS)] = None
    disaggregate: Annotated[
        Disaggregate | None,
        option("Whether two workers share a request: one prefills, one decodes. Default: auto.", WORKERS),
    ] = None
    local_prefill: Annotated[LocalPrefill | None, option(LOCAL_PREFILL_HELP, WORKERS)] = None
    transfer: Annotated[
        str,
        option(
            "How KV travels between workers; auto: shared memory on CPUs, else TCP.", WORKERS, metavar=f"<{TRANSFERS}>"
        ),
    ] = "auto"
    kv_codec: Annotated[CodecName, option("Compress (and round) KV; auto: if it saves time.", WORKERS)] = "none"
    on_failure: Annotated[
        OnFailure | None, option("What becomes of the requests of a lost worker. Default: retry.", WORKERS)
    ] = None
    heartbeat_timeout: Annotated[float, option("Seconds without heartbeat until a worker is killed.", WORKERS)] = 10.0
    cores_per_worker: Annotated[
        Text, option("Cores per worker: a number, or lists of CPUs 0-3/4-7. Default: an equal share.", WORKERS)
    ] = None
    core_split: Annotated[Text, option(CORE_SPLIT_HELP, WORKERS)] = None
    max_prefills_in_flight_per_worker: Annotated[Whole, option(IN_FLIGHT_HELP, WORKERS)] = None
    max_queued: Annotated[Whole, option(MAX_QUEUED_HELP, WORKERS)] = None
    max_queued_per_key: Annotated[Whole, option(shared_help.MAX_QUEUED_PER_KEY, WORKERS)] = None
    slo: Annotated[Text, option(shared_help.SLO, OBJECTIVES)] = None
    ttft_slo_ms: Annotated[Number, option(shared_help.TTFT_SLO_MS, OBJECTIVES)] = None
    tpot_slo_ms: Annotated[Number, option(shared_help.TPOT_SLO_MS, OBJECTIVES)] = None
    shape: Annotated[PresetName | None, option(SHAPE_HELP, OBJECTIVES)] = None
    speculation: Annotated[SpeculationName, option(SPECULATION_HELP, OBJECTIVES)] = "auto"
    order: Annotated[OrderName | None, option("Which waiting request goes first. Default: by --shape.", SCHEDULER)] = (
        None
    )
    budget: Annotated[
        BudgetName | None, option("What limits a step: prompts, tokens or time. Default: by --shape.", SCHEDULER)
    ] = None
    max_batched_tokens: Annotated[Whole, option(shared_help.MAX_BATCHED_TOKENS, SCHEDULER)] = None
    step_target_ms: Annotated[Number, option(shared_help.STEP_TARGET_MS, SCHEDULER)] = None
    max_num_seqs: Annotated[Whole, option(shared_help.MAX_NUM_SEQS, SCHEDULER)] = None
    max_partial_prefills: Annotated[Whole, option(shared_help.MAX_PARTIAL_PREFILLS, SCHEDULER)] = None
    max_long_partial_prefills: Annotated[Whole, option(shared_help.MAX_LONG_PARTIAL_PREFILLS, SCHEDULER)] = None
    long_prefill_threshold: Annotated[Whole, option(shared_help.LONG_PREFILL_THRESHOLD, SCHEDULER)] = None
    preemption: Annotated[
        PreemptionName | None,
        option("How a decode that loses its KV blocks gets them back. Default: recompute.", SCHEDULER),
    ] = None
    preempt_for_priority: Annotated[bool, option("Displace running requests of lower priority.", SCHEDULER)] = False
    block_size: Annotated[int, option("Tokens per KV block.", MEMORY)] = 32
    fit: Annotated[bool, option(FIT_HELP, MEMORY)] = False
    kv_cache_memory: Annotated[Text, option(KV_CACHE_HELP, MEMORY)] = None
    kv_dtype: Annotated[KVDTypeName, option(shared_help.KV_DTYPE, MEMORY)] = "auto"
    kv_host_gb: Annotated[float, option(KV_HOST_HELP, MEMORY)] = 0.0
    kv_disk: Annotated[
        Path | None, option("Folder that keeps KV over restarts, such as ~/.cache/kv. Default: none.", MEMORY)
    ] = None
    kv_disk_gb: Annotated[Number, option(shared_help.KV_DISK_GB, MEMORY)] = None
    kv_disk_codec: Annotated[DiskCodecName, option(shared_help.KV_DISK_CODEC, MEMORY)] = "none"
    prefix_cache: Annotated[bool, option("Reuse the KV of equal prompt beginnings.", MEMORY)] = True
    explain_misses: Annotated[ExplainMisses, option(MISSES_HELP, MEMORY)] = "off"
    device: Annotated[DeviceName, option(shared_help.DEVICE, MACHINE)] = "auto"
    threads: Annotated[Whole, option("Compute threads per worker. Default: one per physical core.", MACHINE)] = None
    cores: Annotated[Text, option(shared_help.CORES, MACHINE)] = None
    instruction_set: Annotated[InstructionSetName, option(ISA_HELP, MACHINE, *KERNEL_NAMES)] = "auto"
    quantize: Annotated[QuantizeName, option(QUANTIZE_HELP, MACHINE)] = "none"
