"""Gives the tensors of a safetensors file in place: 8 bytes of header length, a JSON header, then the data.

Never interprets a tensor's name, and never imports torch.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.control.errors import ConfigError
from diptych.runtime.dtypes import STORED_DTYPES_BY_CODE
from diptych.runtime.weights.mapped_file import MappedFile
from diptych.runtime.weights.stored_tensor import matrix_range

MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: bytes [start, end) of the file. dtype: the code in the file's header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One mapped file. The buffers it gives are views of the map and keep it alive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        self.entries = self._read_header()

    def rename(self, name_of: Callable[[str], str | None]) -> None:
        """Know each tensor by another name from now on; None: not at all."""
        named = [(name_of(name), entry) for name, entry in self.entries.items()]
        entries = {name: entry for name, entry in named if name is not None}
        if len(entries) < sum(name is not None for name, _ in named):
            raise self._broken("two of its tensors are one tensor of the text model")
        self.entries = entries

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor."""
        entry = self.entries[name]
        return self._file.view(entry.start, entry.end)

    def release(self, name: str, index: int | None = None) -> None:
        """Give back the memory of the pages that only this tensor, or this matrix of it, touched; later reads fetch
        them again."""
        entry = self.entries[name]
        self._file.release(*matrix_range(entry.start, entry.end, entry.shape, index))

    def _read_header(self) -> dict[str, TensorEntry]:
        size = len(self._file)
        length = int.from_bytes(self._file.view(0, 8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise self._broken(f"its header claims {length} bytes of a file of {size}: truncated, or not safetensors")
        try:
            header: dict[str, Any] = json.loads(bytes(self._file.view(8, 8 + length)))
            header.pop("__metadata__", None)
            entries = {name: self._entry(name, value, 8 + length) for name, value in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._broken(f"its header is not valid ({error})") from None
        for name, entry in entries.items():
            if entry.end > size:
                raise self._broken(f"tensor {name} ends at byte {entry.end} of a file of {size}: truncated")
        return entries

    def _entry(self, name: str, value: dict[str, Any], data_start: int) -> TensorEntry:
        start, end = value["data_offsets"]
        shape = tuple(value["shape"])
        dtype = STORED_DTYPES_BY_CODE.get(value["dtype"])
        count = 1
        for extent in shape:
            count *= extent
        if not 0 <= start <= end or (dtype is not None and count * dtype.itemsize != end - start):
            raise ValueError(f"tensor {name} of shape {list(shape)} lies at bytes {start} to {end}")
        return TensorEntry(value["dtype"], shape, data_start + start, data_start + end)

    def _broken(self, why: str) -> ConfigError:
        return ConfigError(f"{self.path}: {why}", param="model")
