"""Tool calls inside a field's text, read while it grows: the name as soon as it is complete, then the arguments.

``reader_of`` chooses by the format of the field. Arguments are passed on as the model wrote them where they are JSON;
other formats become JSON, with the types of the tool's schema. A field in which no call can be found is content: its
text comes out unchanged.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from diptych.serving.answers.response.content_formats import CONTENT_FORMATS
from diptych.serving.answers.response.pattern import Search
from diptych.serving.answers.response.response_template import ResponseField

Tools = Mapping[str, Mapping[str, Any]]  # name to the schema of its arguments


MAX_NESTED = 16  # alternatives and references that are followed for a type
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}


class PartKind(StrEnum):
    """What a part of an answer is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"  # a call begins; the text is its name
    ARGUMENTS = "arguments"  # of the call that began last


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Some more of an answer."""

    kind: PartKind
    text: str


class CallReader(Protocol):
    """Reads one field of calls."""

    num_calls: int

    def push(self, text: str) -> list[AnswerPart]:
        """More of the field's text."""
        ...

    def end(self) -> list[AnswerPart]:
        """The field is closed, or the answer ended within it."""
        ...


def reader_of(field: ResponseField, captures: Mapping[str, str], tools: Tools) -> CallReader:
    """The reader of a field that was opened with these captures."""
    is_standard = field.content == "json" and not set(field.content_args) - {"allow_non_json"}
    keys = (field.name_source[-1], field.arguments_source[-1])
    depth = 1 if field.each else 2
    if is_standard and len(field.name_source) == len(field.arguments_source) == depth:
        return JsonCalls(*keys)
    is_captured = len(field.name_source) == 1 and field.name_source[0] in captures
    if is_captured and field.arguments_source == ("content",):
        name = captures[field.name_source[0]].strip()
        if is_standard:
            return NamedCall(name)
        if field.content == "xml-inline" and not set(field.content_args) - {"tag_pattern"}:
            return TaggedCall(name, field, tools.get(name, {}))
    return WholeCalls(field, captures, tools)


class JsonCalls:
    """Objects with a name and arguments: a single one, a list of them, or some in a row."""

    def __init__(self, name_key: str, arguments_key: str) -> None:
        self.num_calls = 0
        self._name_keys = {name_key, "name"}
        self._arguments_keys = {arguments_key, "arguments", "parameters"}
        self._is_in_call = self._is_value = self._in_string = self._is_escaped = False
        self._expects_value = False
        self._depth = 0  # within a value
        self._key: str | None = None
        self._text = ""  # of the key or the value that is being read
        self._name: str | None = None
        self._arguments: str | None = None  # before the name is known
        self._has_arguments = False

    def push(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        streamed = ""
        for character in text:
            if self._is_value:
                is_over, takes = self._in_value(character)
                if takes:
                    if self._is_streaming:
                        streamed += character
                    else:
                        self._text += character
                if is_over:
                    if streamed:
                        parts.append(AnswerPart(PartKind.ARGUMENTS, streamed))
                        streamed = ""
                    parts += self._end_value()
                if takes:
                    continue
            parts += self._between(character)
        return [*parts, AnswerPart(PartKind.ARGUMENTS, streamed)] if streamed else parts

    def end(self) -> list[AnswerPart]:
        if self._is_in_call and self._is_value and not self._is_streaming and self._depth == 0 and not self._in_string:
            return self._end_value()
        return []

    @property
    def _is_streaming(self) -> bool:
        """Whether the present value goes out as it comes: arguments in braces, of a call that has begun."""
        return self._has_arguments and self._arguments is None and self._key in self._arguments_keys

    def _between(self, character: str) -> list[AnswerPart]:
        """A character outside of all values."""
        if not self._is_in_call:
            if character == "{":
                self._is_in_call, self._key, self._name, self._arguments = True, None, None, None
                self._has_arguments = self._expects_value = False
            return []
        if self._in_string:  # a key
            self._text += character
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
                self._key = _decoded(self._text)
            return []
        if self._expects_value:
            return [] if character.isspace() else self._begin_value(character)
        if character == '"':
            self._in_string, self._text = True, '"'
        elif character == ":":
            self._expects_value = True
        elif character == "}":
            self._is_in_call = False
            return self._begin_call("{}") if self._name is not None and not self._has_arguments else []
        return []

    def _begin_value(self, character: str) -> list[AnswerPart]:
        self._is_value, self._expects_value, self._text, self._depth = True, False, "", 0
        parts: list[AnswerPart] = []
        if self._key in self._arguments_keys and character in "{[" and self._name is not None:
            parts = [] if self._has_arguments else self._begin_call("")
        self._in_value(character)
        if self._is_streaming:
            return [*parts, AnswerPart(PartKind.ARGUMENTS, character)]
        self._text = character
        return parts

    def _in_value(self, character: str) -> tuple[bool, bool]:
        """Whether the value is over now, and whether the character belongs to it."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
                return self._depth == 0, True
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif self._depth == 0:
            is_over = character in ",}]" or character.isspace()
            return is_over, not is_over
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0, True
        return False, True

    def _end_value(self) -> list[AnswerPart]:
        was_streaming, raw = self._is_streaming, self._text
        self._is_value, self._text = False, ""
        if was_streaming:
            self._key = None
        elif self._key in self._name_keys and self._name is None:
            name = _decoded(raw)
            if isinstance(name, str) and name:
                self._name = name
                if self._arguments is not None:
                    return self._begin_call(self._arguments)
        elif self._key in self._arguments_keys and not self._has_arguments:
            arguments = "{}" if raw == "null" else _decoded(raw) if raw.startswith('"') else raw
            if self._name is not None:
                return self._begin_call(str(arguments))
            self._arguments = str(arguments)
        return []

    def _begin_call(self, arguments: str) -> list[AnswerPart]:
        assert self._name is not None
        self.num_calls += 1
        self._has_arguments, self._arguments = True, None
        return _call(self._name, arguments)


class NamedCall:
    """A call whose name was in the opening; the text is the JSON of its arguments."""

    def __init__(self, name: str) -> None:
        self.num_calls = 0
        self._name = name
        self._space = ""

    def push(self, text: str) -> list[AnswerPart]:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :] if kept or self.num_calls else ""
        if not self.num_calls:
            kept = kept.lstrip()
        if not kept:
            return []
        if self.num_calls:
            return [AnswerPart(PartKind.ARGUMENTS, kept)]
        self.num_calls = 1
        return _call(self._name, kept)

    def end(self) -> list[AnswerPart]:
        if self.num_calls:
            return []
        self.num_calls = 1
        return _call(self._name, "{}")


class TaggedCall:
    """A call whose name was in the opening; every argument is a tag, which goes out when it is complete."""

    def __init__(self, name: str, field: ResponseField, schema: Mapping[str, Any]) -> None:
        self.num_calls = 0
        self._name = name
        self._pattern = field.content_args["tag_pattern"]
        self._schema = schema
        self._text = ""
        self._at = 0
        self._search = Search([self._pattern])
        self._keys: set[str] = set()

    def push(self, text: str) -> list[AnswerPart]:
        parts = self._begin()
        start, self._text = len(self._text), self._text + text
        while match := self._search.push(self._text, start):
            parts += self._argument(match.groups)
            start = match.end
            self._search = Search([self._pattern], match.end)
        return parts

    def end(self) -> list[AnswerPart]:
        parts = self._begin()
        if match := self._search.finish():
            parts += self._argument(match.groups)
        return [*parts, AnswerPart(PartKind.ARGUMENTS, "}" if self._keys else "{}")]

    def _begin(self) -> list[AnswerPart]:
        if self.num_calls:
            return []
        self.num_calls = 1
        return _call(self._name, "")

    def _argument(self, groups: Mapping[str, tuple[int, int]]) -> list[AnswerPart]:
        key, value = (self._text[slice(*groups[name])] if name in groups else "" for name in ("key", "value"))
        key = key.strip()
        if key in self._keys:
            return []
        opening = ", " if self._keys else "{"
        self._keys.add(key)
        written = _json(with_type(value, _property(self._schema, key), self._schema))
        return [AnswerPart(PartKind.ARGUMENTS, f"{opening}{_json(key)}: {written}")]


class WholeCalls:
    """Calls in a format that is read when the field is closed."""

    def __init__(self, field: ResponseField, captures: Mapping[str, str], tools: Tools) -> None:
        self.num_calls = 0
        self._field, self._captures, self._tools = field, captures, tools
        self._text = ""

    def push(self, text: str) -> list[AnswerPart]:
        self._text += text
        return []

    def end(self) -> list[AnswerPart]:
        field = self._field
        try:
            value = CONTENT_FORMATS[field.content](self._text, field.content_args)
            elements = value if field.each and isinstance(value, list) else [value]
            calls = [self._read(element) for element in elements]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            return []
        self.num_calls = len(calls)
        return [part for call in calls for part in _call(*call)]

    def _read(self, element: Any) -> tuple[str, str]:
        scope = {**self._captures, **(element if self._field.each else {"content": element})}
        name = _follow(scope, self._field.name_source)
        arguments = _follow(scope, self._field.arguments_source)
        if not isinstance(name, str) or not name:
            raise ValueError("a call without a name")
        if self._field.content in ("xml-inline", "kv-lines") and isinstance(arguments, dict):
            schema = self._tools.get(name, {})
            arguments = {key: with_type(value, _property(schema, key), schema) for key, value in arguments.items()}
        return name, arguments if isinstance(arguments, str) else _json(arguments)


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
        read = json.loads(text, parse_constant=_no_constant)
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


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


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


def _property(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def _follow(scope: Mapping[str, Any], source: tuple[str, ...]) -> Any:
    value: Any = scope
    for key in source:
        value = value[key]
    return value


def _call(name: str, arguments: str) -> list[AnswerPart]:
    begun = [AnswerPart(PartKind.CALL, name)]
    return [*begun, AnswerPart(PartKind.ARGUMENTS, arguments)] if arguments else begun


def _decoded(raw: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw.strip('"')


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
