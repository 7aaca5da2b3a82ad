"""Grammars of the arguments of calls in formats that are not JSON: tags with a text in each, Python, and Gemma's.

What a text means depends on its schema there (see response/call_readers.py): the rules allow only what is read as a
value of the schema. Properties come in the order of the schema; those that it does not name do not come.
"""

import json
import keyword
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
from diptych.serving.answers.response.response_template import CallForm

MAX_NUMBER = 10**15  # where a schema has no limit of its own
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CallArguments(ABC):
    """The rules of one grammar, by their names with options ("text[lazy]"). text: writes a fixed text in Lark, with
    special tokens by their ids."""

    def __init__(self, form: CallForm, text: Callable[[str], str]) -> None:
        self.rules: dict[str, str] = {}
        self.form = form
        self.text = text

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
    """A tag for each argument, as the form spells them. A value is text where its schema allows a text, and JSON
    elsewhere."""

    def __init__(self, form: CallForm, text: Callable[[str], str]) -> None:
        super().__init__(form, text)
        self._end = form.tags.end.lstrip("\n")
        self._break = form.tags.end[: len(form.tags.end) - len(self._end)]
        starts = [rf"\n[ \t]*{_escaped(form.tags.begin)}", _escaped(form.end.split("\n")[0])]
        self._no_tags = "|".join(start for start in starts if start)  # would be read as the end of a value

    def add(self, name: str, schema: Schema, param: str) -> None:
        properties, tags = properties_of(schema, schema, param), self.form.tags
        if properties is None:
            key, text = self.rule("ANY_KEY", r'/[^<>"\n]+/'), self._any_text()
            begin, middle, gap = (self.text(part) for part in (tags.begin, tags.middle, tags.gap))
            self.rule(name, f"({begin} {key} {middle} {text} {gap})*")
            return
        parts = []
        for number, (key, (inner, is_required)) in enumerate(properties.items()):
            where = f"{param}.properties.{key}"
            if not key.strip() or key != key.strip() or re.search(r'[<>"\n]', key):
                refuse(where, f"{key!r} cannot be the name of a tag")
            value = self.rule(f"{name}_{number}", self._value(f"{name}_{number}", inner, schema, where))
            part = f"{self.text(tags.begin + key + tags.middle)} {value} {self.text(tags.gap)}"
            parts.append(part if is_required else f"({part})?")
        self.rule(name, " ".join(parts))

    def _any_text(self) -> str:
        """Up to the first closing tag, which belongs to it."""
        closing = self.text(self._end)
        if closing != quoted(self._end):  # a special token, which is in no text
            return self.rule("any_text", f"FREE_TEXT {closing}") if self.rule("FREE_TEXT", "/(?s:.*)/") else ""
        return self.rule("any_text[lazy]", f"(/(?s:.*)/ {closing}) & ~/(?s:.*)({self._no_tags})(?s:.*)/")

    def _value(self, name: str, schema: Schema, root: Schema, param: str) -> str:
        """A value and its closing tag."""
        found = alternatives(schema, root, param)
        texts = [choice for choice in found if _may_be_text(choice)]
        if texts:  # then whatever comes is read as a text, but for null
            written = [self._text(f"{name}_{number}", choice, param) for number, choice in enumerate(texts)]
            if any(choice.get("type") == "null" for choice in found):
                written.append(self.text(f"null{self._break}{self._end}"))
            return " | ".join(dict.fromkeys(written))
        shared = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, Mapping) and key in root}
        own = dict(schema) if isinstance(schema, Mapping) else {}
        whole = json.dumps({**shared, **own, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)
        return f"{self.rule(f'{name}_json', f'%json {whole}')} {self.text(self._break + self._end)}"

    def _text(self, name: str, schema: Mapping[str, Any], param: str) -> str:
        values = constants_of(schema)
        if values is not None:
            texts = [value for value in values if isinstance(value, str) and self._end not in value]
            if not texts:
                refuse(param, "none of its values can stand in a tag")
            return " | ".join(self.text(f"{text}{self._break}{self._end}") for text in texts)
        conditions = patterns_of(schema, param)
        if not conditions:
            return self._any_text()
        closing = self.text(self._break + self._end)
        if closing != quoted(self._break + self._end):
            rule = self.rule(f"TEXT_{name.upper()}", " & ".join(f"/{condition}/" for condition in conditions))
            return f"{rule} {closing}"
        wanted = " & ".join(f"(/{condition}/ {closing})" for condition in conditions)
        stops = f"{_escaped(self._end)}(?s:.+)|{self._no_tags}"
        return self.rule(f"{name}[lazy]", f"{wanted} & ~/(?s:.*)({stops})(?s:.*)/")


class PythonArguments(CallArguments):
    """``key=value, key=value``, with Python's literals."""

    comma = ", "

    def __init__(self, form: CallForm, text: Callable[[str], str]) -> None:
        super().__init__(form, text)
        self._references: dict[str, str] = {}  # within the arguments that are written: to the names of their rules
        self._prefix = ""

    def add(self, name: str, schema: Schema, param: str) -> None:
        self._references, self._prefix = {}, name
        properties = properties_of(schema, schema, param)
        if properties is None:
            self._any_arguments(name)
            return
        self._check_names(properties, param)
        heads = {key: self._head(key) for key in properties}
        self.rule(name, self._members(name, properties, heads, schema, param))

    def _any_arguments(self, name: str) -> None:
        reserved = "|".join(keyword.kwlist)
        key = self.rule("ANY_NAME", f"/[A-Za-z_][A-Za-z0-9_]*/ & ~/{reserved}/")
        pair = self.rule("any_argument", f'{key} "=" {self._any_value()}')
        self.rule(name, f"({pair} ({self._comma} {pair})*)?")

    @property
    def _comma(self) -> str:
        return quoted(self.comma)

    def _head(self, key: str) -> str:
        """How an argument begins."""
        return f"{key}="

    def _item_head(self, key: str) -> str:
        """How a member of an object within begins."""
        return f"{python_literal(key)}: "

    def _literal(self, value: Any) -> str:
        """A value, in Lark."""
        return quoted(python_literal(value))

    def _check_names(self, properties: Mapping[str, Any], param: str) -> None:
        for key in properties:
            if not key.isidentifier() or keyword.iskeyword(key):
                refuse(f"{param}.properties.{key}", f"{key!r} is no name in Python")

    def _members(
        self,
        name: str,
        properties: Mapping[str, tuple[Schema, bool]],
        heads: Mapping[str, str],
        root: Schema,
        param: str,
    ) -> str:
        """The required arguments and some of the others, with ", " between them. heads: how each begins."""
        beginnings: list[str] = []
        tail = ""  # what may follow the present one
        may_be_empty = True
        for number, (key, (schema, is_required)) in reversed(list(enumerate(properties.items()))):
            value = self.rule(
                f"{name}_{number}", self._value(f"{name}_{number}", schema, root, f"{param}.properties.{key}")
            )
            member = self.rule(f"{name}_{number}_m", f"{self.text(heads[key])} {value}")
            beginnings = [f"{member} {tail}".strip(), *([] if is_required else beginnings)]
            may_be_empty = may_be_empty and not is_required
            following = f"{self._comma} {member}" if is_required else f"({self._comma} {member})?"
            tail = self.rule(f"{name}_{number}_t", f"{following} {tail}")
        return f"({' | '.join(beginnings)}){'?' if may_be_empty else ''}" if beginnings else ""

    def _any_value(self) -> str:
        text, number = self._string(), self.rule("ANY_NUMBER", r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,12})?/")
        self.rule("any_item", f'{text} ": " any_value')
        self.rule("any_list", '"[" (any_value (", " any_value)*)? "]"')
        self.rule("any_dict", '"{" (any_item (", " any_item)*)? "}"')
        return self.rule("any_value", f'{text} | {number} | "True" | "False" | "None" | any_list | any_dict')

    def _string(self, low: int = 0, high: int | None = None) -> str:
        """A string literal of ``low`` to ``high`` characters."""
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
            return " | ".join(self._literal(value) for value in values)
        match schema.get("type"):
            case None:
                return self._any_value()
            case "null":
                return self._literal(None)
            case "boolean":
                return f"{self._literal(True)} | {self._literal(False)}"
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
                heads = {key: self._item_head(key) for key in properties}
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
        more = "" if high == 1 else f"({self._comma} {item}){{{max(0, low - 1)},{'' if high is None else high - 1}}}"
        return f'"[" ({item} {more}){"" if low else "?"} "]"'


class MarkedArguments(PythonArguments):
    """``{key:value,key:value}``, as JSON without spaces, but for names without quotes and strings between marks."""

    comma = ","

    def add(self, name: str, schema: Schema, param: str) -> None:
        super().add(f"{name}_in", schema, param)
        self.rule(name, f'"{{" {name}_in "}}"')

    def _any_arguments(self, name: str) -> None:
        key = self.rule("ANY_NAME", "/[A-Za-z_][A-Za-z0-9_]*/")
        pair = self.rule("any_argument", f'{key} ":" {self._any_value()}')
        self.rule(name, f"({pair} ({self._comma} {pair})*)?")

    def _head(self, key: str) -> str:
        return f"{key}:"

    def _item_head(self, key: str) -> str:
        return f"{key}:"

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            mark = self.form.string_mark
            return self.text(f"{mark}{value}{mark}")
        if isinstance(value, list):
            return f'"[" {f" {self._comma} ".join(map(self._literal, value))} "]"'
        if isinstance(value, dict):
            pairs = [f"{self.text(self._item_head(key))} {self._literal(item)}" for key, item in value.items()]
            return f'"{{" {f" {self._comma} ".join(pairs)} "}}"'
        return quoted(json.dumps(value))

    def _check_names(self, properties: Mapping[str, Any], param: str) -> None:
        for key in properties:
            if not re.fullmatch(r"[A-Za-z_][\w-]*", key):
                refuse(f"{param}.properties.{key}", f"{key!r} cannot be written without quotes")

    def _string(self, low: int = 0, high: int | None = None) -> str:
        mark = self.text(self.form.string_mark)
        count = "*" if not low and high is None else f"{{{low},{'' if high is None else high}}}"
        free = "(?s:.)" if mark != quoted(self.form.string_mark) else "[^<]"  # a special token is in no text
        suffix = f"{low}_{'' if high is None else high}"
        return self.rule(f"string_{suffix}", f"{mark} {self.rule(f'STRING_{suffix}', f'/{free}{count}/')} {mark}")

    def _any_value(self) -> str:
        text, number = self._string(), self.rule("ANY_NUMBER", r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,12})?/")
        name = self.rule("ANY_NAME", "/[A-Za-z_][A-Za-z0-9_]*/")
        self.rule("any_item", f'{name} ":" any_value')
        self.rule("any_list", '"[" (any_value ("," any_value)*)? "]"')
        self.rule("any_dict", '"{" (any_item ("," any_item)*)? "}"')
        return self.rule("any_value", f'{text} | {number} | "true" | "false" | "null" | any_list | any_dict')


def _escaped(text: str) -> str:
    """A text as a regular expression between slashes."""
    return re.sub(r"[^\w<>=\" :|]", lambda found: {"\n": r"\n"}.get(found.group(), "\\" + found.group()), text).replace(
        "|", r"\|"
    )


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
