"""Models by name: those of the catalogue, and those that a config.json describes.

Read from catalogue/models.toml; hub_config.py reads config.json files.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from diptych.control.errors import ConfigError
from diptych.simulation.hub_config import model_from_config
from diptych.simulation.models import LinearAttentionSpec, MLASpec, ModelSpec, MoESpec, WindowSpec


def load_model(name: str) -> ModelSpec:
    """A model of the catalogue by name or alias (case does not matter), or of a Hugging Face directory or config.json.

    Raises ConfigError for a name that is neither.
    """
    entries = _catalogue()
    spec = entries.get(name.lower())
    if spec is not None:
        return spec
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" and path.is_file():
        return model_from_config(json.loads(path.read_text()), path.parent.name)
    known = ", ".join(sorted({entry.name for entry in entries.values()}))
    raise ConfigError(f"model {name!r} is neither in the catalogue nor a config.json; known: {known}", param="model")


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """Where a model of the catalogue is on the Hugging Face Hub, and its architecture as its config.json has it."""

    hub_name: str
    architecture: str


def published(name: str) -> PublishedModel | None:
    """The publication of a model of the catalogue, by name or alias; None of any other. An alias that is a name of the
    Hub stands for itself, of other names it is the first."""
    for key, raw in _raw().items():
        aliases = raw.get("aliases", [])
        if name.lower() in (key.lower(), *(alias.lower() for alias in aliases)):
            hub = [alias for alias in aliases if "/" in alias]
            own = [alias for alias in hub if alias.lower() == name.lower()]
            return PublishedModel((own or hub)[0], raw["architecture"]) if hub else None
    return None


def model_names() -> tuple[str, ...]:
    """Names of the catalogue, without aliases, in its order."""
    return tuple(dict.fromkeys(spec.name for spec in _catalogue().values()))


PARTS: Mapping[str, Any] = {"moe": MoESpec, "mla": MLASpec, "window": WindowSpec, "linear": LinearAttentionSpec}


@cache
def _catalogue() -> Mapping[str, ModelSpec]:
    return _parse(_raw(), "models.toml")


@cache
def _raw() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads((resources.files("diptych.simulation.catalogue") / "models.toml").read_text())


def _parse(tables: Mapping[str, Mapping[str, Any]], source: str) -> dict[str, ModelSpec]:
    """Name and aliases, in lower case, to the model."""
    known = {field.name for field in fields(ModelSpec)}
    entries: dict[str, ModelSpec] = {}
    for name, raw in tables.items():
        values = dict(raw)
        aliases = values.pop("aliases", [])
        values.pop("architecture", None)
        unknown = set(values) - known
        if unknown:
            raise ConfigError(f"{source}: {name} has unknown fields {sorted(unknown)}", param="model")
        values.setdefault("head_dim", values.get("hidden", 0) // max(1, values.get("heads", 1)))
        try:
            for key, kind in PARTS.items():
                values[key] = kind(**values[key]) if key in values else None
            spec = ModelSpec(name=name, **values)
        except TypeError as error:
            raise ConfigError(f"{source}: {name}: {error}", param="model") from error
        for key in (name, *aliases):
            entries[key.lower()] = spec
    return entries
