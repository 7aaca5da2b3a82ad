"""Typed access to the fields of a checkpoint's config.json. Imports no torch."""

import copy
import json
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

from diptych.control.errors import ConfigError, UnsupportedModelError


class ConfigFields:
    """Typed access to one JSON object; every complaint names the file, the field, the value and what is supported."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.model = path.parent  # the directory or file that people name
        self.values = values
        self._prefix = prefix

    @classmethod
    def of_file(cls, path: Path) -> "ConfigFields":
        """The object in a JSON file. Raises ConfigError when the file is missing or holds something else."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; a model directory holds one", param="model") from None
        except (ValueError, OSError) as error:
            raise ConfigError(f"{path}: cannot be read as JSON ({error})", param="model") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: holds {type(values).__name__}, not an object", param="model")
        return cls(path, values)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """The same object with other values."""
        other = copy.copy(self)
        other.values = values
        return other

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """The same object, where fields that are absent (not: null) have these values."""
        return self.with_values(ChainMap(cast(dict[str, Any], self.values), dict(defaults)))

    def name_of(self, name: str) -> str:
        """A field's name as people find it in the file."""
        return f"{self._prefix}{name}"

    def unsupported(self, name: str, supported: str) -> UnsupportedModelError:
        """The error to raise for a field's value."""
        value = self.values.get(name)
        return UnsupportedModelError(
            f"{self.path}: {self.name_of(name)} is {value!r}; supported: {supported}", param=name
        )

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.unsupported(name, "a whole number of at least 1")
        return value

    def count(self, name: str) -> int:
        """A whole number of at least 0; 0 where the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.unsupported(name, "a whole number of at least 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.unsupported(name, "a positive number")
        return float(value)

    def positive_numbers(self, name: str) -> tuple[float, ...]:
        """An array of positive numbers."""
        values = self.values.get(name)
        if not isinstance(values, list) or not all(isinstance(value, int | float) and value > 0 for value in values):
            raise self.unsupported(name, "an array of positive numbers")
        return tuple(map(float, values))

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.unsupported(name, "true or false")
        return value

    def require(self, name: str, *supported: Any) -> None:
        """Raise unless the field has one of these values; where it is absent, the first is meant."""
        if self.values.get(name, supported[0]) not in supported:
            raise self.unsupported(name, ", ".join(str(value) for value in supported if value is not None))

    def nested(self, name: str) -> "ConfigFields":
        """The object in a field; an empty one when the field is absent or null."""
        values = self.values.get(name) or {}
        if not isinstance(values, dict):
            raise self.unsupported(name, "an object")
        return ConfigFields(self.path, values, f"{self._prefix}{name}.")
