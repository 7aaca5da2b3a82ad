"""What the commands declare their options with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import typer

from diptych.control.errors import ConfigError
from diptych.runtime.gguf.gguf_file import is_gguf
from diptych.serving.link.engine_options import BUNDLED_MODEL

Text: TypeAlias = str | None
Whole: TypeAlias = int | None
Number: TypeAlias = float | None
Switch: TypeAlias = bool | None
Strings: TypeAlias = list[str] | None


def option(help_text: str, panel: str, *names: str, **settings: Any) -> Any:
    """An option in one panel of a command's help."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **settings)


def picked(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The values of these options, for a record that has fields of the same names."""
    return {name: given[name] for name in names}


def model_path(model: Path | None) -> Path:
    """The directory or GGUF file that was asked for, or the bundled directory. Raises ConfigError."""
    path = Path(model or BUNDLED_MODEL)
    if is_gguf(path):
        if not path.is_file():
            raise ConfigError(f"{path}: no such file", param="model")
    elif not (path / "config.json").exists():
        raise ConfigError(f"{path} is not a model directory: it has no config.json", param="model")
    return path.resolve()


def model_name(path: Path) -> str:
    """What clients call the model at this path, unless they are given another name."""
    return path.name.removesuffix(".gguf")
