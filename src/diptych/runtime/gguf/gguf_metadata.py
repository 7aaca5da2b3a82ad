"""The metadata of a GGUF file, typed: every complaint names the file, the key, the value and what is supported."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diptych.control.errors import UnsupportedModelError

Value = str | int | float | bool | Sequence[Any]


class GgufMetadata:
    """Values by key. Each method gives None where the key is absent, and raises UnsupportedModelError for a value of
    another type."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self.values = values

    def unsupported(self, key: str, supported: str) -> UnsupportedModelError:
        """The error to raise for the value of a key."""
        value = self.values.get(key)
        shown = repr(value) if value is None or isinstance(value, str | int | float) else f"{len(value)} values"
        return UnsupportedModelError(f"{self.path}: {key} is {shown[:80]}; supported: {supported}", param="model")

    def string(self, key: str) -> str | None:
        """Text."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.unsupported(key, "text")
        return value

    def integer(self, key: str) -> int | None:
        """A whole number of at least 0; of an array of one for each layer, the number that all of them are."""
        value = self.values.get(key)
        if isinstance(value, Sequence | memoryview) and not isinstance(value, str) and len(value):
            if any(entry != value[0] for entry in value):
                raise self.unsupported(key, "the same for all layers")
            value = value[0]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise self.unsupported(key, "a whole number of at least 0")
        return value

    def number(self, key: str) -> float | None:
        """A number."""
        value = self.values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.unsupported(key, "a number")
        return None if value is None else float(value)

    def flag(self, key: str) -> bool | None:
        """True or false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.unsupported(key, "true or false")
        return value

    def strings(self, key: str) -> Sequence[str] | None:
        """An array of texts."""
        value = self.values.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
            raise self.unsupported(key, "an array of texts")
        return value

    def numbers(self, key: str) -> Sequence[Any] | None:
        """An array of numbers."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, memoryview):
            raise self.unsupported(key, "an array of numbers")
        return value
