"""The geometry of a checkpoint's KV cache, from its config.json and the headers of its weight files.

The front end sizes a pool with it before any worker runs. Never imports torch.
"""

from pathlib import Path

from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.kv_cache.layer_groups import deal
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.weights.checkpoint import open_checkpoint, resolve_dtype_name


def read_kv_geometry(
    model: str | Path,
    dtype: str,
    block_size: int,
    windows_below: int = 0,
    *,
    kv_dtype: str = "auto",
    model_impl: str = "auto",
) -> KVGeometry:
    """The geometry of a checkpoint directory's KV cache; dtype: auto | bfloat16 | float32. windows_below: blocks that
    lie before windows of fewer tokens than that are free for other sequences (0: all layers keep all tokens). kv_dtype:
    auto (as dtype) | int8. model_impl: see read_model_config.

    Raises ConfigError or UnsupportedModelError for what a worker would refuse, too.
    """
    config = read_model_config(model, model_impl)
    name, _ = resolve_dtype_name(dtype, config, open_checkpoint(config))
    layers = deal(config.attention.layers, block_size, windows_below) if windows_below else None
    return KVGeometry.of(config.attention, block_size, name if kv_dtype == "auto" else kv_dtype, layers)
