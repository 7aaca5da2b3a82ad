"""The packed tables of the catalogue: gzipped JSON, one file a table, in a folder a kind."""

import gzip
from functools import cache
from importlib import resources
from typing import Any

import msgspec

SUFFIX = ".json.gz"


def packed_names(folder: str) -> tuple[str, ...]:
    """Names of the tables in a folder of the catalogue, in order."""
    found = (resources.files("diptych.simulation.catalogue") / folder).iterdir()
    return tuple(sorted(file.name.removesuffix(SUFFIX) for file in found if file.name.endswith(SUFFIX)))


@cache
def packed_table(folder: str, name: str) -> dict[str, Any]:
    """The content of a table, as plain data."""
    return msgspec.json.decode(packed_json(folder, name), type=dict[str, Any])


def packed_json(folder: str, name: str) -> bytes:
    """The content of a table as JSON."""
    packed = (resources.files("diptych.simulation.catalogue") / folder / f"{name}{SUFFIX}").read_bytes()
    return gzip.decompress(packed)
