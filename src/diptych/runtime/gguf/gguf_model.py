"""A model in one GGUF file, or in the numbered parts that a writer has split it into.

The parts are called ``NAME-00001-of-00003.gguf`` and so on, and lie side by side. The first holds the metadata of the
model; each holds some of its tensors, and says under ``split.`` which part of how many it is. Imports no torch.
"""

import re
from pathlib import Path

from diptych.control.errors import ConfigError
from diptych.runtime.gguf.gguf_file import GgufFile, GgufTensor

PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def split_name(name: str) -> tuple[str, int, int] | None:
    """(name of the whole, number of the part from 1, number of parts) of a file's name; None: it is no part's."""
    found = PART_NAME.fullmatch(name)
    return (found[1], int(found[2]), int(found[3])) if found else None


class GgufModel:
    """The metadata and all tensors of a model, whichever file holds them. path: the file that people name, which is
    the first part. Making one raises ConfigError for parts that are missing or do not belong together."""

    def __init__(self, path: Path) -> None:
        self.path = path
        first = GgufFile(path)
        self.metadata = first.metadata
        count = first.metadata.integer("split.count") or 1
        self._parts = [first] if count == 1 else self._read_parts(first, count)
        self.files = [part.path for part in self._parts]
        self.tensors: dict[str, GgufTensor] = {}
        self._part_of: dict[str, GgufFile] = {}
        for part in self._parts:
            for name, tensor in part.tensors.items():
                if name in self.tensors:
                    raise ConfigError(
                        f"tensor {name} lies in both {self._part_of[name].path} and {part.path}", param="model"
                    )
                self.tensors[name], self._part_of[name] = tensor, part
        self._check_number_of_tensors()

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._part_of[name].path

    def data(self, name: str, index: int | None = None) -> memoryview:
        """The bytes of a tensor, or of one matrix of it, writable without changing a file."""
        return self._part_of[name].data(name, index)

    def release(self, name: str, index: int | None = None) -> None:
        """Give back the memory of the pages that only this tensor, or this matrix of it, touched; later reads fetch
        them again."""
        self._part_of[name].release(name, index)

    def _read_parts(self, first: GgufFile, count: int) -> list[GgufFile]:
        """All parts, in order."""
        named = split_name(self.path.name)
        if named is None or named[2] != count:
            raise ConfigError(
                f"{self.path}: is one of {count} parts of a model (split.count); their names must end in "
                f"-00001-of-{count:05}.gguf and so on",
                param="model",
            )
        whole, number, _ = named
        if number != 1:
            raise ConfigError(
                f"{self.path}: is part {number} of {count} of a model; give the first: {_part_name(whole, 1, count)}",
                param="model",
            )
        parts = [first]
        for number in range(1, count + 1):
            path = self.path.with_name(_part_name(whole, number, count))
            if number > 1:
                if not path.exists():
                    raise ConfigError(f"{path}: no such file; {self.path.name} is the first of {count}", param="model")
                parts.append(GgufFile(path))
            said = [parts[-1].metadata.integer(f"split.{key}") for key in ("no", "count")]
            if said != [number - 1, count]:
                raise ConfigError(
                    f"{path}: split.no and split.count are {said[0]} and {said[1]}; by its name, it is "
                    f"{number - 1} and {count}",
                    param="model",
                )
        return parts

    def _check_number_of_tensors(self) -> None:
        wanted = self.metadata.integer("split.tensors.count")
        if len(self._parts) > 1 and wanted not in (None, len(self.tensors)):
            raise ConfigError(
                f"{self.path}: split.tensors.count is {wanted}; its {len(self._parts)} parts hold {len(self.tensors)}",
                param="model",
            )


def _part_name(whole: str, number: int, count: int) -> str:
    return f"{whole}-{number:05}-of-{count:05}.gguf"
