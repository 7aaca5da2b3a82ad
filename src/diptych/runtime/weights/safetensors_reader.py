"""Reads tensors of safetensors files, as views of the mapped files."""

import torch

from diptych.control.errors import UnsupportedModelError
from diptych.runtime.dtypes import DTYPES_BY_CODE, STORED_DTYPES_BY_CODE
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
        file = self._directory.file_of(name)
        dtype = file.entries[name].dtype
        if dtype not in DTYPES_BY_CODE:
            raise UnsupportedModelError(
                f"{file.path}: tensor {name} has dtype {dtype}; supported: {', '.join(DTYPES_BY_CODE)}", param="dtype"
            )
        tensor = read_tensor(file, name)
        return tensor if index is None else tensor[index]

    def read_quantized(self, name: str, index: int | None = None) -> QuantizedWeight:
        packed = self._directory.packed[name]
        assert (index is None) == (packed.count is None), "one weight is read at once"
        parts = {
            suffix: self._stored(part, index) for suffix, part in packed.parts.items() if suffix not in GROUP_INDICES
        }
        return unpack_weight(packed, parts)

    def _stored(self, part: str, index: int | None) -> torch.Tensor:
        """A tensor by its name in the files, or one entry of it."""
        tensor = read_tensor(self._directory.file_of(part), part)
        return tensor if index is None else tensor[index]

    def release(self, name: str, index: int | None = None) -> None:
        for part in self._directory.parts_of(name):
            self._directory.file_of(part).release(part, index)
