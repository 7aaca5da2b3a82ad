"""``diptych models``: what a checkpoint is and what a server of it can do; or the models of this machine."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.base.byte_size import size_words
from diptych.cli import shared_help
from diptych.cli.error_messages import errors_in_words
from diptych.cli.options import Text
from diptych.cli.output import print_tables
from diptych.control.errors import ConfigError
from diptych.report.text import Table
from diptych.runtime.models.model_place import cached_models, find_model, hub_cache, models_in
from diptych.serving.link.engine_options import BUNDLED_MODEL

if TYPE_CHECKING:
    from diptych.serving.model_report import Ability, ModelReport

LOCAL = Path("models")
PLACE_HELP = (
    "Model directory, GGUF file, folder of models, or a name of the Hub that is in its cache. Default: the models of "
    "this machine, which are those in the Hub's cache and in ./models, and the bundled one."
)
COLUMNS = ("", "architecture", "parameters", "size", "in memory", "KV a token", "context", "served")
GGUF_MAGIC = b"GGUF"


def models(
    place: Annotated[Text, typer.Argument(metavar="[PATH]", help=PLACE_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help=shared_help.JSON_DOCUMENT)] = False,
) -> None:
    """Say what a checkpoint is, what a server of it can do, and why it is refused; reads no weights."""
    with errors_in_words():
        if place is None:
            _print_list(_here(), as_json, title="Models of this machine")
        elif inside := _folder_of_models(place):
            _print_list((inside, []), as_json, title=f"Models in {place}")
        else:
            _print_one(find_model(place), as_json)


def _here() -> tuple[list[Path], list[tuple[str, str]]]:
    """(the models of this machine; names in the Hub's cache that are not whole, with what is missing)."""
    cached, empty = cached_models(hub_cache(os.environ))
    return [*cached, *models_in(LOCAL.absolute()), Path(BUNDLED_MODEL)], empty


def _folder_of_models(place: str) -> list[Path]:
    """What a directory holds that is no model itself; nothing for all else."""
    path = Path(place).expanduser()
    if not path.is_dir() or (path / "config.json").exists() or (path / "adapter_config.json").exists():
        return []
    return [] if any(path.glob("snapshots/*/")) else models_in(path.absolute())


def _print_one(path: Path, as_json: bool) -> None:
    from diptych.serving.model_report import report_model

    if path.is_file() and not _is_gguf_file(path):
        raise ConfigError(f"{path} is neither a model directory nor a GGUF file", param="model")
    report = report_model(path)
    if as_json:
        print(json.dumps(_record(report), indent=2, ensure_ascii=False))
        return
    print(f"{report.name}: {'can be served' if report.can_be_served else 'cannot be served'}")
    for name, value in (*_facts(report), *_abilities(report.abilities.items())):
        print(f"  {name:<19}{value}")
    if report.template is not None:
        print("the chat template:")
    for name, value in (report.template or {}).items():
        print(f"  {name.replace('_', ' '):<19}{_words(value)}")
    for refusal in report.refusals:
        print(f"refused: {refusal}")
    for obstacle in report.obstacles:
        print(f"on this machine: {obstacle}")


def _is_gguf_file(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="model") from None


def _facts(report: "ModelReport") -> Iterable[tuple[str, str]]:
    """What there is to say of the checkpoint."""
    loaded = f", {size_words(report.loaded_bytes)} in memory" if report.loaded_bytes is not None else ""
    smaller = [f"{size_words(number)} with --quantize {name}" for name, number in report.by_quantize.items()]
    yield "path", report.path
    yield "format", report.format
    yield "architecture", report.architecture or "unknown"
    yield "parameters", _count(report.num_parameters)
    yield "weights", (f"{report.precision}, " if report.precision else "") + size_words(report.size_bytes) + loaded
    if smaller:
        yield "smaller weights", ", ".join(smaller)
    if report.kv_token_bytes is not None and report.context_length is not None:
        whole = size_words(report.kv_token_bytes * report.context_length)
        yield "KV cache", f"{size_words(report.kv_token_bytes)} a token, {whole} for its whole context"
    yield "context length", _tokens(report.context_length)
    yield "vocabulary", _tokens(report.vocab_size)


def _abilities(abilities: "Iterable[tuple[str, Ability]]") -> Iterable[tuple[str, str]]:
    for name, ability in abilities:
        yield name, ("yes" if ability.is_served else "no") + (f": {ability.detail}" if ability.detail else "")


def _words(value: Any) -> str:
    """A value of the template's profile, in words."""
    if isinstance(value, bool) or value is None:
        return "yes" if value else "no"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value) or "none"


def _print_list(found: tuple[Sequence[Path], Sequence[tuple[str, str]]], as_json: bool, *, title: str) -> None:
    from diptych.serving.model_report import report_model

    paths, empty = found
    reports = [report_model(path) for path in paths]
    if as_json:
        print(json.dumps([_record(report) for report in reports], indent=2, ensure_ascii=False))
        return
    names = _names(reports)
    reasons = {name: (*report.refusals, *report.obstacles) for name, report in zip(names, reports, strict=True)}
    notes = [f"{name}: {reason[0]}" for name, reason in reasons.items() if reason]
    notes += [f"{name}: {why}" for name, why in empty]
    print_tables(
        [Table(title, COLUMNS, tuple(_row(name, report) for name, report in zip(names, reports, strict=True)))], notes
    )


def _names(reports: "Sequence[ModelReport]") -> list[str]:
    """What to type for each: where two have one name, or the name is not of the Hub's cache, the path."""
    names = []
    for report in reports:
        is_found = False
        if "/" in report.name:
            try:
                is_found = str(find_model(report.name)) == report.path
            except ConfigError:
                is_found = False
        is_bundled = report.path == str(BUNDLED_MODEL)
        path = os.path.relpath(report.path)
        names.append(report.name if is_found or is_bundled else min(path, report.path, key=len))
    return names


def _row(name: str, report: "ModelReport") -> tuple[str, ...]:
    served = "no" if report.refusals else "not here" if report.obstacles else "yes"
    memory = "" if report.loaded_bytes is None else size_words(report.loaded_bytes)
    kv = "" if report.kv_token_bytes is None else size_words(report.kv_token_bytes)
    parameters, context = _count(report.num_parameters), _tokens(report.context_length)
    return name, report.architecture, parameters, size_words(report.size_bytes), memory, kv, context, served


def _record(report: "ModelReport") -> dict[str, Any]:
    return {"can_be_served": report.can_be_served, **asdict(report)}


def _tokens(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _count(number: int | None) -> str:
    """A number of parameters as models are named after it."""
    if number is None:
        return "unknown"
    for unit, words in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{words}"
    return str(number)
