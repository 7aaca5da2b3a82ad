"""The tensors of a checkpoint directory, wherever they lie, and the dtype that they are computed in.

Owns finding and checking files. Never reads a tensor's data and never imports torch.
"""

import json
from pathlib import Path

from diptych.control.errors import ConfigError
from diptych.runtime.dtypes import COMPUTE_DTYPES, DTYPES_BY_CODE
from diptych.runtime.model_config import ModelConfig
from diptych.runtime.safetensors_file import SafetensorsFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint:
    """All tensors of a model directory, wherever they lie."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file_of: dict[str, SafetensorsFile] = {}
        files = [SafetensorsFile(path) for path in self._paths()]
        for file in files:
            for name in file.entries:
                if name in self._file_of:
                    raise ConfigError(
                        f"tensor {name} lies in both {self._file_of[name].path} and {file.path}", param="model"
                    )
                self._file_of[name] = file
        self._check_index()

    def _paths(self) -> list[Path]:
        if (index := self.directory / INDEX).exists():
            return [self.directory / name for name in sorted(set(self._weight_map(index).values()))]
        if (single := self.directory / SINGLE).exists():
            return [single]
        raise ConfigError(
            f"{self.directory}: holds neither {SINGLE} nor {INDEX}; weights in other formats must be converted first",
            param="model",
        )

    def _weight_map(self, index: Path) -> dict[str, str]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index}: has no valid weight_map ({error!r})", param="model") from None

    def _check_index(self) -> None:
        index = self.directory / INDEX
        if not index.exists():
            return
        for name, file in self._weight_map(index).items():
            if name not in self._file_of:
                raise ConfigError(f"{self.directory / file}: tensor {name} is missing; {index} promises it")

    @property
    def names(self) -> tuple[str, ...]:
        """All tensor names, in file order."""
        return tuple(self._file_of)

    def file_of(self, name: str) -> SafetensorsFile:
        """The file that holds the tensor. Raises ConfigError when none does."""
        if name not in self._file_of:
            raise ConfigError(f"{self.directory}: tensor {name} is missing in the checkpoint", param="model")
        return self._file_of[name]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            entry.end - entry.start
            for file in {id(file): file for file in self._file_of.values()}.values()
            for entry in file.entries.values()
        )


def resolve_dtype_name(wanted: str, config: ModelConfig, checkpoint: Checkpoint) -> tuple[str, str]:
    """(dtype to compute in, a note for people or ""). wanted: auto | bfloat16 | float32.

    auto takes the checkpoint's own; float16 becomes bfloat16, which CPUs compute fast.
    """
    if wanted != "auto" and wanted not in COMPUTE_DTYPES:
        raise ConfigError(f"dtype is {wanted!r}; auto, bfloat16 or float32", param="dtype")
    own = config.dtype
    if own is None:
        name = checkpoint.names[0] if checkpoint.names else ""
        dtype = DTYPES_BY_CODE.get(checkpoint.file_of(name).entries[name].dtype)
        own = dtype.name if dtype else "float32"
    chosen = wanted if wanted != "auto" else ("bfloat16" if own == "float16" else own)
    note = f"the checkpoint is {own}; converted to {chosen}" if own == "float16" else ""
    return chosen, note
