"""Texts as the types that a tool's schema names: what formats without JSON write as bare text."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from diptych.serving.answers.response.json_text import as_json

MAX_NESTED = 16  # alternatives and references that are followed for a type
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}


def with_type(value: Any, schema: Any, root: Any = None) -> Any:
    """A text as the type that its schema names; unchanged where it is none of that type, or already no text. root: the
    schema that references lead into."""
    if isinstance(value, list):
        return [with_type(item, schema, root) for item in value]
    if not isinstance(value, str):
        return value
    types = list(_types(schema, root, 0, set()))
    if "string" in types and value.strip() != "null":
        return value
    for kind in types:
        known, read = _read_as(value.strip(), kind)
        if known:
            return read
    return value


def _read_as(text: str, kind: str) -> tuple[bool, Any]:
    if kind == "null" and text in ("null", "None"):
        return True, None
    if kind == "boolean" and text.lower() in ("true", "false"):
        return True, text.lower() == "true"
    if kind not in ("integer", "number", "object", "array"):
        return False, None
    try:
        read = json.loads(as_json(text) or "")
    except (ValueError, RecursionError):
        return False, None
    expected: dict[str, tuple[type, ...]] = {
        "integer": (int,),
        "number": (int, float),
        "object": (dict,),
        "array": (list,),
    }
    if kind == "integer" and isinstance(read, float) and read.is_integer():
        read = int(read)
    return isinstance(read, expected[kind]) and not isinstance(read, bool), read


def _types(schema: Any, root: Any, depth: int, followed: set[str]) -> Iterator[str]:
    """The types that a schema names, of its alternatives and of what it refers to, too (each reference once). Without
    any, those of the values that it lists."""
    if not isinstance(schema, Mapping) or depth > MAX_NESTED:
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from declared
    elif isinstance(pointer := schema.get("$ref"), str):
        if pointer not in followed:
            followed.add(pointer)
            yield from _types(_referred(pointer, root), root, depth + 1, followed)
    else:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        yield from dict.fromkeys(_TYPES.get(type(value), "object") for value in values or [])
    for union in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(union) or []:
            yield from _types(choice, root, depth + 1, followed)
    if schema.get("nullable"):
        yield "null"


def _referred(pointer: str, root: Any) -> Any:
    """The part of a schema that ``#/...`` leads to; None where it leads nowhere."""
    for key in pointer.split("/")[1:]:
        root = root.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root if pointer.startswith("#") else None


def property_of(schema: Mapping[str, Any], key: str) -> Any:
    """The schema of one property of an object."""
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None
