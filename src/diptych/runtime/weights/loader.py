"""Turns the tensors of a checkpoint into weights in the wanted dtype, one tensor at a time.

Owns: converting, fusing, and every complaint about a tensor. Never knows a model family: the families ask for names and
shapes. At any moment at most one fused weight exists twice.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.dtypes import FP8
from diptych.runtime.models.experts import ExpertNames, ExpertsConfig, find_experts
from diptych.runtime.models.model_config import ModelConfig
from diptych.runtime.weights.checkpoint import Checkpoint, resolve_dtype_name
from diptych.runtime.weights.quantized_weight import (
    ROWS_AT_ONCE,
    QuantizedSource,
    QuantizedWeight,
    quantize_parts,
    stack,
)
from diptych.runtime.weights.stored_tensor import StoredTensor, split_index, weight_name
from diptych.runtime.weights.tensor_reader import make_reader
from diptych.runtime.weights.weight_format import WeightFormat, common_format
from diptych.runtime.weights.weight_memory import PrivateMemory, WeightMemory

IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers that old exports hold; computed from the config instead

Progress = Callable[[int, int], None]  # bytes done, bytes in total


def resolve_dtype(wanted: str, config: ModelConfig, checkpoint: Checkpoint) -> tuple[torch.dtype, str]:
    """``resolve_dtype_name`` as a torch dtype, and its note."""
    name, note = resolve_dtype_name(wanted, config, checkpoint)
    return getattr(torch, name), note


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
        self._reader = make_reader(checkpoint)
        self.dtype = dtype
        self._device = device
        self._progress = progress
        self._left = dict.fromkeys(checkpoint.tensors)
        self._taken_matrices: set[str] = set()
        self._done_bytes = 0

    def tensor(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, offset: float = 0.0
    ) -> torch.Tensor:
        """One tensor of exactly this shape, to keep. dtype: None for the model's. offset: added to each value."""
        self._take(name, tuple(shape))

        def fill(target: torch.Tensor) -> None:
            self._read(name, target)
            if offset:
                target.add_(offset)

        return self.memory.new(shape, dtype or self.dtype, fill)

    def fused(
        self, names: Sequence[str], rows: Sequence[int], *shape: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Tensors of shape [rows[i], *shape] stacked along the first dimension, to pack or to give to
        ``memory.keep``. names: whole ones, or of one matrix (see split_index). Without values (device "meta") where the
        memory is filled. dtype: None for the model's."""
        device = torch.device("meta") if self.memory.is_filled else self._device
        target = torch.empty((sum(rows), *shape), dtype=dtype or self.dtype, device=device)
        for name, part in zip(names, torch.split(target, list(rows)), strict=True):
            self._take(name, tuple(part.shape))
            if not self.memory.is_filled:
                self._read(name, part)
        return target

    def quantized(self, names: Sequence[str], rows: Sequence[int], columns: int) -> QuantizedSource | None:
        """Weights of shape [rows[i], columns] stacked along the first dimension, as the checkpoint holds them in whole
        numbers; None where it holds any of them in floating point (then see ``fused``). names: as weight_name takes
        them."""
        tensors = [weight_name(name) for name in names]
        formats = [format for tensor in tensors if (format := self._stored(tensor).format) is not None]
        if len(formats) < len(tensors):
            return None
        for tensor, count in zip(tensors, rows, strict=True):
            self._take(tensor, (count, columns))

        def read() -> QuantizedWeight:
            return stack([self._read_quantized(tensor) for tensor in tensors])

        return QuantizedSource(common_format(formats), sum(rows), columns, read)

    def rounded(self, names: Sequence[str], rows: Sequence[int], columns: int, wanted: WeightFormat) -> QuantizedSource:
        """Weights of shape [rows[i], columns] stacked along the first dimension, which become whole numbers as they are
        read. names: as weight_name takes them."""
        tensors = [weight_name(name) for name in names]
        for tensor, count in zip(tensors, rows, strict=True):
            self._take(tensor, (count, columns))

        def read() -> QuantizedWeight:
            return quantize_parts(self._parts(tensors), sum(rows), columns, wanted)

        return QuantizedSource(wanted, sum(rows), columns, read)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return name in self._checkpoint.tensors

    def is_matrix(self, name: str) -> bool:
        """Whether a tensor of the checkpoint has two dimensions."""
        return len(self._stored(name).shape) == 2

    def find_experts(self, hidden: int, experts: ExpertsConfig) -> list[ExpertNames | None]:
        """The names of the experts of each layer (None: it has none), all of them checked before one is read."""
        return find_experts(self._checkpoint.tensors, self._checkpoint.path, hidden, experts)

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors of the checkpoint are stored alike, in floating point, and hold the same values."""
        first, second = self._stored(name), self._stored(other)
        if (first.dtype, first.shape) != (second.dtype, second.shape) or first.format is not None:
            return False
        return torch.equal(self._reader.read(name), self._reader.read(other))

    def ignore(self, name: str) -> None:
        """A tensor that the checkpoint may hold but the model does not need."""
        self._left.pop(name, None)

    def ignore_all(self) -> None:
        """All tensors are read by other code."""
        self._left.clear()

    def leave_out(self, prefix: str) -> None:
        """Tensors with such names that the checkpoint may hold but the model does not need."""
        for name in [name for name in self._left if name.startswith(prefix)]:
            del self._left[name]

    def finish(self) -> None:
        """Raise ConfigError when tensors are left that the model did not ask for."""
        left = [name for name in self._left if not name.endswith(IGNORED_SUFFIXES) and not self._is_zero_bias(name)]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            path = self._stored(left[0]).path
            raise ConfigError(f"{path}: tensor {left[0]}{more} is not part of this architecture", param="model")

    def _is_zero_bias(self, name: str) -> bool:
        """Old GPTQ checkpoints have a bias of zeros in every module that is quantised."""
        weight = self._checkpoint.tensors.get(name.removesuffix("bias") + "weight")
        if not name.endswith(".bias") or weight is None or weight.format is None:
            return False
        return not bool(self._reader.read(name).any())

    def _stored(self, name: str) -> StoredTensor:
        tensor, index = split_index(name)
        if tensor not in self._checkpoint.tensors:
            raise ConfigError(f"{self._checkpoint.path}: tensor {tensor} is missing in the checkpoint", param="model")
        stored = self._checkpoint.tensors[tensor]
        return stored if index is None else stored.matrix()

    def _take(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that the tensor is there, has this shape, and was not asked for before."""
        tensor = self._stored(name)
        if tensor.shape != shape:
            raise ConfigError(
                f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}; the config asks for {list(shape)}",
                param="model",
            )
        whole, index = split_index(name)
        if name in self._taken_matrices or (index is None and whole not in self._left):
            raise ConfigError(f"tensor {name} was asked for twice")
        if index is not None:
            self._taken_matrices.add(name)
        self._left.pop(whole, None)

    def _parts(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """The rows of matrices, some at a time, as the model's dtype holds them; those of FP8 in fp32, so that they are
        rounded only once more."""
        for name in names:
            stored = self._stored(name)
            rows, columns = stored.shape
            dtype = torch.float32 if stored.dtype == FP8 else self.dtype
            for start, end in self._pieces(name, rows):
                part = torch.empty(end - start, columns, dtype=dtype)
                self._read_rows(name, part, start)
                yield part
            self._finish_reading(name)

    def _pieces(self, name: str, rows: int) -> Iterator[tuple[int, int]]:
        """First and last rows to read at once: all where the file has to be decoded whole."""
        step = ROWS_AT_ONCE if self._stored(name).format is None else rows
        return ((start, min(start + step, rows)) for start in range(0, rows, step))

    def _read_rows(self, name: str, target: torch.Tensor, first_row: int) -> None:
        """Little more of the file is in memory than these rows, and not for long."""
        whole, index = split_index(name)
        self._reader.read_rows(whole, target, first_row, index)
        self._reader.release(whole, index)

    def _read(self, name: str, target: torch.Tensor) -> None:
        if target.dim() == 2:
            for start, end in self._pieces(name, len(target)):
                self._read_rows(name, target[start:end], start)
        else:
            target.copy_(self._reader.read(*split_index(name)))
        self._finish_reading(name)

    def _read_quantized(self, name: str) -> QuantizedWeight:
        weight = self._reader.read_quantized(*split_index(name))
        self._finish_reading(name)
        return weight

    def _finish_reading(self, name: str) -> None:
        self._reader.release(*split_index(name))
        self._done_bytes += self._stored(name).num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._checkpoint.num_bytes)
