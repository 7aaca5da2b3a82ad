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

    def read(self, name: str) -> torch.Tensor:
        if name in self._directory.packed:
            return self.read_quantized(name).dequantize()
        if name not in self._directory.fp8:
            return self._stored(name)
        target = torch.empty(self._directory.tensors[name].shape)
        self.read_rows(name, target)
        return target

    def read_rows(self, name: str, target: torch.Tensor, first_row: int = 0) -> None:
        if (weight := self._directory.fp8.get(name)) is not None:
            read_fp8(weight, self._stored(weight.values), self._stored(weight.scale), target, first_row)
        else:
            target.copy_(self.read(name)[first_row : first_row + len(target)])

    def read_quantized(self, name: str) -> QuantizedWeight:
        packed = self._directory.packed[name]
        parts = {suffix: self._stored(part) for suffix, part in packed.parts.items() if suffix not in GROUP_INDICES}
        return unpack_weight(packed, parts)

    def _stored(self, part: str) -> torch.Tensor:
        """A tensor by its name in the files, as it is stored."""
        return read_tensor(self._directory.file_of(part), part)

    def release(self, name: str) -> None:
        for part in self._directory.parts_of(name):
            self._directory.file_of(part).release(part)
