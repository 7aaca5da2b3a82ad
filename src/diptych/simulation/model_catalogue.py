"""Models by name: those of the catalogue, and those that a config.json describes.

Read from catalogue/models.toml; hub_config.py reads config.json files.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
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


def model_names() -> tuple[str, ...]:
    """Names of the catalogue, without aliases, in its order."""
    return tuple(dict.fromkeys(spec.name for spec in _catalogue().values()))


PARTS: Mapping[str, Any] = {"moe": MoESpec, "mla": MLASpec, "window": WindowSpec, "linear": LinearAttentionSpec}


@cache
def _catalogue() -> Mapping[str, ModelSpec]:
    text = (resources.files("diptych.simulation.catalogue") / "models.toml").read_text()
    return _parse(text, "models.toml")


def _parse(text: str, source: str) -> dict[str, ModelSpec]:
    """Name and aliases, in lower case, to the model."""
    known = {field.name for field in fields(ModelSpec)}
    entries: dict[str, ModelSpec] = {}
    for name, raw in tomllib.loads(text).items():
        values = dict(raw)
        aliases = values.pop("aliases", [])
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
