"""The KV cache of a worker by its options: what a block takes, and whether windows are freed. Imports no torch."""

from diptych.control.errors import ConfigError
from diptych.runtime.dtypes import INT8
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.models.registry import read_model_config
from diptych.serving.link.engine_options import EngineOptions


def kv_geometry_of(options: EngineOptions) -> KVGeometry:
    """The cache of a worker with these options. Raises ConfigError or UnsupportedModelError for what it would refuse,
    too."""
    memory = options.memory
    if memory.kv_dtype == INT8 and memory.disk_codec != "none":
        raise ConfigError(
            f"kv_disk_codec is {memory.disk_codec} and kv_dtype is {INT8}: blocks are in 8 bits already; "
            "supported: none",
            param="kv_disk_codec",
        )
    return read_kv_geometry(
        options.model,
        options.device.dtype,
        memory.block_size,
        windows_below(options),
        kv_dtype=memory.kv_dtype,
        model_impl=options.model_impl,
    )


def windows_below(options: EngineOptions) -> int:
    """Blocks that lie before windows of fewer tokens than that are freed (0: all layers keep all tokens)."""
    memory = options.memory
    if not memory.frees_windows:
        return 0
    return memory.windows_below or longest_sequence_of(options)


def longest_sequence_of(options: EngineOptions) -> int:
    """Tokens of the longest prompt and answer of a worker, as far as its options say."""
    if options.max_model_len:
        return options.max_model_len
    return read_model_config(options.model, options.model_impl).max_position_embeddings
