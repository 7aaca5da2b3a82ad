"""What the commands declare their options with."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import typer

from diptych.runtime.model_place import find_model, name_of
from diptych.serving.link.engine_options import BUNDLED_MODEL

Text: TypeAlias = str | None
Whole: TypeAlias = int | None
Number: TypeAlias = float | None
Switch: TypeAlias = bool | None
Strings: TypeAlias = list[str] | None


def option(help_text: str, panel: str, *names: str, **settings: Any) -> Any:
    """An option in one panel of a command's help."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **settings)


def takes(options: type) -> Callable[[Callable[[dict[str, Any]], None]], Callable[..., None]]:
    """Makes a command of a function of the values of many options by name. options: a class whose annotated attributes
    declare them, with their defaults."""
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(options, name), annotation=hint)
        for name, hint in hints.items()
    ]

    def decorate(function: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        @wraps(function)
        def command(**given: Any) -> None:
            function(given)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        return command

    return decorate


def picked(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The values of these options, for a record that has fields of the same names."""
    return {name: given[name] for name in names}


def model_path(model: str | Path | None) -> Path:
    """The directory or GGUF file that was asked for, or the bundled directory. Raises ConfigError."""
    return find_model(model or BUNDLED_MODEL)


def model_name(path: Path) -> str:
    """What clients call the model at this path, unless they are given another name."""
    return name_of(path)
