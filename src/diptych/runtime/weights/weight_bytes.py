"""How much memory the weights of a checkpoint take once a CPU worker has loaded them, before any is read.

Imports no torch: the front end sizes the KV cache by what is left.
"""

import math
from pathlib import Path

from diptych.control.errors import ConfigError
from diptych.runtime.dtypes import DTYPES
from diptych.runtime.models.decoder import DecoderConfig
from diptych.runtime.models.experts import CORRECTION, ROUTERS
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.weights.checkpoint import open_checkpoint, resolve_dtype_name
from diptych.runtime.weights.stored_tensor import StoredTensor
from diptych.runtime.weights.weight_format import QUANTIZATIONS

WIDE = (CORRECTION, ".sinks")  # the ends of names of vectors in fp32, whatever dtype is computed in
CONVOLUTION = ".conv.conv.weight"  # the end of names of weights that stay in floating point
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def loaded_weight_bytes(model: str | Path, dtype: str, quantize: str, model_impl: str = "auto") -> int:
    """Bytes of all weights in the formats that ``dtype`` and ``quantize`` (a name in QUANTIZATIONS) give them.

    An embedding in floating point that the lm_head shares is there twice: as rows to look up, and packed to multiply.
    """
    config = read_model_config(model, model_impl)
    checkpoint, quantization = open_checkpoint(config), QUANTIZATIONS[quantize]
    itemsize = DTYPES[resolve_dtype_name(dtype, config, checkpoint)[0]].itemsize
    if not isinstance(config, DecoderConfig):  # transformers keeps each tensor once, in one dtype
        return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()) * itemsize
    total = 0
    for name, tensor in checkpoint.tensors.items():
        if _is_left_out(name, config):
            continue
        is_vocabulary = name in (EMBEDDING, HEAD)
        if len(tensor.shape) < 2 or name.endswith(("bias", CONVOLUTION)):
            total += math.prod(tensor.shape) * (4 if name.endswith(WIDE) else itemsize)
            continue
        rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        is_router = name.removesuffix(".weight").endswith(ROUTERS)
        if is_router and config.experts is not None and config.experts.is_wide:
            total += rows * columns * 4
            continue
        if _is_transposed(name, tensor, config):
            rows, columns = rows // tensor.shape[1] * columns, tensor.shape[1]
        number = None if is_router else tensor.format or quantization.format_of(columns, is_vocabulary=is_vocabulary)
        if number is not None:
            total += number.num_bytes(rows, columns)
        else:
            is_shared = is_vocabulary and not {EMBEDDING, HEAD} <= checkpoint.tensors.keys()
            total += rows * columns * itemsize * (2 if is_shared else 1)
    return total


def scratch_bytes(model: str | Path, dtype: str, num_tokens: int, model_impl: str = "auto") -> int:
    """Bytes that a worker needs beside its weights to compute this many tokens of a mixture at once: what each expert
    of each token is given, and gives (0 without experts, and where transformers computes: what it takes is not
    known)."""
    config = read_model_config(model, model_impl)
    if not isinstance(config, DecoderConfig) or config.experts is None:
        return 0
    itemsize = DTYPES[resolve_dtype_name(dtype, config, open_checkpoint(config))[0]].itemsize
    pairs = num_tokens * config.experts.routing.top_k
    return pairs * (config.hidden_size + config.experts.intermediate_size) * itemsize


def _is_left_out(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor is of a layer for drafts, which is not loaded."""
    words = name.split(".")
    return name.startswith("model.layers.") and words[2].isdecimal() and int(words[2]) >= config.num_layers


def _is_transposed(name: str, tensor: StoredTensor, config: DecoderConfig) -> bool:
    """Whether the weights of all experts in a tensor have their columns first."""
    is_one_of_all = len(tensor.shape) == 3 and not name.endswith(".weight")
    return is_one_of_all and tensor.format is None and config.experts is not None and config.experts.is_interleaved


def memory_beside_weights(model: str | Path, weight_bytes: int, available_bytes: int) -> int:
    """Bytes that are left. Raises ConfigError where the weights do not fit."""
    if weight_bytes >= available_bytes:
        raise ConfigError(
            f"the weights of {model} take {weight_bytes / 2**30:.1f} GiB; {available_bytes / 2**30:.1f} GiB of memory "
            "are available (quantize: int8 halves them, int4 quarters them)",
            param="model",
        )
    return available_bytes - weight_bytes
