"""What the commands declare their options with."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import typer

from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS
from diptych.diagnosis.objectives_presets import parse_objectives
from diptych.runtime.models.model_place import find_model, name_of
from diptych.serving.link.engine_options import BUNDLED_MODEL

LOCAL_URL = "http://127.0.0.1:8000"  # where diptych serve listens unless it is told otherwise
GB = 10**9
MOST_GB = 10**6
DEFAULT_DISK_GB = 10.0

Text: TypeAlias = str | None
Whole: TypeAlias = int | None
Number: TypeAlias = float | None
Switch: TypeAlias = bool | None
Strings: TypeAlias = list[str] | None

# What an option's help says in more than one command.
SERVER_KEY_HELP = "API key of the server. Default: none."
ARRIVALS_HELP = "Arrival process: poisson, gamma, constant, on_off or closed. Default: poisson."
JSON_DOCUMENT_HELP = "Print one JSON document to standard output."
JSON_OBJECT_HELP = "Print one JSON object to standard output."
SETTING_HELP = "Any setting, PATH=VALUE. Repeatable. Default: none."
ATTAINMENT_HELP = "Share of requests that must meet the objectives: 0.9 or 90. Default: 0.9."
CORES_HELP = "CPUs to compute on, such as 0-3: one thread each. Default: all that are allowed."
COST_HELP = "Step durations: auto, tables, operators, roofline, or a file. Default: auto."
DEVICE_HELP = "Device to compute on; auto: a GPU if there is one."
DRAIN_TIMEOUT_HELP = "Seconds that running requests get after SIGTERM."
DTYPE_HELP = "Arithmetic of the model; auto: the checkpoint's own."
SIMULATED_ENGINE_HELP = "Engine whose host and front end are simulated: diptych, vllm-0.12, ... Default: by --cost."
FIND_GOODPUT_HELP = "Search the highest rate that meets the objectives."
LISTEN_ADDRESS_HELP = "Address to listen on. 0.0.0.0: reachable from everywhere."
KERNELS_HELP = "Kernels that compute; auto: the best of this machine."
KV_BITS_HELP = "Bits of a number in the KV cache: 16 or 8. Default: 16."
KV_DISK_CODEC_HELP = "How KV lies on disk; int8: half the bytes, rounded."
KV_DISK_GB_HELP = "Most that the folder may hold, in GB. Default: 10."
LONG_PREFILL_THRESHOLD_HELP = "Uncached tokens beyond which a prompt is long (0: none is). Default: by --shape."
MAX_BATCHED_TOKENS_HELP = "Most tokens of one step. Default: by --shape."
MAX_LONG_PARTIAL_PREFILLS_HELP = "Partly computed long prompts at once (0: no limit). Default: by --shape."
MAX_MODEL_LEN_HELP = "Context length. Default: the model's own."
MAX_NUM_SEQS_HELP = "Requests that run at once on each worker. Default: 256."
MAX_PARTIAL_PREFILLS_HELP = "Partly computed prompts at once (0: no limit). Default: by --shape."
MAX_QUEUED_PER_KEY_HELP = "Requests of one API key that may wait in the queue (0: no limit). Default: 0."
SERVED_MODEL_HELP = "Served model. Default: the server's first."
SAME_MODEL_HELP = "The same as MODEL. Default: MODEL."
OUTPUT_TOKENS_HELP = "Mean length of an answer in tokens. Default: 128."
PORT_HELP = "Port; 0 picks a free one."
PROMPT_TOKENS_HELP = "Mean length of a prompt in tokens. Default: 512."
KV_DTYPE_HELP = "int8 halves the KV cache: 8 bits, a scale per token and head; on a CPU. auto: as --dtype."
QUANTIZE_AS_SERVE_HELP = "Quantise the checkpoint's weights to 8 or 4 bits at load, as serve does."
RATE_HELP = "Requests per second. Default: 1, or the trace's."
REPORT_HELP = "Write a page with charts (HTML) to this file. Default: not written."
STEP_TARGET_MS_HELP = "Step time of --budget slo in milliseconds, without TPOT objectives. Default: 100."
TEMPERATURE_HELP = "Sampling temperature; 0 takes the likeliest token each time."
THREADS_HELP = "Compute threads. Default: one per physical core."
TOLERANCE_HELP = "Relative distance of two rates at which the search ends. Default: 0.05."
TPOT_OF_SLO_HELP = "The same as --slo tpot=...ms. Default: that of --slo."
TPOT_SLO_MS_HELP = "TPOT objective in milliseconds, for requests that name none. Default: none."
TRACE_HELP = "Trace: azure-conv, mooncake-conversation, or a file. Default: random lengths."
TTFT_OF_SLO_HELP = "The same as --slo ttft=...ms. Default: that of --slo."
TTFT_SLO_MS_HELP = "TTFT objective in milliseconds, for requests that name none. Default: none."
WEIGHT_BITS_HELP = "Bits of a weight on a GPU. Default: the checkpoint's."

KERNEL_NAMES = ("--kernels", "--isa")  # the second is the old name


def option(help_text: str, panel: str, *names: str, **settings: Any) -> Any:
    """An option in one panel of a command's help."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **settings)


def takes(*options: type) -> Callable[[Callable[[dict[str, Any]], None]], Callable[..., None]]:
    """Makes a command of a function of the values of many options by name. options: classes whose annotated attributes
    declare them, with their defaults."""
    of_class = [get_type_hints(declared, include_extras=True) for declared in options]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(declared, name), annotation=hint)
        for declared, hints in zip(options, of_class, strict=True)
        for name, hint in hints.items()
    ]

    def decorate(function: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        @wraps(function)
        def command(**given: Any) -> None:
            function(given)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {name: hint for hints in of_class for name, hint in hints.items()}
        return command

    return decorate


def picked(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The values of these options, for a record that has fields of the same names."""
    return {name: given[name] for name in names}


SLO_HELP = "Latency objectives, such as ttft=300ms,tpot=50ms, or a preset such as mlperf-llama3.1-8b. Default: none."


def with_objectives(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a command's options with those of ``--slo`` as ttft_slo_ms and tpot_slo_ms. Raises ConfigError for
    an objective that is given twice."""
    values = {name: value for name, value in given.items() if name != "slo"}
    if given.get("slo") is None:
        return values
    slo = parse_objectives(given["slo"])
    for name, nanoseconds in (("ttft_slo_ms", slo.ttft_ns), ("tpot_slo_ms", slo.tpot_ns)):
        if nanoseconds is not None and values.get(name) is not None:
            raise ConfigError(f"slo is {given['slo']!r}; {name} is given, too", param="slo")
        if nanoseconds is not None:
            values[name] = nanoseconds / NS_PER_MS
    return values


def tier_memory(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of MemoryOptions for the tiers below the KV cache. Raises ConfigError."""
    host, disk, disk_gb = given["kv_host_gb"], given["kv_disk"], given["kv_disk_gb"]
    if not 0 <= host <= MOST_GB:
        raise ConfigError(f"kv_host_gb is {host}; it must be in [0, {MOST_GB}]", param="kv_host_gb")
    if disk is None:
        if disk_gb is not None:
            raise ConfigError(f"kv_disk_gb is {disk_gb}, and kv_disk names no folder", param="kv_disk_gb")
        if given["kv_disk_codec"] != "none":
            raise ConfigError(
                f"kv_disk_codec is {given['kv_disk_codec']!r}, and kv_disk names no folder", param="kv_disk_codec"
            )
        return {"host_bytes": int(host * GB)}
    if not given["prefix_cache"]:
        raise ConfigError(f"kv_disk is {str(disk)!r}; it needs the prefix cache, which is off", param="kv_disk")
    disk_gb = DEFAULT_DISK_GB if disk_gb is None else disk_gb
    if not 0 < disk_gb <= MOST_GB:
        raise ConfigError(f"kv_disk_gb is {disk_gb}; it must be in (0, {MOST_GB}]", param="kv_disk_gb")
    return {
        "host_bytes": int(host * GB),
        "disk": str(disk.expanduser().absolute()),
        "disk_bytes": int(disk_gb * GB),
        "disk_codec": given["kv_disk_codec"],
    }


def model_path(model: str | Path | None) -> Path:
    """The directory or GGUF file that was asked for, or the bundled directory. Raises ConfigError."""
    return find_model(model or BUNDLED_MODEL)


def model_name(path: Path) -> str:
    """What clients call the model at this path, unless they are given another name."""
    return name_of(path)
