"""From the query of an address to checked parameters, and back to what a page may offer.

Owns how a wrong value is said. The limits themselves stand at each panel's parameters.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import msgspec.inspect

from diptych.control.errors import ConfigError

Parameters = TypeVar("Parameters", bound=msgspec.Struct)


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of a panel. All have defaults; limits are in their types."""


def read(kind: type[Parameters], query: Mapping[str, str]) -> Parameters:
    """Checked parameters. Raises ConfigError naming the field, its value and the limit."""
    for name in query:
        if name not in kind.__struct_fields__:
            raise ConfigError(f"{name} is no parameter; there are {', '.join(kind.__struct_fields__)}", param=name)
    try:
        return msgspec.convert(dict(query), kind, strict=False)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$.")
        name = re.split(r"[`\[.]", where)[0]
        raise ConfigError(_in_words(kind, name, query.get(name, ""), message.replace("`", "")), param=name) from None


def controls(kind: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """What a page may offer for each parameter: its ``default``, and ``min`` and ``max`` or the ``choices``."""
    found: dict[str, dict[str, Any]] = {}
    for field in msgspec.structs.fields(kind):
        known = msgspec.inspect.type_info(field.type)
        entry: dict[str, Any] = {"default": field.default}
        if isinstance(known, msgspec.inspect.LiteralType):
            entry["choices"] = list(known.values)
        elif isinstance(known, msgspec.inspect.IntType | msgspec.inspect.FloatType):
            entry |= {"min": known.ge, "max": known.le}
        found[field.name] = entry
    return found


def _in_words(kind: type[msgspec.Struct], name: str, value: str, message: str) -> str:
    limits = controls(kind).get(name, {})
    if "choices" in limits:
        return f"{name} is {value!r}; one of {', '.join(map(str, limits['choices']))}"
    if limits.get("min") is not None:
        return f"{name} is {value!r}; it must be a number from {limits['min']:,} to {limits['max']:,}"
    return f"{name} is {value!r}: {message}"
