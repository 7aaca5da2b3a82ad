"""A JSON schema with its parts addressed: where each stands, what its references lead to, and which keywords it has.

Reads drafts 4 to 2020-12 as one language. Where drafts spell a keyword differently, its latest spelling is what others
see: ``items`` as a list is ``prefixItems``, ``dependencies`` are ``dependentRequired`` and ``dependentSchemas``, and
``exclusiveMinimum: true`` is a number. Knows nothing of grammars.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

MAX_REFERENCES = 64  # that lead to one another
_SCHEMAS = frozenset(
    ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
) | {"unevaluatedItems", "unevaluatedProperties"}
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_TABLES = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_DRAFTS_WITHOUT_SIBLINGS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")  # of $ref


class SchemaError(Exception):
    """A keyword of a part of a schema that is malformed or cannot be enforced."""

    def __init__(self, node: "Node", keyword: str, why: str) -> None:
        super().__init__(why)
        self.node = node
        self.keyword = keyword
        self.why = why


class Node:
    """A part of a schema: its keywords, as the latest draft spells them. path: the keys that lead there."""

    __slots__ = ("base", "keywords", "number", "path")

    def __init__(self, number: int, keywords: Mapping[str, Any] | bool, path: tuple[str, ...], base: str) -> None:
        self.number = number
        self.keywords = keywords
        self.path = path
        self.base = base

    def __repr__(self) -> str:
        return f"Node({'/'.join(self.path)})"


class OpenPartError(SchemaError):
    """A part refers to itself before anything is known of it."""


class SchemaDocument:
    """All parts of one schema. ``root`` is the whole; ``child`` and ``target`` lead to others, each of which exists
    once."""

    def __init__(self, schema: Any, ignored: frozenset[tuple[str, ...]] = frozenset()) -> None:
        """ignored: paths of parts that are taken to allow anything."""
        self._ignored = ignored
        self._nodes: dict[int, Node] = {}
        self._kept: list[Any] = []  # an id is an id only while its object lives
        self.anything, self.nothing = Node(-1, True, (), ""), Node(-2, False, (), "")
        self._resources: dict[str, Any] = {"": schema}
        self._anchors: dict[str, tuple[Any, tuple[str, ...]]] = {}
        self._paths: dict[int, tuple[tuple[str, ...], str]] = {}
        named = schema.get("$schema") if isinstance(schema, Mapping) else None
        self._has_siblings = not (isinstance(named, str) and any(draft in named for draft in _DRAFTS_WITHOUT_SIBLINGS))
        is_old = isinstance(named, str) and ("draft-03" in named or "draft-04" in named)
        self._id_keyword = "id" if is_old else "$id"
        self._index(schema)
        self.root = self.node(schema, ())

    def node(self, schema: Any, path: tuple[str, ...], base: str = "") -> Node:
        """The part that a value of the schema is."""
        if isinstance(schema, bool):
            return self.anything if schema else self.nothing
        known = self._nodes.get(id(schema))
        if known is not None:
            return known
        path, base = self._paths.get(id(schema), (path, base))
        if path in self._ignored:
            return self.anything
        node = Node(len(self._kept), {}, path, base)
        self._kept.append(schema)
        if not isinstance(schema, Mapping):
            raise SchemaError(node, "", f"it is {_shown(schema)}, and must be a schema (an object, true or false)")
        self._nodes[id(schema)] = node
        node.keywords = self._modern(node, schema)
        return node

    def made(self, schema: Mapping[str, Any] | bool, near: Node) -> Node:
        """A part that does not stand in the schema itself, for errors at the place of another part."""
        self._kept.append(schema)
        return self.node(schema, near.path, near.base)

    def kept(self, node: Node) -> Any:
        """The schema that a part was made of."""
        return self._kept[node.number]

    def child(self, node: Node, *keys: str) -> Node:
        """The part at some keywords of another one."""
        inner: Any = node.keywords
        for key in keys:
            inner = inner[int(key)] if isinstance(inner, list) else inner[key]
        return self.node(inner, (*node.path, *keys), node.base)

    def target(self, node: Node, keyword: str = "$ref") -> Node:
        """What the reference of a part leads to. Raises SchemaError."""
        assert isinstance(node.keywords, Mapping)
        reference = node.keywords[keyword]
        if not isinstance(reference, str):
            raise SchemaError(node, keyword, f"it is {_shown(reference)}, and must be a text")
        address, fragment = urldefrag(urljoin(node.base, reference))
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get(f"{address}#{fragment}")
            if found is None:
                raise SchemaError(node, keyword, f"{reference[:80]!r} is not in this schema")
            return self.node(*found, address)
        resource = self._resources.get(address)
        if resource is None:
            raise SchemaError(node, keyword, f"{reference[:80]!r} is not in this schema, and others are not fetched")
        path = self._paths.get(id(resource), ((), ""))[0]
        for key in fragment.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            path = (*path, key)
            if isinstance(resource, Mapping) and key in resource:
                resource = resource[key]
            elif isinstance(resource, list) and key.isdecimal() and int(key) < len(resource):
                resource = resource[int(key)]
            else:
                raise SchemaError(node, keyword, f"{reference[:80]!r} is not in this schema")
        return self.node(resource, path, address)

    def _index(self, schema: Any) -> None:
        """Note where each part stands, and the names that parts give themselves."""
        pending: list[tuple[Any, tuple[str, ...], str]] = [(schema, (), "")]
        while pending:
            part, path, base = pending.pop()
            if not isinstance(part, Mapping) or id(part) in self._paths:
                continue
            name = part.get(self._id_keyword)
            if isinstance(name, str) and name.startswith("#"):
                self._anchors[f"{base}{name}"] = (part, path)
            elif isinstance(name, str):
                base = urldefrag(urljoin(base, name))[0]
                self._resources.setdefault(base, part)
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := part.get(keyword), str):
                    self._anchors.setdefault(f"{base}#{anchor}", (part, path))
            self._paths[id(part)] = (path, base)
            pending += [(inner, (*path, *keys), base) for keys, inner in parts_of(part)]

    def _modern(self, node: Node, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keywords of a part in their latest spelling; references alone where their siblings mean nothing."""
        if "$ref" in schema and not self._has_siblings:
            return {"$ref": schema["$ref"]}
        if not schema.keys() & _OLD:
            return schema
        found = dict(schema)
        if isinstance(found.get("items"), list):
            found["prefixItems"] = found.pop("items")
            if "additionalItems" in found:
                found["items"] = found["additionalItems"]
        found.pop("additionalItems", None)
        for ours, theirs in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(found.get(theirs), bool):
                is_exclusive = found.pop(theirs)
                if is_exclusive and ours in found:
                    found[theirs] = found.pop(ours)
        if "dependencies" in found:
            given = found.pop("dependencies")
            if not isinstance(given, Mapping):
                raise SchemaError(node, "dependencies", f"it is {_shown(given)}, and must be an object")
            lists = {key: [value] if isinstance(value, str) else value for key, value in given.items()}
            for keyword, kinds in (("dependentRequired", (list,)), ("dependentSchemas", (Mapping, bool))):
                chosen = {key: value for key, value in lists.items() if isinstance(value, kinds)}
                if chosen:
                    found[keyword] = {**found.get(keyword, {}), **chosen}
        return found


_OLD = frozenset(("items", "additionalItems", "exclusiveMinimum", "exclusiveMaximum", "dependencies"))


def parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The keys and values of all schemas directly within a schema, as it is spelled."""
    for keyword, value in schema.items():
        if keyword in _SCHEMAS and isinstance(value, Mapping):
            yield (keyword,), value
        elif (keyword in _LISTS or keyword == "items") and isinstance(value, list):
            yield from (((keyword, str(number)), part) for number, part in enumerate(value))
        elif (keyword in _TABLES or keyword == "dependencies") and isinstance(value, Mapping):
            yield from (((keyword, name), part) for name, part in value.items())


def _shown(value: Any) -> str:
    return f"{value!r}"[:40]
