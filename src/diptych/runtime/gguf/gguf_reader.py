"""Reads the values of tensors in GGUF files, with the rows of queries and keys in the order that the layers expect."""

import torch

from diptych.runtime.gguf.gguf_checkpoint import GgufCheckpoint
from diptych.runtime.gguf.gguf_decoding import read_float, read_quantized
from diptych.runtime.weights.quantized_weight import QuantizedWeight


class GgufReader:
    """A TensorReader of GGUF files."""

    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._model = checkpoint.model

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        values, order = self._values(name, index), self._order(name)
        return values if order is None else values[order]

    def read_rows(self, name: str, target: torch.Tensor, first_row: int = 0, index: int | None = None) -> None:
        values, order, kept = self._values(name, index), self._order(name), slice(first_row, first_row + len(target))
        target.copy_(values[kept] if order is None else values[order[kept]])

    def read_quantized(self, name: str, index: int | None = None) -> QuantizedWeight:
        tensor = self._model.tensors[self._checkpoint.stored_names[name]]
        weight = read_quantized(tensor.kind, self._data(name, index), tensor.shape[-1])
        order = self._order(name)
        if order is None:
            return weight
        mins = None if weight.mins is None else weight.mins[order]
        return QuantizedWeight(weight.format, weight.values[order], weight.scales[order], mins)

    def release(self, name: str, index: int | None = None) -> None:
        self._model.release(self._checkpoint.stored_names[name], index)

    def _values(self, name: str, index: int | None) -> torch.Tensor:
        """A tensor in floating point, or one matrix of it, its rows as they are stored."""
        tensor = self._model.tensors[self._checkpoint.stored_names[name]]
        shape = tensor.shape if index is None else tensor.shape[1:]
        return read_float(tensor.kind, self._data(name, index), shape[-1]).view(shape)

    def _data(self, name: str, index: int | None) -> memoryview:
        return self._model.data(self._checkpoint.stored_names[name], index)

    def _order(self, name: str) -> torch.Tensor | None:
        """Which stored row goes where, if not each to its own place: of each head first the even rows, then the odd."""
        heads = self._checkpoint.interleaved_heads(name)
        if heads is None:
            return None
        rows = self._checkpoint.tensors[name].shape[0]
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
