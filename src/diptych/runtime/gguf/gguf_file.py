"""A GGUF file in place: its metadata as Python values, and where each tensor lies.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian): a count of
tensors and of metadata entries, the entries, a table of tensors, then their data. Every count and length of the file is
held against the bytes that are left before it is believed, so a truncated or hostile file is a ConfigError that names
it. The reader of the ``gguf`` package does not do that (it loops as often as a count says), and makes several numpy
objects of every token: seconds for a vocabulary that this reader walks through in a fraction of one.

Imports neither torch nor numpy, because the front end reads configs and tokenizers.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.gguf.ggml_types import GGML_TYPES, READABLE, GgmlType
from diptych.runtime.gguf.gguf_metadata import GgufMetadata, Value
from diptych.runtime.weights.mapped_file import MappedFile
from diptych.runtime.weights.stored_tensor import matrix_range

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MIN_ALIGNMENT, DEFAULT_ALIGNMENT = 8, 32
MAX_DIMENSIONS = 4
MAX_STRINGS = 1 << 22  # of one array: ten times the largest vocabulary there is
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: bytes [start, end) of the file. shape: rows before columns, the reverse of the file's."""

    kind: GgmlType
    shape: tuple[int, ...]
    start: int
    end: int


def is_gguf(path: Path) -> bool:
    """Whether a model is such a file, and not a directory."""
    return path.suffix == ".gguf" or path.is_file()


class GgufFile:
    """One mapped file. Arrays of numbers in its metadata are views of the map."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        self._at = 0
        num_tensors, num_entries = self._read_head()
        self.metadata = GgufMetadata(path, self._read_metadata(num_entries))
        self.tensors = self._read_tensors(num_tensors)

    def data(self, name: str, index: int | None = None) -> memoryview:
        """The bytes of a tensor, or of one matrix of it, writable without changing the file."""
        tensor = self.tensors[name]
        return self._file.view(*matrix_range(tensor.start, tensor.end, tensor.shape, index))

    def release(self, name: str, index: int | None = None) -> None:
        """Give back the memory of the pages that only this tensor, or this matrix of it, touched; later reads fetch
        them again."""
        tensor = self.tensors[name]
        self._file.release(*matrix_range(tensor.start, tensor.end, tensor.shape, index))

    def _read_head(self) -> tuple[int, int]:
        if bytes(self._bytes(4, "the magic")) != MAGIC:
            raise self._broken("is no GGUF file")
        version = self._scalar("I", "the version")
        if version not in VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            shown = "big-endian" if big_endian else f"version {version}"
            raise self._broken(f"is a GGUF file of {shown}; supported: versions 2 and 3, little-endian")
        return self._scalar("Q", "the number of tensors"), self._scalar("Q", "the number of metadata entries")

    def _read_metadata(self, num_entries: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(num_entries):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._broken(f"metadata {key} occurs twice")
            metadata[key] = self._value(self._scalar("I", key), key)
        return metadata

    def _value(self, kind: int, key: str) -> Value:
        if kind == STRING:
            return self._string(key)
        if kind == ARRAY:
            return self._array(key)
        value: int | float | bool = self._scalar(self._code(kind, key), key)
        return value

    def _array(self, key: str) -> Value:
        kind, count = self._scalar("I", key), self._scalar("Q", key)
        if kind != STRING:
            code = self._code(kind, key)
            return self._bytes(count * struct.calcsize(f"<{code}"), key).cast(code)  # type: ignore[call-overload, no-any-return]
        if count > MAX_STRINGS:
            raise self._broken(f"metadata {key} claims {count} strings; at most {MAX_STRINGS}")
        return self._strings(count, key)

    def _strings(self, count: int, key: str) -> list[str]:
        """``_string`` in a loop of its own: vocabularies have hundreds of thousands."""
        view, at, size = self._file.view(0, len(self._file)), self._at, len(self._file)
        length_at = struct.Struct("<Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                end = at + 8 + length_at(view, at)[0]
                if end > size:
                    raise self._truncated(key)
                found.append(str(view[at + 8 : end], "utf-8"))
                at = end
        except struct.error:
            raise self._truncated(key) from None
        except UnicodeDecodeError as error:
            raise self._broken(f"metadata {key} holds a string that is not UTF-8 ({error})") from None
        self._at = at
        return found

    def _read_tensors(self, num_tensors: int) -> dict[str, GgufTensor]:
        found: dict[str, tuple[GgmlType, tuple[int, ...], int]] = {}
        for _ in range(num_tensors):
            name = self._string("a tensor's name")
            what = f"tensor {name}"
            if name in found:
                raise self._broken(f"{what} occurs twice")
            num_dimensions = self._scalar("I", what)
            if not 1 <= num_dimensions <= MAX_DIMENSIONS:
                raise self._broken(f"{what} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS}")
            shape = tuple(reversed([self._scalar("Q", what) for _ in range(num_dimensions)]))
            found[name] = self._kind(self._scalar("I", what), what), shape, self._scalar("Q", what)
        alignment = self.metadata.values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < MIN_ALIGNMENT or alignment & (alignment - 1):
            raise self._broken(f"general.alignment is {alignment!r}; a power of two from {MIN_ALIGNMENT}")
        start = -(-self._at // alignment) * alignment
        return {name: self._tensor(name, kind, shape, start + at) for name, (kind, shape, at) in found.items()}

    def _tensor(self, name: str, kind: GgmlType, shape: tuple[int, ...], start: int) -> GgufTensor:
        assert kind.num_bytes is not None
        count = 1
        for extent in shape:
            count *= extent
        if count < 1 or shape[-1] % kind.values:
            raise self._broken(
                f"tensor {name} of type {kind.name} has shape {list(shape)}; rows are multiples of {kind.values}"
            )
        if start % MIN_ALIGNMENT:
            raise self._broken(f"tensor {name} begins at byte {start}, which is no multiple of {MIN_ALIGNMENT}")
        end = start + count // kind.values * kind.num_bytes
        if end > len(self._file):
            raise self._broken(f"tensor {name} ends at byte {end} of a file of {len(self._file)}: truncated")
        return GgufTensor(kind, shape, start, end)

    def _kind(self, number: int, what: str) -> GgmlType:
        kind = GGML_TYPES.get(number, GgmlType(f"number {number}"))
        if kind.num_bytes is None:
            raise UnsupportedModelError(
                f"{self.path}: {what} is of type {kind.name}; supported: {', '.join(READABLE)}", param="model"
            )
        return kind

    def _code(self, kind: int, key: str) -> str:
        """The code of a scalar type in ``struct``."""
        if kind not in SCALARS:
            raise self._broken(f"metadata {key} has values of the unknown type {kind}")
        return SCALARS[kind]

    def _scalar(self, code: str, what: str) -> Any:
        layout = f"<{code}"
        return struct.unpack(layout, self._bytes(struct.calcsize(layout), what))[0]

    def _string(self, what: str) -> str:
        raw = self._bytes(self._scalar("Q", what), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise self._broken(f"{what} is not UTF-8 ({error})") from None

    def _bytes(self, count: int, what: str) -> memoryview:
        end = self._at + count
        if end > len(self._file):
            raise self._truncated(what)
        self._at, start = end, self._at
        return self._file.view(start, end)

    def _truncated(self, what: str) -> ConfigError:
        return self._broken(f"ends within {what} (at byte {len(self._file)}): truncated, or a wrong length")

    def _broken(self, why: str) -> ConfigError:
        return ConfigError(f"{self.path}: {why}", param="model")
