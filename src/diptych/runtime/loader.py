"""Turns the tensors of a checkpoint directory into weights in the wanted dtype, one tensor at a time.

Owns: finding files, converting, fusing, and every complaint about a tensor. Never knows a model family: the families
ask for names and shapes. At any moment at most one fused weight exists twice.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.model_config import ModelConfig
from diptych.runtime.safetensors_file import DTYPES, SafetensorsFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers that old exports hold; computed from the config instead

Progress = Callable[[int, int], None]  # bytes done, bytes in total


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


def resolve_dtype(wanted: str, config: ModelConfig, checkpoint: Checkpoint) -> tuple[torch.dtype, str]:
    """(dtype to compute in, a note for people or ""). wanted: auto | bfloat16 | float32.

    auto takes the checkpoint's own; float16 becomes bfloat16, which CPUs compute fast.
    """
    choices = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if wanted != "auto" and wanted not in choices:
        raise ConfigError(f"dtype is {wanted!r}; auto, bfloat16 or float32", param="dtype")
    own = config.dtype
    if own is None:
        name = checkpoint.names[0] if checkpoint.names else ""
        entry = checkpoint.file_of(name).entries[name]
        own = str(DTYPES.get(entry.dtype, torch.float32)).removeprefix("torch.")
    chosen = wanted if wanted != "auto" else ("bfloat16" if own == "float16" else own)
    note = f"the checkpoint is {own}; converted to {chosen}" if own == "float16" else ""
    return choices[chosen], note


class Weights:
    """Hands out a checkpoint's tensors, each once, converted and on the device; ``finish`` complains of leftovers."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._left = dict.fromkeys(checkpoint.names)
        self._num_bytes = checkpoint.num_bytes
        self._done_bytes = 0

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """One tensor of exactly this shape, in memory of its own."""
        target = torch.empty(tuple(shape), dtype=self._dtype, device=self._device)
        self._copy(name, target)
        return target

    def fused(self, names: Sequence[str], rows: Sequence[int], *shape: int) -> torch.Tensor:
        """Tensors of shape [rows[i], *shape] stacked along the first dimension."""
        target = torch.empty((sum(rows), *shape), dtype=self._dtype, device=self._device)
        for name, part in zip(names, target.split(list(rows)), strict=True):
            self._copy(name, part)
        return target

    def ignore(self, name: str) -> None:
        """A tensor that the checkpoint may hold but the model does not need."""
        self._left.pop(name, None)

    def finish(self) -> None:
        """Raise ConfigError when tensors are left that nobody asked for."""
        left = [name for name in self._left if not name.endswith(IGNORED_SUFFIXES)]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            file = self._checkpoint.file_of(left[0]).path
            raise ConfigError(f"{file}: tensor {left[0]}{more} is not part of this architecture", param="model")
        if self._progress is not None:
            self._progress(self._num_bytes, self._num_bytes)

    def _copy(self, name: str, target: torch.Tensor) -> None:
        file = self._checkpoint.file_of(name)
        entry = file.entries[name]
        if entry.shape != tuple(target.shape):
            raise ConfigError(
                f"{file.path}: tensor {name} has shape {list(entry.shape)}; config.json asks for {list(target.shape)}",
                param="model",
            )
        if name not in self._left:
            raise ConfigError(f"tensor {name} was asked for twice")
        target.copy_(file.tensor(name))
        file.release(name)
        del self._left[name]
        self._done_bytes += entry.end - entry.start
        if self._progress is not None:
            self._progress(self._done_bytes, self._num_bytes)
