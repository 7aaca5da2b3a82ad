"""Rows of CSV and JSONL files, plain or gzipped, with errors that name file, line, field and value.

Must never know what the columns mean.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from diptych.control.errors import ConfigError

MAX_TOKENS = 10**9


@dataclass(frozen=True, slots=True)
class Row:
    """One record and where it stands."""

    path: str
    line: int
    fields: Mapping[str, Any]

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number in [-10**15, 10**15]; ``default`` when it is absent or empty. Raises ConfigError."""
        value = self.fields.get(name)
        if value is None or value == "":
            if default is not None:
                return default
            raise self.error(name, value, "it must be a whole number")
        try:
            number = int(value) if isinstance(value, int | str) else float(value)
        except (TypeError, ValueError):
            raise self.error(name, value, "it must be a whole number") from None
        if isinstance(value, bool) or number != number // 1 or abs(number) > 10**15:
            raise self.error(name, value, "it must be a whole number")
        return int(number)

    def length(self, name: str) -> int:
        """A number of tokens, not negative. Raises ConfigError."""
        number = self.whole(name)
        if not 0 <= number <= MAX_TOKENS:
            raise self.error(name, number, f"it must be in [0, {MAX_TOKENS}]")
        return number

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number, not negative; ``default`` when it is absent or empty. Raises ConfigError."""
        value = self.fields.get(name)
        if (value is None or value == "") and default is not None:
            return default
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise self.error(name, value, "it must be a number") from None
        if isinstance(value, bool) or not 0 <= number < 9e9:
            raise self.error(name, value, "it must be in [0, 9e9)")
        return number

    def text(self, name: str) -> str:
        """Empty when it is absent."""
        value = self.fields.get(name)
        return "" if value is None else str(value)

    def error(self, name: str, value: Any, limit: str) -> ConfigError:
        """What is wrong with a field of this row."""
        return ConfigError(f"{self.path}, line {self.line}: {name} is {value!r}; {limit}", param=name)


def read_rows(path: str) -> Iterator[Row]:
    """JSONL when the first character is a brace, else CSV with a header. Raises ConfigError."""
    line = 1
    try:
        with open(path, "rb") as raw:
            is_gzip = raw.read(2) == b"\x1f\x8b"
        opener = gzip.open if is_gzip else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as lines:
            first = lines.readline()
            whole = chain([first] if first else [], lines)
            if first.lstrip().startswith("{"):
                for line, text in enumerate(whole, start=1):
                    if text.strip():
                        yield Row(path, line, _record(path, line, text))
                return
            reader = csv.DictReader(whole, restkey="(extra)")
            for fields in reader:
                line = reader.line_num
                if "(extra)" in fields:
                    raise ConfigError(f"{path}, line {line}: more values than the header has columns", param="path")
                yield Row(path, line, fields)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"cannot read {path}: {reason}", param="path") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}, after line {line}: {error}", param="path") from None


def read_column(path: str, column: str) -> list[int]:
    """Lengths in tokens (0 counts as 1) out of one column. Raises ConfigError."""
    name = str(Path(path))
    values = []
    for row in read_rows(name):
        if column not in row.fields:
            there = ", ".join(map(str, row.fields))
            raise ConfigError(f"{name}, line {row.line}: there is no column {column!r}; it has {there}", param="column")
        values.append(max(1, row.length(column)))
    if not values:
        raise ConfigError(f"{name} has no rows", param="path")
    return values


def _record(path: str, line: int, text: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {line}: no JSON: {error}", param="path") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}, line {line}: {text.strip()[:40]!r} is no JSON object", param="path")
    return fields
