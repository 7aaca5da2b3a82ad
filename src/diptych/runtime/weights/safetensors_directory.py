"""A model directory with safetensors: which file holds which tensor. Reads no weight, and imports no torch."""

import json
from pathlib import Path

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.dtypes import DTYPES_BY_CODE
from diptych.runtime.models.wrappers import TextPart
from diptych.runtime.quantization.fp8_weight import find_fp8_weights, is_unused
from diptych.runtime.quantization.packed_weight import find_packed_weights
from diptych.runtime.quantization.quantization_config import Fp8Quantization, QuantizationConfig
from diptych.runtime.weights.safetensors_file import SafetensorsFile
from diptych.runtime.weights.stored_tensor import StoredTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class SafetensorsDirectory:
    """A Checkpoint in a directory of safetensors files. packed, fp8: the weights among ``tensors`` that are in whole
    numbers and in FP8. text_part: which tensors there are, and what they are called here (None: all, as they are
    stored)."""

    def __init__(
        self,
        path: Path,
        quantization: QuantizationConfig | Fp8Quantization | None = None,
        text_part: TextPart | None = None,
    ) -> None:
        self.path = path
        self._text_part = text_part
        self.files = self._paths()
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in map(SafetensorsFile, self.files):
            file.rename(self._name)
            for name in file.entries:
                if name in self._file_of:
                    raise ConfigError(
                        f"tensor {name} lies in both {self._file_of[name].path} and {file.path}", param="model"
                    )
                self._file_of[name] = file
        self._check_index()
        self.packed = (
            find_packed_weights(self._file_of, quantization) if isinstance(quantization, QuantizationConfig) else {}
        )
        self.fp8 = find_fp8_weights(self._file_of, quantization) if isinstance(quantization, Fp8Quantization) else {}
        self.tensors = self._tensors(isinstance(quantization, Fp8Quantization))
        self._check_dtypes()
        self.num_bytes = sum(tensor.num_bytes for tensor in self.tensors.values())

    def file_of(self, name: str) -> SafetensorsFile:
        """The file that holds a tensor, by its name in the file."""
        return self._file_of[name]

    def parts_of(self, name: str) -> tuple[str, ...]:
        """The names in the files of all that is stored of a tensor."""
        if name in self.fp8:
            return self.fp8[name].values, self.fp8[name].scale
        return tuple(self.packed[name].parts.values()) if name in self.packed else (name,)

    def first_bytes(self, name: str, count: int) -> bytes:
        parts = [self._file_of[part].data(part)[:count] for part in self.parts_of(name)]
        return b"".join(parts)[:count]

    def _name(self, stored: str) -> str | None:
        return stored if self._text_part is None else self._text_part.name_of(stored)

    def _tensors(self, is_fp8: bool) -> dict[str, StoredTensor]:
        weight_of = {part: name for name in (*self.packed, *self.fp8) for part in self.parts_of(name)}
        stored = [name for name in self._file_of if not (is_fp8 and is_unused(name, self.fp8))]
        return {name: self._stored(name) for name in dict.fromkeys(weight_of.get(name, name) for name in stored)}

    def _check_dtypes(self) -> None:
        """Refuse tensors that no reader has, before memory is taken for any."""
        for name, tensor in self.tensors.items():
            if tensor.format is None and tensor.dtype not in DTYPES_BY_CODE and name not in self.fp8:
                raise UnsupportedModelError(
                    f"{tensor.path}: tensor {name} has dtype {tensor.dtype}; supported: {', '.join(DTYPES_BY_CODE)}, "
                    "and others where quantization_config says what they mean",
                    param="dtype",
                )

    def _stored(self, name: str) -> StoredTensor:
        entries = [self._file_of[part].entries[part] for part in self.parts_of(name)]
        num_bytes = sum(entry.end - entry.start for entry in entries)
        if (packed := self.packed.get(name)) is None:
            return StoredTensor(self._file_of[name].path, entries[0].dtype, entries[0].shape, num_bytes)
        layout, weight_format = packed.quantization.layout, packed.quantization.format
        return StoredTensor(packed.path, layout, packed.shape, num_bytes, weight_format)

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
        for stored, file in self._weight_map(index).items():
            name = self._name(stored)
            if name is not None and name not in self._file_of:
                raise ConfigError(f"{self.path / file}: tensor {stored} is missing; {index} promises it")
