"""Grammars of the arguments of calls in formats that are not JSON: tags with a text in each, and Python.

What a text means depends on its schema there (see response/call_readers.py): the rules allow only what is read as a
value of the schema. Properties come in the order of the schema; those that it does not name do not come.
"""

import json
import keyword
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from diptych.serving.answers.grammar.schema_parts import (
    Schema,
    alternatives,
    constants_of,
    follow,
    properties_of,
    range_of,
    refuse,
)

MAX_NUMBER = 10**15  # where a schema has no limit of its own
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CallArguments(ABC):
    """The rules of one grammar, by their names with options ("text[lazy]")."""

    def __init__(self) -> None:
        self.rules: dict[str, str] = {}

    @abstractmethod
    def add(self, name: str, schema: Schema, param: str) -> None:
        """A rule for the arguments of one call, and those that it needs. Raises InvalidRequestError with the path of
        what cannot be written."""
        ...

    def rule(self, name: str, right: str) -> str:
        """Add a rule; returns the name by which others refer to it."""
        self.rules[name] = right.strip() or '""'
        return name.partition("[")[0]


class TaggedArguments(CallArguments):
    """``<parameter=key>``, a line break, the value, a line break, ``</parameter>``. A value is text where its schema
    allows a text, and JSON elsewhere."""

    _end = "</parameter>"

    def add(self, name: str, schema: Schema, param: str) -> None:
        properties = properties_of(schema, schema, param)
        if properties is None:
            key, text = self.rule("ANY_KEY", r"/[^>\n]+/"), self._any_text()
            self.rule(name, f'("<parameter=" {key} ">\\n" {text} "\\n")*')
            return
        parts = []
        for number, (key, (inner, is_required)) in enumerate(properties.items()):
            where = f"{param}.properties.{key}"
            if not key.strip() or key != key.strip() or re.search(r"[>\n]", key):
                refuse(where, f"{key!r} cannot be the name of a tag")
            value = self.rule(f"{name}_{number}", self._value(f"{name}_{number}", inner, schema, where))
            part = f'{quoted(f"<parameter={key}>")} "\\n" {value} "\\n"'
            parts.append(part if is_required else f"({part})?")
        self.rule(name, " ".join(parts))

    def _any_text(self) -> str:
        """Up to the first closing tag, which belongs to it."""
        return self.rule("any_text[lazy]", f"/(?s:.*)/ {quoted(self._end)}")

    def _value(self, name: str, schema: Schema, root: Schema, param: str) -> str:
        """A value and its closing tag."""
        found = alternatives(schema, root, param)
        texts = [choice for choice in found if _may_be_text(choice)]
        if texts:  # then whatever comes is read as a text, but for null
            written = [self._text(f"{name}_{number}", choice, param) for number, choice in enumerate(texts)]
            if any(choice.get("type") == "null" for choice in found):
                written.append(quoted(f"null\n{self._end}"))
            return " | ".join(dict.fromkeys(written))
        shared = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, Mapping) and key in root}
        own = dict(schema) if isinstance(schema, Mapping) else {}
        whole = json.dumps({**shared, **own, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)
        return f"{self.rule(f'{name}_json', f'%json {whole}')} {quoted(chr(10) + self._end)}"

    def _text(self, name: str, schema: Mapping[str, Any], param: str) -> str:
        values = constants_of(schema)
        if values is not None:
            texts = [value for value in values if isinstance(value, str) and self._end not in value]
            if not texts:
                refuse(param, "none of its values can stand in a tag")
            return " | ".join(quoted(f"{text}\n{self._end}") for text in texts)
        conditions = patterns_of(schema, param)
        if not conditions:
            return self._any_text()
        end = self._end.replace("/", r"\/")
        wanted = " & ".join(f"(/{condition}/ {quoted(chr(10) + self._end)})" for condition in conditions)
        return self.rule(f"{name}[lazy]", f"{wanted} & ~/(?s:.*){end}(?s:.+)/")


class PythonArguments(CallArguments):
    """``key=value, key=value``, with Python's literals."""

    def __init__(self) -> None:
        super().__init__()
        self._references: dict[str, str] = {}  # within the arguments that are written: to the names of their rules
        self._prefix = ""

    def add(self, name: str, schema: Schema, param: str) -> None:
        self._references, self._prefix = {}, name
        properties = properties_of(schema, schema, param)
        if properties is None:
            reserved = "|".join(keyword.kwlist)
            key = self.rule("ANY_NAME", f"/[A-Za-z_][A-Za-z0-9_]*/ & ~/{reserved}/")
            pair = self.rule("any_argument", f'{key} "=" {self._any_value()}')
            self.rule(name, f'({pair} (", " {pair})*)?')
            return
        for key in properties:
            if not key.isidentifier() or keyword.iskeyword(key):
                refuse(f"{param}.properties.{key}", f"{key!r} is no name in Python")
        heads = {key: f"{key}=" for key in properties}
        self.rule(name, self._members(name, properties, heads, schema, param))

    def _members(
        self,
        name: str,
        properties: Mapping[str, tuple[Schema, bool]],
        heads: Mapping[str, str],
        root: Schema,
        param: str,
    ) -> str:
        """Those that are required and some of the others, with ", " between them. heads: how each begins."""
        beginnings: list[str] = []
        tail = ""  # what may follow the present one
        may_be_empty = True
        for number, (key, (schema, is_required)) in reversed(list(enumerate(properties.items()))):
            value = self.rule(
                f"{name}_{number}", self._value(f"{name}_{number}", schema, root, f"{param}.properties.{key}")
            )
            member = self.rule(f"{name}_{number}_m", f"{quoted(heads[key])} {value}")
            beginnings = [f"{member} {tail}".strip(), *([] if is_required else beginnings)]
            may_be_empty = may_be_empty and not is_required
            following = f'", " {member}' if is_required else f'(", " {member})?'
            tail = self.rule(f"{name}_{number}_t", f"{following} {tail}")
        return f"({' | '.join(beginnings)}){'?' if may_be_empty else ''}" if beginnings else ""

    def _any_value(self) -> str:
        text, number = self._string(), self.rule("ANY_NUMBER", r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,12})?/")
        self.rule("any_item", f'{text} ": " any_value')
        self.rule("any_list", '"[" (any_value (", " any_value)*)? "]"')
        self.rule("any_dict", '"{" (any_item (", " any_item)*)? "}"')
        return self.rule("any_value", f'{text} | {number} | "True" | "False" | "None" | any_list | any_dict')

    def _string(self, low: int = 0, high: int | None = None) -> str:
        """A literal of so many characters."""
        count = "*" if not low and high is None else f"{{{low},{'' if high is None else high}}}"
        kinds = [rf"{mark}([^{mark}\\\x00-\x1f\x7f]|\\[\\nrt{mark}]){count}{mark}" for mark in ('"', "'")]
        return self.rule(f"STRING_{low}_{'' if high is None else high}", f"/{'|'.join(kinds)}/")

    def _value(self, name: str, schema: Schema, root: Schema, param: str) -> str:
        found = alternatives(schema, root, param, follows=False)
        written = [self._single(f"{name}_a{number}", choice, root, param) for number, choice in enumerate(found)]
        return " | ".join(dict.fromkeys(written))

    def _single(self, name: str, schema: Mapping[str, Any], root: Schema, param: str) -> str:
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]), schema, root, param)
        if (values := constants_of(schema)) is not None:
            return " | ".join(quoted(python_literal(value)) for value in values)
        match schema.get("type"):
            case None:
                return self._any_value()
            case "null":
                return '"None"'
            case "boolean":
                return '"True" | "False"'
            case "string":
                if "pattern" in schema:
                    refuse(param, "pattern cannot be enforced")
                return self._string(*range_of(schema, "minLength", "maxLength", param))
            case "array":
                return self.rule(name, self._array(name, schema, root, param))
            case "object":
                properties = properties_of(schema, root, param)
                if properties is None:
                    self._any_value()
                    return "any_dict"
                heads = {key: f"{python_literal(key)}: " for key in properties}
                return self.rule(name, f'"{{" {self._members(name, properties, heads, root, param)} "}}"')
        limits = {
            ours: limit
            for ours, theirs, limit in (
                ("minimum", "exclusiveMinimum", -MAX_NUMBER),
                ("maximum", "exclusiveMaximum", MAX_NUMBER),
            )
            if ours not in schema and theirs not in schema
        }
        return self.rule(name, "%json " + json.dumps({**schema, **limits}))

    def _reference(self, pointer: str, schema: Mapping[str, Any], root: Schema, param: str) -> str:
        """One rule for all that refer to the same: a schema may contain itself."""
        if pointer not in self._references:
            name = self._references[pointer] = f"{self._prefix}_ref{len(self._references)}"
            self.rule(name, self._value(name, follow(schema, root, param), root, param))
        return self._references[pointer]

    def _array(self, name: str, schema: Mapping[str, Any], root: Schema, param: str) -> str:
        low, high = range_of(schema, "minItems", "maxItems", param)
        if high == 0:
            return '"[]"'
        item = self.rule(f"{name}_i", self._value(f"{name}_i", schema.get("items", True), root, f"{param}.items"))
        more = "" if high == 1 else f'(", " {item}){{{max(0, low - 1)},{"" if high is None else high - 1}}}'
        return f'"[" ({item} {more}){"" if low else "?"} "]"'


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether a text is a value, or any value is."""
    if (values := constants_of(schema)) is not None:
        return any(isinstance(value, str) for value in values)
    return schema.get("type") in (None, "string")


def patterns_of(schema: Mapping[str, Any], param: str) -> list[str]:
    """Regular expressions that a text fits whole, each between slashes."""
    found = []
    low, high = range_of(schema, "minLength", "maxLength", param)
    if low or high is not None:
        found.append(f"(?s:.{{{low},{'' if high is None else high}}})")
    pattern = schema.get("pattern")
    if pattern is None:
        return found
    inner = str(pattern).removeprefix("^")
    is_begun, is_ended = inner != pattern, inner.endswith("$") and not inner.endswith("\\$")
    inner = inner[:-1] if is_ended else inner
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", inner, flags=re.DOTALL)
    if "^" in plain or "$" in plain or ("|" in plain and (is_begun or is_ended)):
        refuse(param, "a pattern with ^ or $ in the middle, or beside |, cannot be enforced")
    body = re.sub(r"\\.|/|\n", lambda match: {"/": r"\/", "\n": r"\n"}.get(match.group(), match.group()), f"({inner})")
    return [*found, f"{'' if is_begun else '(?s:.*)'}{body}{'' if is_ended else '(?s:.*)'}"]


def python_literal(value: Any) -> str:
    """A value of JSON as Python writes it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(python_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{python_literal(key)}: {python_literal(item)}' for key, item in value.items())}}}"
    return repr(value)


def quoted(text: str) -> str:
    """A fixed text in Lark."""
    return json.dumps(text, ensure_ascii=False)
