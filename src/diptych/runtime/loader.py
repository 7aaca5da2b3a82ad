"""Turns the tensors of a checkpoint directory into weights in the wanted dtype, one tensor at a time.

Owns: converting, fusing, and every complaint about a tensor. Never knows a model family: the families ask for names and
shapes. At any moment at most one fused weight exists twice.
"""

from collections.abc import Callable, Sequence

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.checkpoint import Checkpoint, resolve_dtype_name
from diptych.runtime.dtypes import DTYPES_BY_CODE
from diptych.runtime.model_config import ModelConfig
from diptych.runtime.quantized_weight import QuantizedSource
from diptych.runtime.safetensors_file import SafetensorsFile
from diptych.runtime.weight_memory import PrivateMemory, WeightMemory

IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers that old exports hold; computed from the config instead

Progress = Callable[[int, int], None]  # bytes done, bytes in total


def resolve_dtype(wanted: str, config: ModelConfig, checkpoint: Checkpoint) -> tuple[torch.dtype, str]:
    """``resolve_dtype_name`` as a torch dtype, and its note."""
    name, note = resolve_dtype_name(wanted, config, checkpoint)
    return getattr(torch, name), note


def read_tensor(file: SafetensorsFile, name: str) -> torch.Tensor:
    """One tensor as a view of its mapped file. Raises UnsupportedModelError as SafetensorsFile.data does."""
    entry, data = file.entries[name], file.data(name)
    dtype: torch.dtype = getattr(torch, DTYPES_BY_CODE[entry.dtype].name)
    if not data:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(entry.shape)


class Weights:
    """Hands out a checkpoint's tensors, each once, converted and on the device; ``finish`` complains of leftovers."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        memory: WeightMemory | None = None,
    ) -> None:
        self.memory = memory or PrivateMemory(device)
        self._checkpoint = checkpoint
        self.dtype = dtype
        self._device = device
        self._progress = progress
        self._left = dict.fromkeys(checkpoint.names)
        self._num_bytes = checkpoint.num_bytes
        self._done_bytes = 0

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """One tensor of exactly this shape, to keep."""
        self._take(name, tuple(shape))
        return self.memory.new(shape, self.dtype, lambda target: self._read(name, target))

    def fused(self, names: Sequence[str], rows: Sequence[int], *shape: int) -> torch.Tensor:
        """Tensors of shape [rows[i], *shape] stacked along the first dimension, to pack or to give to
        ``memory.keep``. Without values (device "meta") where the memory is filled."""
        device = torch.device("meta") if self.memory.is_filled else self._device
        target = torch.empty((sum(rows), *shape), dtype=self.dtype, device=device)
        for name, part in zip(names, torch.split(target, list(rows)), strict=True):
            self._take(name, tuple(part.shape))
            if not self.memory.is_filled:
                self._read(name, part)
        return target

    def quantized(self, names: Sequence[str], rows: Sequence[int], columns: int) -> QuantizedSource | None:
        """Weights of shape [rows[i], columns] stacked along the first dimension, as the checkpoint holds them in whole
        numbers; None where it holds floating point (then see ``fused``). names: without ``.weight``."""
        return None

    def ignore(self, name: str) -> None:
        """A tensor that the checkpoint may hold but the model does not need."""
        self._left.pop(name, None)

    def finish(self) -> None:
        """Raise ConfigError when tensors are left that the model did not ask for."""
        left = [name for name in self._left if not name.endswith(IGNORED_SUFFIXES)]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            file = self._checkpoint.file_of(left[0]).path
            raise ConfigError(f"{file}: tensor {left[0]}{more} is not part of this architecture", param="model")

    def _take(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that the tensor is there, has this shape, and was not asked for before."""
        file = self._checkpoint.file_of(name)
        entry = file.entries[name]
        if entry.shape != shape:
            raise ConfigError(
                f"{file.path}: tensor {name} has shape {list(entry.shape)}; config.json asks for {list(shape)}",
                param="model",
            )
        if name not in self._left:
            raise ConfigError(f"tensor {name} was asked for twice")
        del self._left[name]

    def _read(self, name: str, target: torch.Tensor) -> None:
        file = self._checkpoint.file_of(name)
        entry = file.entries[name]
        target.copy_(read_tensor(file, name))
        file.release(name)
        self._done_bytes += entry.end - entry.start
        if self._progress is not None:
            self._progress(self._done_bytes, self._num_bytes)
