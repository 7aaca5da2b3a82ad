"""Gives the tensors of a safetensors file in place: 8 bytes of header length, a JSON header, then the data.

The file is mapped, not read: a tensor costs memory only for the pages that are touched, and ``release`` gives those
back. Never writes to a file, never interprets a tensor's name, and never imports torch.
"""

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.control.errors import ConfigError
from diptych.runtime.dtypes import STORED_DTYPES_BY_CODE

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
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file", param="model") from None
        except (OSError, ValueError) as error:
            raise self._broken(f"cannot be mapped ({error})") from None
        self.entries = self._read_header()

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor."""
        entry = self.entries[name]
        return memoryview(self._map)[entry.start : entry.end]

    def release(self, name: str) -> None:
        """Give back the memory of the pages that only this tensor touched; later reads fetch them again."""
        entry = self.entries[name]
        start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = entry.end // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0 and (advice := getattr(mmap, "MADV_DONTNEED", None)) is not None:
            self._map.madvise(advice, start, length)

    def _read_header(self) -> dict[str, TensorEntry]:
        size = len(self._map)
        length = int.from_bytes(self._map[:8], "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise self._broken(f"its header claims {length} bytes of a file of {size}: truncated, or not safetensors")
        try:
            header: dict[str, Any] = json.loads(self._map[8 : 8 + length])
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
