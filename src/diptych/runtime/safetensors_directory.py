"""A model directory with safetensors: which file holds which tensor. Reads headers only, and imports no torch."""

import json
from pathlib import Path

from diptych.control.errors import ConfigError
from diptych.runtime.dtypes import DTYPES_BY_CODE
from diptych.runtime.safetensors_file import SafetensorsFile
from diptych.runtime.stored_tensor import StoredTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class SafetensorsDirectory:
    """See Checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = self._paths()
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in map(SafetensorsFile, self.files):
            for name in file.entries:
                if name in self._file_of:
                    raise ConfigError(
                        f"tensor {name} lies in both {self._file_of[name].path} and {file.path}", param="model"
                    )
                self._file_of[name] = file
        self._check_index()
        self.tensors = {name: _stored(file, name) for name, file in self._file_of.items()}
        self.num_bytes = sum(tensor.num_bytes for tensor in self.tensors.values())

    def file_of(self, name: str) -> SafetensorsFile:
        """The file that holds a tensor."""
        return self._file_of[name]

    def first_bytes(self, name: str, count: int) -> bytes:
        """See Checkpoint."""
        entry = self._file_of[name].entries[name]
        return bytes(self._file_of[name].data(name)[:count]) if entry.dtype in DTYPES_BY_CODE else b""

    def _paths(self) -> list[Path]:
        if (index := self.path / INDEX).exists():
            return [self.path / name for name in sorted(set(self._weight_map(index).values()))]
        if (single := self.path / SINGLE).exists():
            return [single]
        raise ConfigError(
            f"{self.path}: holds neither {SINGLE} nor {INDEX}; weights in other formats must be converted first",
            param="model",
        )

    def _weight_map(self, index: Path) -> dict[str, str]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index}: has no valid weight_map ({error!r})", param="model") from None

    def _check_index(self) -> None:
        index = self.path / INDEX
        if not index.exists():
            return
        for name, file in self._weight_map(index).items():
            if name not in self._file_of:
                raise ConfigError(f"{self.path / file}: tensor {name} is missing; {index} promises it")


def _stored(file: SafetensorsFile, name: str) -> StoredTensor:
    entry = file.entries[name]
    return StoredTensor(file.path, entry.dtype, entry.shape, entry.end - entry.start)
