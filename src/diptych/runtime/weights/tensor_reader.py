"""Reads the values of a checkpoint's tensors."""

from typing import Protocol

import torch

from diptych.runtime.gguf.gguf_checkpoint import GgufCheckpoint
from diptych.runtime.gguf.gguf_reader import GgufReader
from diptych.runtime.weights.checkpoint import Checkpoint
from diptych.runtime.weights.quantized_weight import QuantizedWeight
from diptych.runtime.weights.safetensors_directory import SafetensorsDirectory
from diptych.runtime.weights.safetensors_reader import SafetensorsReader


class TensorReader(Protocol):
    """The values of one checkpoint's tensors, by their names in Checkpoint.tensors. index: of one matrix in a tensor of
    several (None: all of it)."""

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """A tensor in floating point, of the dtype that is stored, or fp32 for a weight in whole numbers or FP8. May be
        a view of the file, good until ``release``."""
        ...

    def read_rows(self, name: str, target: torch.Tensor, first_row: int = 0, index: int | None = None) -> None:
        """Fill ``target`` [n, columns] with rows of a matrix, from ``first_row`` on, as ``read`` gives them."""
        ...

    def read_quantized(self, name: str, index: int | None = None) -> QuantizedWeight:
        """A weight in whole numbers, in its ``StoredTensor.format``."""
        ...

    def release(self, name: str, index: int | None = None) -> None:
        """Give back the memory that reading took; later reads fetch it again."""
        ...


def make_reader(checkpoint: Checkpoint) -> TensorReader:
    """The reader of this checkpoint's format."""
    match checkpoint:
        case SafetensorsDirectory():
            return SafetensorsReader(checkpoint)
        case GgufCheckpoint():
            return GgufReader(checkpoint)
    raise TypeError(f"no reader of {type(checkpoint).__name__}")
