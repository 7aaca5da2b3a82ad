"""docs/settings.md: the options of every command and the settings of the simulator, from the code that declares them.

Imports the command line and the settings; runs nothing.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from msgspec import inspect as structs

from diptych.cli import main as cli
from diptych.control.config import PresetName, shape_preset
from diptych.control.slo import NS_PER_MS
from diptych.simulation.settings import Settings

HEAD = """# Settings

Every option of every command, and every setting of `diptych simulate`, as the code declares them. This page is written
by `scripts/docs tables`; a test compares it with the code.
"""
PRESETS = """
## What `--shape` presets

| setting | `unified` | `chunked` |
|---|---|---|
"""
SIMULATION = """
## Settings of the simulator

The tables of the TOML file of `diptych simulate` ([simulation.md](simulation.md#settings)). `--set PATH=VALUE` sets any
of them, `--sweep PATH=a,b,c` sweeps them. An empty default means: not given, and then what the text says.
"""
PLAIN_TYPES = {int: "whole number", float: "number", str: "text", Path: "path", bool: ""}


def settings_page() -> str:
    """The whole page."""
    return "".join([HEAD, PRESETS, *_presets(), *_commands(), SIMULATION, *_simulation()])


def table_row(*cells: str) -> str:
    """One row; line breaks and bars in the cells would end it."""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |\n"


def _presets() -> Iterator[str]:
    shapes = {shape: shape_preset(shape) for shape in get_args(PresetName)}
    of: dict[str, Callable[[Any], Any]] = {
        "--order": lambda config: config.order,
        "--budget": lambda config: config.budget.kind,
        "--max-batched-tokens": lambda config: config.budget.max_batched_tokens,
        "--step-target-ms": lambda config: config.budget.target_ns // NS_PER_MS,
        "--max-num-seqs": lambda config: config.max_num_seqs,
        "--max-waiting": lambda config: config.max_waiting,
        "--max-partial-prefills": lambda config: config.caps.max_partial_prefills,
        "--max-long-partial-prefills": lambda config: config.caps.max_long_partial_prefills,
        "--long-prefill-threshold": lambda config: config.caps.long_prefill_threshold,
        "--preemption": lambda config: config.preemption.kind,
    }
    for name, value in of.items():
        yield table_row(f"`{name}`", *(f"`{value(shapes[shape])}`" for shape in ("unified", "chunked")))


def commands() -> dict[str, Callable[..., Any]]:
    """The functions behind the commands, by the names of the commands."""
    found = {}
    groups = [(f"{group.name} ", group.typer_instance) for group in cli.app.registered_groups]
    for prefix, app in [("", cli.app), *groups]:
        assert app is not None
        for info in app.registered_commands:
            assert info.callback is not None
            found[prefix + (info.name or info.callback.__name__.replace("_", "-"))] = info.callback
    return dict(sorted(found.items()))


def _commands() -> Iterator[str]:
    for name, function in commands().items():
        yield f"\n## `diptych {name}`\n\n{_one_line(function.__doc__)}\n"
        panels: dict[str, list[str]] = {}
        for parameter, annotation in _parameters(function):
            hint, info = get_args(annotation)[:2]
            if not getattr(info, "hidden", False):
                panel = str(getattr(info, "rich_help_panel", None) or "")
                panels.setdefault(panel, []).append(_option_row(parameter, hint, info))
        for panel, rows in panels.items():
            yield (
                f"\n{panel}\n" * bool(panel) + "\n| option | values | default | |\n|---|---|---|---|\n" + "".join(rows)
            )


def _parameters(function: Callable[..., Any]) -> Iterator[tuple[inspect.Parameter, Any]]:
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        yield parameter, hints[name]


def _option_row(parameter: inspect.Parameter, hint: Any, info: Any) -> str:
    first = info.default  # where typer keeps the first of the names that were given
    names = [name for name in (first, *(info.param_decls or ())) if isinstance(name, str)]
    if isinstance(info, typer.models.ArgumentInfo):
        names = [(info.metavar or parameter.name.upper()).strip("[]")]
    elif not names:
        dashed = parameter.name.replace("_", "-")
        names = [f"--{dashed}"] + ([f"--no-{dashed}"] if _inner(hint) is bool else [])
    text = info.help or ""
    if getattr(info, "envvar", None):
        text += f" Environment: `{info.envvar}`."
    return table_row(", ".join(f"`{name}`" for name in names), _values(hint, info), _default(parameter.default), text)


def _inner(hint: Any) -> Any:
    """The type without ``| None``."""
    rest = [each for each in get_args(hint) if each is not NoneType]
    return rest[0] if NoneType in get_args(hint) and len(rest) == 1 else hint


def _values(hint: Any, info: Any) -> str:
    if getattr(info, "metavar", None) and not isinstance(info, typer.models.ArgumentInfo):
        return str(info.metavar).strip("<>").replace("|", ", ")
    inner = _inner(hint)
    if get_origin(inner) is list:
        return f"{_values(get_args(inner)[0], None)}, repeatable"
    if get_origin(inner) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(inner))
    return PLAIN_TYPES[inner]


def _default(value: Any) -> str:
    if value is None or value is False or value is inspect.Parameter.empty:
        return ""
    if value is True:
        return "on"
    return f"`{value}`" if str(value) else ""


def _simulation() -> Iterator[str]:
    paths: dict[type, list[str]] = {}
    _collect("", structs.type_info(Settings), paths)
    for struct, places in paths.items():
        title = ", ".join(f"`{place}`" if place else "The file itself" for place in places)
        yield f"\n### {title}\n\n{_one_line(struct.__doc__)}\n\n| setting | values | default |\n|---|---|---|\n"
        info = structs.type_info(struct)
        assert isinstance(info, structs.StructType)
        for field in info.fields:
            if not list(_tables(field.name, field.type)):
                yield table_row(f"`{field.name}`", type_words(field.type), _default_of(field))


def _collect(path: str, info: structs.Type, paths: dict[type, list[str]]) -> None:
    """All tables by their kind, with every path at which they stand."""
    assert isinstance(info, structs.StructType)
    paths.setdefault(info.cls, []).append(path)
    if len(paths[info.cls]) > 1 and not path.startswith("workload.lengths"):
        return  # the tables in it are listed where it came first
    for field in info.fields:
        for name, inner in _tables(field.name, field.type):
            _collect(f"{path}.{name}" if path else name, inner, paths)


def _tables(name: str, info: structs.Type) -> Iterator[tuple[str, structs.Type]]:
    """The tables that a field holds: itself, those of a list, or those by name."""
    if isinstance(info, structs.UnionType):
        for each in info.types:
            yield from _tables(name, each)
    elif isinstance(info, structs.StructType):
        yield name, info
    elif isinstance(info, structs.VarTupleType):
        yield from _tables(f"{name}[]", info.item_type)
    elif isinstance(info, structs.DictType) and isinstance(info.value_type, structs.StructType):
        yield "NAME" if name == "named" else f"{name}.NAME", info.value_type


def _default_of(field: structs.Field) -> str:
    if field.required:
        return "required"
    value = field.default
    if value is None or value is structs.NODEFAULT or value in ((), ""):
        return ""
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def type_words(info: structs.Type) -> str:
    """What a value may be."""
    if isinstance(info, structs.UnionType):
        return " or ".join(type_words(each) for each in info.types if not isinstance(each, structs.NoneType))
    if isinstance(info, structs.LiteralType):
        return ", ".join(f"`{value}`" for value in info.values)
    if isinstance(info, structs.IntType | structs.FloatType):
        name = "whole number" if isinstance(info, structs.IntType) else "number"
        limits = {"at least": info.ge, "above": info.gt, "at most": info.le, "below": info.lt}
        return " ".join(
            [name, " and ".join(f"{word} {value:g}" for word, value in limits.items() if value is not None)]
        )
    if isinstance(info, structs.VarTupleType):
        return f"list: {type_words(info.item_type)}"
    words = {structs.StrType: "text", structs.BoolType: "`true`, `false`", structs.DictType: "a table"}
    return words[type(info)]


def _one_line(text: str | None) -> str:
    """A docstring as one paragraph each, in Markdown."""
    paragraphs = inspect.cleandoc(text or "").replace("``", "`").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
