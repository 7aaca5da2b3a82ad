"""Reading what ``diptych serve --record`` wrote: a header and one JSON row per line."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from diptych.control.errors import ConfigError
from diptych.simulation.old_names import with_row_names


@dataclass(frozen=True, slots=True)
class Recording:
    """One file. diptych: the version that wrote it."""

    path: Path
    format: str
    diptych: str
    header: Mapping[str, Any]
    lines: Sequence[bytes]

    @property
    def failure(self) -> str:
        """The error with which the core failed over the last row ("": it did not)."""
        return str(self.header.get("failure", {}).get("error", ""))

    def rows(self) -> Iterator[list[Any]]:
        """The rows after the header; row n is line n + 2. A last line that was cut off (the process was killed) is left
        out. Raises ConfigError for a line that is none."""
        decoder = msgspec.json.Decoder(list[Any])
        for number, line in enumerate(self.lines[1:-1], 2):  # behind the last newline: nothing, or half a row
            try:
                yield decoder.decode(with_row_names(line))
            except msgspec.DecodeError as error:
                raise ConfigError(f"line {number} of {self.path} is unreadable: {error}", param="path") from None


def read_recording(path: Path, versions: Mapping[str, Sequence[int]]) -> Recording:
    """A recording of one of these formats, in one of their versions. Raises ConfigError for any other file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="path") from None
    try:
        header = msgspec.json.decode(with_row_names(lines[0]), type=dict[str, Any])
        readable = versions.get(header.get("format", ""))
    except (msgspec.DecodeError, TypeError):
        readable = None
    if readable is None:
        raise ConfigError(f"{path} is no recording of diptych serve --record", param="path")
    if header.get("version") not in readable:
        known = " and ".join(map(str, readable))
        raise ConfigError(f"{path} is a recording of version {header.get('version')}; this reads {known}", param="path")
    if num_dropped := header.get("dropped", 0):
        message = (
            f"{path} begins in the middle: {num_dropped} rows before it were not kept when {_failure_words(header)}. "
            "Its lines can be read, and not be decided again"
        )
        raise ConfigError(message, param="path")
    return Recording(path, header["format"], header["diptych"], header, lines)


def _failure_words(header: Mapping[str, Any]) -> str:
    failure = header.get("failure", {})
    return f"{failure.get('core', 'the core')} failed ({failure.get('error', 'unknown')})"


def recording_format(path: Path) -> str:
    """What kind of recording a file is; "" for any other file. Raises ConfigError when it cannot be read."""
    try:
        with path.open("rb") as file:
            header = msgspec.json.decode(file.readline(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="path") from None
    except msgspec.DecodeError:
        return ""
    return str(header.get("format", ""))
