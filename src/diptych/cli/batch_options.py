"""The options of a server that takes batches, as its settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from diptych.cli.options import GB, MOST_GB, Number, Text, Whole, option
from diptych.control.errors import ConfigError
from diptych.serving.batches.batch_records import BatchLimits
from diptych.serving.batches.batch_service import BatchOptions
from diptych.serving.batches.line_schedule import LineLimits
from diptych.serving.link.engine_options import parse_bytes

DIR_HELP = "Take files and batches (/v1/files, /v1/batches) and keep them in this folder. Default: not taken."
LINES_HELP = "Lines of batches that run at once while no other request does. Default: 32."
BESIDE_HELP = "How many of --batch-lines may run while other requests are active. Default: 0."
MAX_LINES_HELP = "Most lines of one batch. Default: 100000."
MAX_FILE_HELP = "Largest uploaded file; more gets 413. Default: 256MiB."
GB_HELP = "Disk quota for all files, in GB; uploads beyond it are refused. Default: 10."
BATCHES = "Batches"
NAMES = ("batch_lines", "batch_lines_beside", "batch_max_lines", "batch_max_file", "batch_gb")


class BatchTaking:
    """The options of a server that may take batches (see ``takes``)."""

    batch_dir: Annotated[Path | None, option(DIR_HELP, BATCHES)] = None
    batch_lines: Annotated[Whole, option(LINES_HELP, BATCHES)] = None
    batch_lines_beside: Annotated[Whole, option(BESIDE_HELP, BATCHES)] = None
    batch_max_lines: Annotated[Whole, option(MAX_LINES_HELP, BATCHES)] = None
    batch_max_file: Annotated[Text, option(MAX_FILE_HELP, BATCHES)] = None
    batch_gb: Annotated[Number, option(GB_HELP, BATCHES)] = None


def batch_options(given: Mapping[str, Any]) -> BatchOptions | None:
    """The settings from the values of the options; None where batches are not taken. Raises ConfigError."""
    if given["batch_dir"] is None:
        for name in NAMES:
            if given[name] is not None:
                raise ConfigError(f"{name} has no effect without batch_dir", param=name)
        return None
    limits = {
        name: value
        for name, value in (
            ("max_lines", _at_least_1(given, "batch_max_lines")),
            ("max_file_bytes", None if given["batch_max_file"] is None else _file_bytes(given["batch_max_file"])),
            ("max_total_bytes", _total_bytes(given["batch_gb"])),
        )
        if value is not None
    }
    lines = {"at_once": given["batch_lines"], "beside": given["batch_lines_beside"]}
    return BatchOptions(
        given["batch_dir"].expanduser().absolute(),
        BatchLimits(**limits),
        LineLimits(**{name: value for name, value in lines.items() if value is not None}),
    )


def _at_least_1(given: Mapping[str, Any], name: str) -> int | None:
    value: int | None = given[name]
    if value is not None and value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1", param=name)
    return value


def _file_bytes(text: str) -> int:
    return parse_bytes(text, "batch_max_file")


def _total_bytes(gb: float | None) -> int | None:
    if gb is not None and not 0 < gb <= MOST_GB:
        raise ConfigError(f"batch_gb is {gb}; it must be in (0, {MOST_GB}]", param="batch_gb")
    return None if gb is None else max(1, int(gb * GB))
