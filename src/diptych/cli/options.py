"""What the commands declare their options with."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import typer

from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS
from diptych.diagnosis.objectives_presets import parse_objectives
from diptych.runtime.models.model_place import find_model, name_of
from diptych.serving.link.engine_options import BUNDLED_MODEL

LOCAL_URL = "http://127.0.0.1:8000"  # where diptych serve listens unless it is told otherwise
GB = 10**9
MOST_GB = 10**6
DEFAULT_DISK_GB = 10.0

Text: TypeAlias = str | None
Whole: TypeAlias = int | None
Number: TypeAlias = float | None
Switch: TypeAlias = bool | None
Strings: TypeAlias = list[str] | None

KERNEL_NAMES = ("--kernels", "--isa")  # the second is the old name


def option(help_text: str, panel: str, *names: str, **settings: Any) -> Any:
    """An option in one panel of a command's help."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **settings)


def takes(*options: type) -> Callable[[Callable[[dict[str, Any]], None]], Callable[..., None]]:
    """Makes a command of a function of the values of many options by name. options: classes whose annotated attributes
    declare them, with their defaults."""
    of_class = [get_type_hints(declared, include_extras=True) for declared in options]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(declared, name), annotation=hint)
        for declared, hints in zip(options, of_class, strict=True)
        for name, hint in hints.items()
    ]

    def decorate(function: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        @wraps(function)
        def command(**given: Any) -> None:
            function(given)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {name: hint for hints in of_class for name, hint in hints.items()}
        return command

    return decorate


def picked(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The values of these options, for a record that has fields of the same names."""
    return {name: given[name] for name in names}


def with_objectives(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a command's options with those of ``--slo`` as ttft_slo_ms and tpot_slo_ms. Raises ConfigError for
    an objective that is given twice."""
    values = {name: value for name, value in given.items() if name != "slo"}
    if given.get("slo") is None:
        return values
    slo = parse_objectives(given["slo"])
    for name, nanoseconds in (("ttft_slo_ms", slo.ttft_ns), ("tpot_slo_ms", slo.tpot_ns)):
        if nanoseconds is not None and values.get(name) is not None:
            raise ConfigError(f"slo is {given['slo']!r}; {name} is given, too", param="slo")
        if nanoseconds is not None:
            values[name] = nanoseconds / NS_PER_MS
    return values


def tier_memory(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of MemoryOptions for the tiers below the KV cache. Raises ConfigError."""
    host, disk, disk_gb = given["kv_host_gb"], given["kv_disk"], given["kv_disk_gb"]
    if not 0 <= host <= MOST_GB:
        raise ConfigError(f"kv_host_gb is {host}; it must be in [0, {MOST_GB}]", param="kv_host_gb")
    if disk is None:
        if disk_gb is not None:
            raise ConfigError(f"kv_disk_gb is {disk_gb}, and kv_disk names no folder", param="kv_disk_gb")
        if given["kv_disk_codec"] != "none":
            raise ConfigError(
                f"kv_disk_codec is {given['kv_disk_codec']!r}, and kv_disk names no folder", param="kv_disk_codec"
            )
        return {"host_bytes": int(host * GB)}
    if not given["prefix_cache"]:
        raise ConfigError(f"kv_disk is {str(disk)!r}; it needs the prefix cache, which is off", param="kv_disk")
    disk_gb = DEFAULT_DISK_GB if disk_gb is None else disk_gb
    if not 0 < disk_gb <= MOST_GB:
        raise ConfigError(f"kv_disk_gb is {disk_gb}; it must be in (0, {MOST_GB}]", param="kv_disk_gb")
    return {
        "host_bytes": int(host * GB),
        "disk": str(disk.expanduser().absolute()),
        "disk_bytes": int(disk_gb * GB),
        "disk_codec": given["kv_disk_codec"],
    }


def model_path(model: str | Path | None, revision: str | None = None) -> Path:
    """The directory or GGUF file that was asked for, or the bundled directory. Raises ConfigError."""
    return find_model(model or BUNDLED_MODEL, revision=revision)


def model_name(path: Path) -> str:
    """What clients call the model at this path, unless they are given another name."""
    return name_of(path)
