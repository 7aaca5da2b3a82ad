"""What can be refused of an engine's options before a process is started and torch is imported: within a second.

The worker checks the same again where it uses it. Reads the model's config and the heads of its files, no weight.
"""

import os
from pathlib import Path

from diptych.base.cgroups import ROOT, memory_limit_bytes
from diptych.base.processor import Processor, read_processor
from diptych.control.errors import ConfigError
from diptych.runtime.device.cpu_only import check_cpu_only
from diptych.runtime.device.thread_limits import allowed_threads
from diptych.runtime.models.registry import check_quantize, read_model_config
from diptych.runtime.required_packages import require_packages
from diptych.runtime.weights.checkpoint import open_checkpoint
from diptych.serving.kv_memory import kv_geometry_of
from diptych.serving.link.engine_options import EngineOptions, parse_cores

GPU = Path("/dev/nvidiactl")  # where there is one, memory may be that of a GPU


def check_start(options: EngineOptions, processor: Processor | None = None) -> None:
    """Raises ConfigError or UnsupportedModelError for what no worker could serve with."""
    require_packages()
    device, kv_cache_bytes = options.device, options.memory.kv_cache_bytes
    config = read_model_config(options.model, options.model_impl)
    check_quantize(config, device.quantize)
    open_checkpoint(config)
    if device.device != "auto":  # what that is, the worker finds out
        check_cpu_only({"quantize": device.quantize, "kv_dtype": options.memory.kv_dtype}, device.device)
    geometry = kv_geometry_of(options)
    if kv_cache_bytes is not None:
        geometry.blocks_within(kv_cache_bytes)
    if device.device == "cpu" or (device.device == "auto" and not GPU.exists()):
        cores = parse_cores(device.cores) if device.cores else None
        allowed_threads(device.threads, cores, processor or read_processor())
        check_kv_memory(kv_cache_bytes)


def check_kv_memory(kv_cache_bytes: int | None, root: Path = ROOT) -> None:
    """Raises ConfigError for a KV cache that is larger than the memory of this machine or of its container."""
    most_bytes, where = most_memory(root)
    if kv_cache_bytes is not None and kv_cache_bytes > most_bytes:
        raise ConfigError(
            f"kv_cache_bytes is {kv_cache_bytes / 2**30:,.1f} GiB; {where} has {most_bytes / 2**30:,.1f} GiB of memory",
            param="kv_cache_bytes",
        )


def most_memory(root: Path = ROOT) -> tuple[int, str]:
    """(bytes of memory that a process can have here, what limits them)."""
    total_bytes, limit_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit_bytes(root)
    if limit_bytes is not None and limit_bytes < total_bytes:
        return limit_bytes, "the control group of this process"
    return total_bytes, "this machine"
