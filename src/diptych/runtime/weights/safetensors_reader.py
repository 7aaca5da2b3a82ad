"""Reads tensors of safetensors files, as views of the mapped files."""

import torch

from diptych.runtime.dtypes import STORED_DTYPES_BY_CODE
from diptych.runtime.quantization.fp8_values import read_fp8
from diptych.runtime.quantization.packed_weight import GROUP_INDICES
from diptych.runtime.quantization.unpack import unpack_weight
from diptych.runtime.weights.quantized_weight import QuantizedWeight
from diptych.runtime.weights.safetensors_directory import SafetensorsDirectory
from diptych.runtime.weights.safetensors_file import SafetensorsFile


def read_tensor(file: SafetensorsFile, name: str) -> torch.Tensor:
    """One tensor as a view of its mapped file."""
    entry, data = file.entries[name], file.data(name)
    dtype: torch.dtype = getattr(torch, STORED_DTYPES_BY_CODE[entry.dtype].name)
    if not data:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(entry.shape)


class SafetensorsReader:
    """A TensorReader of safetensors files."""

    def __init__(self, directory: SafetensorsDirectory) -> None:
        self._directory = directory

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        if name in self._directory.packed:
            return self.read_quantized(name, index).dequantize()
        if name not in self._directory.fp8:
            return self._stored(name, index)
        shape = self._directory.tensors[name].shape
        assert index is not None or len(shape) == 2, "several matrices in FP8 are read one by one"
        target = torch.empty(shape[-2:])
        self.read_rows(name, target, index=index)
        return target

    def read_rows(self, name: str, target: torch.Tensor, first_row: int = 0, index: int | None = None) -> None:
        if (weight := self._directory.fp8.get(name)) is not None:
            values, scale = self._stored(weight.values, index), self._stored(weight.scale, index)
            read_fp8(weight, values, scale, target, first_row)
        else:
            target.copy_(self.read(name, index)[first_row : first_row + len(target)])

    def read_quantized(self, name: str, index: int | None = None) -> QuantizedWeight:
        packed = self._directory.packed[name]
        assert (index is None) == (packed.count is None), "one weight is read at once"
        parts = {
            suffix: self._stored(part, index) for suffix, part in packed.parts.items() if suffix not in GROUP_INDICES
        }
        return unpack_weight(packed, parts)

    def _stored(self, part: str, index: int | None = None) -> torch.Tensor:
        """A tensor by its name in the files, or one entry of it, as it is stored."""
        tensor = read_tensor(self._directory.file_of(part), part)
        return tensor if index is None else tensor[index]

    def release(self, name: str, index: int | None = None) -> None:
        for part in self._directory.parts_of(name):
            self._directory.file_of(part).release(part, index)
