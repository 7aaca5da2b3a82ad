"""The KV cache of a worker by its options: what a block takes, and whether windows are freed. Imports no torch."""

from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.models.registry import read_model_config
from diptych.serving.link.engine_options import EngineOptions


def kv_geometry_of(options: EngineOptions) -> KVGeometry:
    """The cache of a worker with these options. Raises ConfigError or UnsupportedModelError for what it would refuse,
    too."""
    return read_kv_geometry(options.model, options.device.dtype, options.memory.block_size, windows_below(options))


def windows_below(options: EngineOptions) -> int:
    """Blocks that lie before windows of fewer tokens than that are freed (0: all layers keep all tokens)."""
    memory = options.memory
    if not memory.frees_windows:
        return 0
    return memory.windows_below or longest_sequence_of(options)


def longest_sequence_of(options: EngineOptions) -> int:
    """Tokens of the longest prompt and answer of a worker, as far as its options say."""
    return options.max_model_len or read_model_config(options.model).max_position_embeddings
