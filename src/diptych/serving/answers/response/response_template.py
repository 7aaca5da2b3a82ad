"""How a model writes its answers: a declarative description of where reasoning, tool calls and content begin and end.

It is Hugging Face's ``response_template`` (version 1, of tokenizer_config.json): an anchor after which the answer
begins in the prompt, and fields with an opening and a closing marker each. The field without an opening is where all
other text goes. Our own descriptions (bundled_templates.py) have more keys: the contents "python-calls" and "tags" (see
TagForm), ``anywhere``, ``exact`` and ``needs_arguments`` of a field (see ResponseField), and ``calls``, how a grammar
lets the model write them (see CallForm).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from diptych.control.errors import ConfigError
from diptych.serving.answers.response.content_formats import CONTENT_FORMATS
from diptych.serving.answers.response.pattern import Pattern
from diptych.serving.answers.response.tagged_calls import TagForm, TagPatterns

Source = tuple[str, ...]  # a capture's name, or "content" (with transform_each: a key), and keys within it


class FieldKind(StrEnum):
    """What the text of a field is for the client."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALLS = "calls"
    DROPPED = "dropped"


_KINDS = {
    "content": FieldKind.CONTENT,
    "other_content": FieldKind.CONTENT,
    "reasoning_content": FieldKind.REASONING,
    "reasoning": FieldKind.REASONING,
    "thinking": FieldKind.REASONING,
    "tool_calls": FieldKind.CALLS,
}
_FIELD_KEYS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each", "anywhere", "exact", "needs_arguments",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TagSpelling:
    """How a grammar writes an argument in tags: begin, its name, middle, the value, end; gap: behind each of them.
    middle and end may have a line break that does not belong to the value."""

    begin: str = "<parameter="
    middle: str = ">\n"
    end: str = "\n</parameter>"
    gap: str = "\n"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a tool call is written, for grammars. begin, between, end: around the name and the arguments. first,
    separator, last: around all calls (separator None: a single call in an answer). quotes_name: the name is written as
    JSON. arguments: "json", "tags", "python" or "marked", see call_arguments.py. is_whole: an answer is either calls or
    text. twin: another way in which a call may begin, which a grammar leaves out. tags: of arguments in tags.
    string_mark: on both sides of a string, of marked arguments. before, final: where an answer is messages: the
    beginnings and ends of those that may come before the last, and the beginning of a last one that is no call."""

    begin: str
    between: str
    end: str
    first: str = ""
    separator: str | None = ""
    last: str = ""
    quotes_name: bool = True
    arguments: str = "json"
    is_whole: bool = False
    twin: str = ""
    tags: TagSpelling = TagSpelling()
    string_mark: str = ""
    before: tuple[tuple[str, str], ...] = ()
    final: str = ""


@dataclass(frozen=True, slots=True)
class ResponseField:
    """A part of answers. open: None for the one that all other text belongs to. name_source, arguments_source: where
    a call has its name and its arguments; ``each``: the content is a list of calls. anywhere: reasoning of this kind
    may follow content. exact: a call counts only when it begins a line, has its arguments and is closed.
    needs_arguments: an object without arguments is no call. tags: of a content of tags."""

    name: str
    kind: FieldKind
    open: Pattern | None
    close: Pattern | None
    content: str
    content_args: Mapping[str, Any]
    join: str
    name_source: Source = ()
    arguments_source: Source = ()
    each: bool = False
    anywhere: bool = False
    exact: bool = False
    needs_arguments: bool = False
    tags: TagPatterns | None = None


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """A description that is ready to be used. texts: all literal texts and patterns, to find special tokens in.
    thinks: the literal marks of reasoning, where a grammar can use them. id_length: of tool call ids (0: any)."""

    name: str
    anchor: Pattern
    fields: tuple[ResponseField, ...]
    texts: tuple[str, ...]
    calls: CallForm | None = None
    thinks: tuple[str, str] | None = None
    id_length: int = 0

    @property
    def implicit(self) -> ResponseField | None:
        """Where text without a marker goes."""
        return next((field for field in self.fields if field.open is None), None)

    @property
    def has_more_than_content(self) -> bool:
        """Whether answers have parts other than calls and text without marks."""
        return any(field.open is not None and field.kind is not FieldKind.CALLS for field in self.fields)

    def has(self, kind: FieldKind) -> bool:
        """Whether answers have such a field."""
        return any(field.kind is kind for field in self.fields)


def load_response_template(name: str, spec: Any) -> ResponseTemplate:
    """Read a description. Raises ConfigError that names the place and what is wrong there."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("fields"), Mapping) or not spec["fields"]:
        raise ConfigError(f"response template {name}: it has no fields", param="response_template")
    if spec.get("version", 1) != 1:
        raise ConfigError(f"response template {name}: version is {spec['version']!r}; supported: 1")
    unknown = set(spec) - {
        "version",
        "defaults",
        "fields",
        "start_anchor",
        "start_anchor_pattern",
        "calls",
        "id_length",
    }
    if unknown:
        raise ConfigError(f"response template {name}: unknown keys {sorted(unknown)}", param="response_template")
    texts: list[str] = []
    anchor = _marker(name, spec, "start_anchor", "start_anchor_pattern", texts)
    if anchor is None:
        raise ConfigError(f"response template {name}: it has neither start_anchor nor start_anchor_pattern")
    fields = tuple(_field(f"{name}.{key}", key, given, texts) for key, given in spec["fields"].items())
    if sum(field.open is None for field in fields) > 1:
        raise ConfigError(f"response template {name}: more than one field has no opening")
    thinks = next((marks for key, given in spec["fields"].items() if (marks := _thinks(key, given))), None)
    calls = _call_form(spec["calls"]) if "calls" in spec else None
    return ResponseTemplate(name, anchor, fields, tuple(texts), calls, thinks, spec.get("id_length", 0))


def _call_form(given: Mapping[str, Any]) -> CallForm:
    return CallForm(**{**given, "tags": TagSpelling(**given.get("tags", {}))})


def _marker(where: str, given: Mapping[str, Any], key: str, pattern_key: str, texts: list[str]) -> Pattern | None:
    try:
        if pattern_key in given and key in given:
            raise ConfigError(f"it has both {key} and {pattern_key}")
        if pattern_key in given:
            texts.append(str(given[pattern_key]).replace("\\", ""))
            return Pattern(str(given[pattern_key]))
        if key not in given:
            return None
        literals = [given[key]] if isinstance(given[key], str) else given[key]
        if (
            not isinstance(literals, list)
            or not literals
            or not all(isinstance(text, str) and text for text in literals)
        ):
            raise ConfigError(f"{key} is no text and no list of texts")
        texts += literals
        return Pattern(literals=literals)
    except ConfigError as error:
        raise ConfigError(f"response template {where}: {error.message}", param="response_template") from None


def _field(where: str, name: str, given: Any, texts: list[str]) -> ResponseField:
    if not isinstance(given, Mapping) or set(given) - _FIELD_KEYS:
        wrong = sorted(set(given) - _FIELD_KEYS) if isinstance(given, Mapping) else given
        raise ConfigError(f"response template {where}: unknown keys {wrong}", param="response_template")
    content, arguments = given.get("content", "text"), given.get("content_args", {})
    tags = TagPatterns(TagForm(**arguments)) if content == "tags" else None
    if (tags is None and content not in CONTENT_FORMATS) or not isinstance(arguments, Mapping):
        known = ", ".join(sorted(CONTENT_FORMATS))
        raise ConfigError(f"response template {where}: content is {content!r}; known: {known}")
    kind = _KINDS.get(name, FieldKind.DROPPED)
    each = bool(given.get("transform_each", False))
    name_source, arguments_source = (
        _call_sources(where, given.get("transform"), each, content) if kind is FieldKind.CALLS else ((), ())
    )
    if content == "xml-inline":
        arguments = {**arguments, "tag_pattern": _tag_pattern(where, arguments)}
    texts += tags.form.texts if tags is not None else _delimiters(arguments)
    return ResponseField(
        name,
        kind,
        _marker(where, given, "open", "open_pattern", texts),
        _marker(where, given, "close", "close_pattern", texts),
        content,
        arguments,
        given.get("join") or "",
        name_source,
        arguments_source,
        each,
        bool(given.get("anywhere", False)),
        bool(given.get("exact", False)),
        bool(given.get("needs_arguments", False)),
        tags,
    )


def _delimiters(arguments: Mapping[str, Any]) -> list[str]:
    """The marks of strings: they may be special tokens."""
    return [str(mark) for pair in arguments.get("string_delims", ()) for mark in pair]


def _tag_pattern(where: str, arguments: Mapping[str, Any]) -> Pattern:
    try:
        pattern = Pattern(str(arguments.get("tag_pattern")))
    except ConfigError as error:
        raise ConfigError(f"response template {where}.content_args.tag_pattern: {error.message}") from None
    if not {"key", "value"} <= pattern.group_names:
        raise ConfigError(f"response template {where}: tag_pattern has no groups key and value")
    return pattern


def _call_sources(where: str, transform: Any, each: bool, content: str) -> tuple[Source, Source]:
    """Where ``function.name`` and ``function.arguments`` come from, by following the transform."""
    if transform is None:  # the content is the function itself
        transform = {"function": {"name": "{name}", "arguments": "{arguments}"} if each else "{content}"}
    return _follow(where, transform, ("function", "name")), _follow(where, transform, ("function", "arguments"))


def _follow(where: str, transform: Any, path: tuple[str, ...]) -> Source:
    node = transform
    for depth, key in enumerate(path):
        if isinstance(node, str) and node.startswith("{") and node.endswith("}"):
            return (*node[1:-1].split("."), *path[depth:])
        if not isinstance(node, Mapping) or key not in node:
            raise ConfigError(f"response template {where}: its transform gives no {'.'.join(path)}")
        node = node[key]
    if not isinstance(node, str) or not (node.startswith("{") and node.endswith("}")):
        raise ConfigError(f"response template {where}: {'.'.join(path)} is {node!r}; a placeholder is supported")
    return tuple(node[1:-1].split("."))


def _thinks(name: str, given: Mapping[str, Any]) -> tuple[str, str] | None:
    is_reasoning = _KINDS.get(name) is FieldKind.REASONING
    if is_reasoning and isinstance(given.get("open"), str) and isinstance(given.get("close"), str):
        return given["open"], given["close"]
    return None
