"""The tensors of a model, whatever files hold them, and the dtype that they are computed in.

A format is a Checkpoint here, which knows what there is, and a TensorReader (tensor_reader.py), which reads values:
this side imports no torch, so that the front end can size memory and refuse what a worker would refuse.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from diptych.control.errors import ConfigError
from diptych.runtime.dtypes import COMPUTE_DTYPES, DTYPES_BY_CODE
from diptych.runtime.gguf.gguf_checkpoint import GgufCheckpoint
from diptych.runtime.gguf.gguf_file import is_gguf
from diptych.runtime.models.model_config import ModelConfig
from diptych.runtime.weights.safetensors_directory import SafetensorsDirectory
from diptych.runtime.weights.stored_tensor import StoredTensor


class Checkpoint(Protocol):
    """All tensors of one model. Making one reads no weight, and raises ConfigError or UnsupportedModelError for what
    cannot be read."""

    @property
    def path(self) -> Path:
        """The directory or file that people name."""
        ...

    @property
    def files(self) -> Sequence[Path]:
        """The files that hold tensors."""
        ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors by the name that the model's layers ask for (``model.layers.0.mlp.up_proj.weight``), in file order. A
        tensor that is part of a weight in whole numbers has no entry of its own."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, as stored."""
        ...

    def first_bytes(self, name: str, count: int) -> bytes:
        """At most ``count`` bytes of a tensor's stored values, to tell checkpoints apart."""
        ...


def open_checkpoint(config: ModelConfig) -> Checkpoint:
    """The checkpoint that ``config`` was read from."""
    if is_gguf(config.path):
        return GgufCheckpoint(config.path, config.attention)
    return SafetensorsDirectory(config.path, config.quantization, config.text_part)


FINGERPRINT_BYTES = 64  # of each tensor


def fingerprint(model: ModelConfig, weights: str = "") -> str:
    """Equal for the same weights, wherever they lie: tensor names, shapes, and the first bytes of each. weights: the
    formats that they are loaded in, where these must be equal, too."""
    checkpoint = open_checkpoint(model)
    digest = blake2b(repr((dataclasses.replace(model, path=Path()), weights)).encode(), digest_size=16)
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(repr((name, tensor.dtype, tensor.shape, tensor.format)).encode())
        digest.update(checkpoint.first_bytes(name, FINGERPRINT_BYTES))
    return digest.hexdigest()


def resolve_dtype_name(wanted: str, config: ModelConfig, checkpoint: Checkpoint) -> tuple[str, str]:
    """(dtype to compute in, a note for people or ""). wanted: auto | bfloat16 | float32.

    auto takes the checkpoint's own; float16 becomes bfloat16, which CPUs compute fast.
    """
    if wanted != "auto" and wanted not in COMPUTE_DTYPES:
        raise ConfigError(f"dtype is {wanted!r}; auto, bfloat16 or float32", param="dtype")
    own = config.dtype
    if own is None:
        stored = [tensor.dtype for tensor in checkpoint.tensors.values() if tensor.format is None]
        own = next((DTYPES_BY_CODE[dtype].name for dtype in stored if dtype in DTYPES_BY_CODE), "float32")
    chosen = wanted if wanted != "auto" else ("bfloat16" if own == "float16" else own)
    note = f"the checkpoint is {own}; converted to {chosen}" if own == "float16" else ""
    return chosen, note
