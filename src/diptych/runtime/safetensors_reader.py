"""Reads tensors of safetensors files, as views of the mapped files."""

import torch

from diptych.runtime.dtypes import DTYPES_BY_CODE
from diptych.runtime.quantized_weight import QuantizedWeight
from diptych.runtime.safetensors_directory import SafetensorsDirectory
from diptych.runtime.safetensors_file import SafetensorsFile


def read_tensor(file: SafetensorsFile, name: str) -> torch.Tensor:
    """One tensor as a view of its mapped file. Raises UnsupportedModelError as SafetensorsFile.data does."""
    entry, data = file.entries[name], file.data(name)
    dtype: torch.dtype = getattr(torch, DTYPES_BY_CODE[entry.dtype].name)
    if not data:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(entry.shape)


class SafetensorsReader:
    """See TensorReader."""

    def __init__(self, directory: SafetensorsDirectory) -> None:
        self._directory = directory

    def read(self, name: str) -> torch.Tensor:
        """See TensorReader."""
        return read_tensor(self._directory.file_of(name), name)

    def read_quantized(self, name: str) -> QuantizedWeight:
        """See TensorReader."""
        raise AssertionError(f"{name} is in floating point")

    def release(self, name: str) -> None:
        """See TensorReader."""
        self._directory.file_of(name).release(name)
