"""JSON schemas taken apart, for grammars of values that are not written as JSON.

They are written anew before (schema_rewriting.py), for such values. What a grammar cannot say is refused with its path:
nothing is passed over, but for annotations (``format`` is one, as JSON Schema has it by default).
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from diptych.control.errors import InvalidRequestError

Schema = Mapping[str, Any] | bool

MAX_ALTERNATIVES = 256  # of one value
MAX_REFERENCES = 64  # that lead to one another
_VALUES = ("const", "default", "enum", "example", "examples")  # keywords whose values are no schemas
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "format"),
        *("$schema", "$id", "$comment", "$defs", "definitions", "nullable"),
    )
)
_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_KEYWORDS: dict[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern")),
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(
        ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}


def refuse(param: str, why: str) -> NoReturn:
    """Raises InvalidRequestError."""
    raise InvalidRequestError(f"{param}: {why}, in calls as this model writes them", param=param, code="unsupported")


def follow(schema: Any, root: Schema, param: str) -> Any:
    """What a reference within the same schema leads to; anything else as it is."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        schema = _at(schema["$ref"], root, param)
    refuse(param, "its $ref leads to itself")


def _at(pointer: Any, root: Any, param: str) -> Any:
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        refuse(param, f"$ref is {str(pointer)[:80]!r}, and must lead to a part of the schema (#/...)")
    for key in pointer[1:].split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if not isinstance(root, Mapping) or key not in root:
            refuse(param, f"$ref is {pointer[:80]!r}, which is not there")
        root = root[key]
    return root


def with_nulls(schema: Any) -> Any:
    """A schema in which OpenAPI's ``nullable`` is said in the words of JSON Schema."""
    if isinstance(schema, list):
        return [with_nulls(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    written = {key: value if key in _VALUES else with_nulls(value) for key, value in schema.items()}
    if written.get("nullable") is not True:
        return written
    del written["nullable"]
    return {"anyOf": [written, {"type": "null"}]}


def alternatives(schema: Any, root: Schema, param: str, *, follows: bool = True) -> list[Mapping[str, Any]]:
    """Schemas of at most one type each, which together say the same. follows: references are replaced by what they
    lead to, and else are alternatives themselves. One without a type allows any value."""
    found: list[Mapping[str, Any]] = []
    nodes: list[tuple[Any, int]] = [(schema, 0)]
    while nodes:
        node, depth = nodes.pop()
        if node is True:
            node = {}
        if not isinstance(node, Mapping):
            refuse(param, "it allows no value" if node is False else "it is no schema")
        if len(found) + len(nodes) > MAX_ALTERNATIVES or depth > MAX_REFERENCES:
            refuse(param, f"it has more than {MAX_ALTERNATIVES} alternatives")
        branches = _branches(node, root, param, follows=follows)
        if branches is not None:
            nodes += [(branch, depth + 1) for branch in reversed(branches)]
        elif (simple := _checked(node, param)) is not None:
            found.append(simple)
    if not found:
        refuse(param, "it allows no value")
    return found


def _branches(node: Mapping[str, Any], root: Schema, param: str, *, follows: bool) -> list[Any] | None:
    """What a schema consists of; None for a simple one."""
    keys = node.keys() - _ANNOTATIONS
    if keys == {"$ref"}:
        return [follow(node, root, param)] if follows else None
    for name in ("anyOf", "allOf"):
        members = node.get(name)
        if keys == {name} and isinstance(members, list) and (name == "anyOf" or len(members) == 1):
            return list(members)
    kinds = node.get("type")
    if isinstance(kinds, list) and kinds:
        return [_of_type(node, node.keys() - {"type"}, kind) for kind in kinds]
    return None


def _of_type(node: Mapping[str, Any], keys: Any, kind: Any) -> dict[str, Any]:
    """The part of a schema of several types that concerns one of them."""
    foreign = frozenset().union(*_KEYWORDS.values()) - _KEYWORDS.get(kind, frozenset()) if isinstance(kind, str) else ()
    return {**{key: node[key] for key in node if key in keys and key not in foreign}, "type": kind}


def _checked(node: Mapping[str, Any], param: str) -> Mapping[str, Any] | None:
    """A simple schema with its type, where it has keywords of one type only; None where it allows no value."""
    if "$ref" in node:
        return node
    keys = node.keys() - _ANNOTATIONS - {"type", "enum", "const"}
    kind = node.get("type")
    if kind is None:
        kind = next((name for name, known in _KEYWORDS.items() if keys and keys <= known), None)
    if kind is not None and kind not in _KEYWORDS:
        refuse(param, f"type is {str(kind)[:40]!r}, which is none of JSON")
    if unknown := sorted(keys - _KEYWORDS.get(kind or "", frozenset())):
        refuse(param, f"{unknown[0]} cannot be enforced")
    typed = {**node, "type": kind} if kind is not None else node
    return None if constants_of(typed) == [] else typed


def constants_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of an enumeration that are of the schema's type; None where there is none."""
    if "const" in schema:
        values = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        values = schema["enum"]
    else:
        return None
    kind = schema.get("type")
    return [value for value in values if kind is None or is_of_type(value, kind)]


def is_of_type(value: Any, kind: str) -> bool:
    """Whether a value is of a type of JSON Schema."""
    if kind == "integer":
        return type(value) is int or (isinstance(value, float) and value.is_integer())
    if kind == "number":
        return type(value) in (int, float)
    known = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
    return isinstance(value, known[kind])


def properties_of(schema: Any, root: Schema, param: str) -> dict[str, tuple[Schema, bool]] | None:
    """The properties of an object, and whether each is required. None: any may come."""
    found = alternatives(schema, root, param)
    if len(found) != 1 or found[0].get("type", "object") != "object" or constants_of(found[0]) is not None:
        refuse(param, "it is not an object of named properties")
    [schema] = found
    properties, required, others = (schema.get(name) for name in ("properties", "required", "additionalProperties"))
    properties, required = properties or {}, required or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        refuse(param, "properties is no object, or required is no list")
    if missing := [name for name in required if name not in properties]:
        refuse(f"{param}.required", f"{str(missing[0])[:80]!r} is none of the properties")
    if not properties and others in (None, True, {}):
        return None
    if not properties and others is not False:
        refuse(f"{param}.additionalProperties", "properties without names cannot be enforced")
    return {name: (inner, name in required) for name, inner in properties.items()}


def range_of(schema: Mapping[str, Any], low_name: str, high_name: str, param: str) -> tuple[int, int | None]:
    """Lowest and highest length; None: without an upper end."""
    low, high = schema.get(low_name, 0), schema.get(high_name)
    for name, value in ((low_name, low), (high_name, high)):
        if value is not None and (not isinstance(value, int) or not 0 <= value <= 2**20):
            refuse(param, f"{name} is {str(value)[:40]}, and must be in [0, {2**20}]")
    if high is not None and high < low:
        refuse(param, f"{high_name} is {high}, and {low_name} is {low}")
    return low, high
