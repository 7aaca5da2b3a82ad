"""How much memory the weights of a checkpoint take once a CPU worker has loaded them, before any is read.

Imports no torch: the front end sizes the KV cache by what is left.
"""

import math
from pathlib import Path

from diptych.control.errors import ConfigError
from diptych.runtime.dtypes import DTYPES
from diptych.runtime.models.experts import ROUTERS
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.weights.checkpoint import open_checkpoint, resolve_dtype_name
from diptych.runtime.weights.weight_format import QUANTIZATIONS

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def loaded_weight_bytes(model: str | Path, dtype: str, quantize: str, model_impl: str = "auto") -> int:
    """Bytes of all weights in the formats that ``dtype`` and ``quantize`` (a name in QUANTIZATIONS) give them.

    An embedding in floating point that the lm_head shares is there twice: as rows to look up, and packed to multiply.
    """
    config = read_model_config(model, model_impl)
    checkpoint, quantization = open_checkpoint(config), QUANTIZATIONS[quantize]
    itemsize = DTYPES[resolve_dtype_name(dtype, config, checkpoint)[0]].itemsize
    total = 0
    for name, tensor in checkpoint.tensors.items():
        is_vocabulary = name in (EMBEDDING, HEAD)
        if len(tensor.shape) < 2:
            total += tensor.shape[0] * itemsize if tensor.shape else itemsize
            continue
        rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        is_router = name.removesuffix(".weight").endswith(ROUTERS)
        number = None if is_router else tensor.format or quantization.format_of(columns, is_vocabulary=is_vocabulary)
        if number is not None:
            total += number.num_bytes(rows, columns)
        else:
            is_shared = is_vocabulary and not {EMBEDDING, HEAD} <= checkpoint.tensors.keys()
            total += rows * columns * itemsize * (2 if is_shared else 1)
    return total


def memory_beside_weights(model: str | Path, weight_bytes: int, available_bytes: int) -> int:
    """Bytes that are left. Raises ConfigError where the weights do not fit."""
    if weight_bytes >= available_bytes:
        raise ConfigError(
            f"the weights of {model} take {weight_bytes / 2**30:.1f} GiB; {available_bytes / 2**30:.1f} GiB of memory "
            "are available (quantize: int8 halves them, int4 quarters them)",
            param="model",
        )
    return available_bytes - weight_bytes
