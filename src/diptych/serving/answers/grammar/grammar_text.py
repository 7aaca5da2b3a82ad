"""Grammars as text: a JSON schema, a regular expression, choices or tool calls in the Lark dialect of llguidance.

Objects are written on a single line, as ``json.dumps`` writes them: where no white space can be chosen, more tokens are
certain without the model.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from typing import Any

from diptych.control.errors import InvalidRequestError
from diptych.serving.answers.grammar.call_arguments import (
    CallArguments,
    MarkedArguments,
    PythonArguments,
    TaggedArguments,
    quoted,
)
from diptych.serving.answers.grammar.schema_parts import Schema, refuse
from diptych.serving.answers.response.response_template import CallForm

MAX_GRAMMAR_BYTES = 1 << 17  # to write a longer one would hold up the other streams of the front end
MAX_DEPTH = 100  # of a schema
MAX_PARTS = 10_000  # of a schema: values, at any depth
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ARGUMENTS: dict[str, type[CallArguments]] = {
    "tags": TaggedArguments, "python": PythonArguments, "marked": MarkedArguments,
}  # fmt: skip
_ANY_TEXT = r"/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar. rule: what the answer is; rules: those that it names. schemas: in it, with the fields of the request
    that they came from. start: of the text, in which ``answer`` is a name. foreign: the client's own text instead, in
    Lark or GBNF."""

    rule: str
    rules: str = ""
    schemas: tuple[tuple[str, Schema], ...] = ()
    param: str = "response_format"
    start: str = "start: answer\n"
    foreign: str = ""

    @property
    def text(self) -> str:
        """In Lark, or as the client wrote it. Raises InvalidRequestError for one that is too long."""
        text = self.foreign or f"{self.start}answer: {self.rule}\n{self.rules}"
        if len(text) > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"{self.param} makes a grammar of {len(text)} bytes; the limit is {MAX_GRAMMAR_BYTES}", param=self.param
            )
        return text

    def otherwise(self, other: "Grammar") -> "Grammar":
        """Answers of this grammar or of the other one. The names of their rules differ."""
        rule, rules = f"{self.rule} | {other.rule}", self.rules + other.rules
        return Grammar(rule, rules, self.schemas + other.schemas, self.param, self.start)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around reasoning that may come before the answer. is_open: the prompt has begun it."""

    begin: str
    end: str
    is_open: bool


class GrammarWriter:
    """Writes grammars for one tokenizer. special_tokens: text to id."""

    def __init__(self, special_tokens: Mapping[str, int], thinking: Thinking | None = None) -> None:
        self._special_tokens = special_tokens
        self._thinking = thinking

    def schema(self, schema: Schema, param: str, whitespace: str | None = None) -> Grammar:
        """Values of a JSON schema. whitespace: a regular expression for what may stand between its parts."""
        rules = f"value: {json_rule(schema, param, whitespace)}\n"
        return Grammar("value", rules, ((param, schema),), param, self._start())

    def regex(self, pattern: str, param: str) -> Grammar:
        """Texts that a regular expression matches whole."""
        return Grammar("VALUE", f"VALUE: /{_without_slashes(pattern)}/\n", (), param, self._start())

    def choice(self, choices: Sequence[str], param: str) -> Grammar:
        """One of these texts."""
        return Grammar("value", "value: " + " | ".join(map(quoted, choices)) + "\n", (), param, self._start())

    def calls(
        self,
        form: CallForm,
        schemas: Mapping[str, Schema],
        max_calls: int | None,
        positions: Mapping[str, int] | None = None,
    ) -> Grammar:
        """Calls of these tools, at least one, and nothing else. positions: of the tools in the request, for errors."""
        more = "" if max_calls == 1 or form.separator is None else f" ({self.text(form.separator)} call)*"
        rule = f"{self.text(form.first)} call{more} {self.text(form.last)}"
        rules = "\n".join(self._call_rules(form, schemas, positions)) + "\n"
        return Grammar(rule, rules, _arguments_of(schemas, positions), "tools", self._start())

    def text_with_calls(
        self, form: CallForm, schemas: Mapping[str, Schema], positions: Mapping[str, int] | None = None
    ) -> Grammar:
        """Text, in which calls of these tools follow their schemas."""
        if form.is_whole:
            calls = self.calls(form, schemas, None, positions)
            if form.final:
                others = f" & ~/(?s:.*){form.separator}(?s:.*)/" if form.separator else ""
                return calls.otherwise(Grammar(f"{self.text(form.final)} FREE", f"FREE: {_ANY_TEXT}{others}\n"))
            first = re.escape((form.first or form.begin)[0])
            return calls.otherwise(Grammar("FREE", rf"FREE: /[^\s{first}](?s:.*)/" + "\n"))
        if form.final and any(token in form.final for token in self._special_tokens):
            return self._messages_with_calls(form, schemas, positions)
        opening = form.first or form.begin
        known = [token for token in self._special_tokens if opening.startswith(token)]
        mark = max(known, key=len) if known else form.first or form.begin.split("\n")[0].split("{")[0]
        if not mark:
            raise InvalidRequestError(
                "tools: a strict tool needs tool_choice required in this format: text and calls begin alike",
                param="tools",
                code="unsupported",
            )
        begin = "" if form.first else form.begin[len(mark) :]
        rules = self._call_rules(form if form.first else replace(form, begin=begin), schemas, positions)
        body = "call"
        if form.first:
            rest = self.text(form.first[len(mark) :])
            body = f"{rest} call ({self.text(form.separator or '')} call)* {self.text(form.last)}"
        start = f"TEXT <[{self._special_tokens[mark]}]>" if known else "marked"
        marked = "" if known else f"\nmarked[lazy]: TEXT {quoted(mark)}"
        free_text = f"{_ANY_TEXT} & ~/(?s:.*){form.twin}(?s:.*)/" if form.twin else _ANY_TEXT
        text = f"tag: {start} {body}{marked}\nTEXT: {free_text}\n" + "\n".join(rules) + "\n"
        return Grammar("(tag)* TEXT", text, _arguments_of(schemas, positions), "tools")

    def _messages_with_calls(
        self, form: CallForm, schemas: Mapping[str, Schema], positions: Mapping[str, int] | None
    ) -> Grammar:
        """Messages in their order, of which the last is a call or the final one. Their marks are special tokens."""
        before = " | ".join(f"{self.text(begin)} TEXT {self.text(end)}" for begin, end in form.before)
        rules = [f"before: {before}", f"TEXT: {_ANY_TEXT}", *self._call_rules(form, schemas, positions)]
        rule = f"(before)* (call | {self.text(form.final)} TEXT)"
        return Grammar(rule, "\n".join(rules) + "\n", _arguments_of(schemas, positions), "tools")

    def text(self, text: str) -> str:
        """A fixed text in Lark; special tokens by their ids."""
        if not text:
            return ""
        known = [token for token in self._special_tokens if token in text]
        if not known:
            return quoted(text)
        pieces = re.split("(" + "|".join(map(re.escape, sorted(known, key=len, reverse=True))) + ")", text)
        return " ".join(
            f"<[{self._special_tokens[piece]}]>" if piece in self._special_tokens else quoted(piece)
            for piece in pieces
            if piece
        )

    def _call_rules(
        self, form: CallForm, schemas: Mapping[str, Schema], positions: Mapping[str, int] | None
    ) -> list[str]:
        rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(schemas)))]
        others = _ARGUMENTS.get(form.arguments, PythonArguments)(form, self.text)
        for number, (name, schema) in enumerate(schemas.items()):
            param = _arguments_param(name, number, positions)
            written = json.dumps(name) if form.quotes_name else name
            arguments = {"type": "object", **schema} if isinstance(schema, Mapping) else {"type": "object"}
            rules.append(
                f"call_{number}: {self.text(form.begin)} {self.text(written + form.between)} "
                f"arguments_{number} {self.text(form.end)}"
            )
            if form.arguments == "json":
                rules.append(f"arguments_{number}: {json_rule(arguments, param)}")
                continue
            if form.arguments == "python" and not all(
                part.isidentifier() and not iskeyword(part) for part in name.split(".")
            ):
                refuse(param.replace("parameters", "name"), f"{name!r} is no name in Python")
            check_size(arguments, param)
            others.add(f"arguments_{number}", arguments, param)
        return rules + [f"{name}: {right}" for name, right in others.rules.items()]

    def _start(self) -> str:
        """The beginning of a grammar: reasoning comes first where the model does so."""
        thinking = self._thinking
        if thinking is None:
            return "start: answer\n"
        begin, end = self.text(thinking.begin), self._special_tokens.get(thinking.end)
        if end is not None:
            thought = f"THOUGHT <[{end}]> SPACE\nTHOUGHT: {_ANY_TEXT}\nSPACE: /\\s*/"
        else:
            thought = f"thought SPACE\nthought[lazy]: /(?s:.*)/ {quoted(thinking.end)}\nSPACE: /\\s*/"
        start = f"start: thinking{'' if thinking.is_open else '?'} answer\n"
        return start + f"thinking: {'' if thinking.is_open else begin} {thought}\n"


def json_rule(schema: Schema, param: str, whitespace: str | None = None) -> str:
    """The right side of a rule for values of a schema. Raises InvalidRequestError for one that is too deep."""
    check_size(schema, param)
    options: dict[str, Any] = dict(_SEPARATORS)
    if whitespace is not None:
        options = {"whitespace_pattern": whitespace}
    as_object = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    return "%json " + json.dumps({**as_object, "x-guidance": options}, ensure_ascii=False)


def check_size(schema: Any, param: str) -> None:
    """Raise InvalidRequestError for what has too many parts, or, with its path, for what is nested too deeply."""
    nodes, num_parts, depth = [schema], 1, 0
    while nodes:
        if depth > MAX_DEPTH:
            path = ".".join((param, *_path_down(schema, depth)))
            raise InvalidRequestError(f"{path[:200]}... is nested more than {MAX_DEPTH} deep", param=param)
        inner: list[Any] = []
        for node in nodes:
            if isinstance(node, Mapping):
                inner.extend(node.values())
            elif isinstance(node, list):
                inner.extend(node)
            if num_parts + len(inner) > MAX_PARTS:
                raise InvalidRequestError(f"{param} has more than {MAX_PARTS} parts", param=param)
        num_parts += len(inner)
        nodes, depth = [node for node in inner if isinstance(node, Mapping | list)], depth + 1


def _path_down(schema: Any, depth: int) -> tuple[str, ...]:
    """The keys to some part that is so deep."""
    nodes: list[tuple[Any, tuple[str, ...]]] = [(schema, ())]
    while nodes:
        node, path = nodes.pop()
        if len(path) == depth:
            return path
        pairs = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
        nodes += [(value, (*path, str(key))) for key, value in pairs]
    return ()


def _arguments_of(schemas: Mapping[str, Schema], positions: Mapping[str, int] | None) -> tuple[tuple[str, Schema], ...]:
    pairs = enumerate(schemas.items())
    return tuple((_arguments_param(name, number, positions), schema) for number, (name, schema) in pairs)


def _arguments_param(name: str, number: int, positions: Mapping[str, int] | None) -> str:
    return f"tools.{number if positions is None else positions[name]}.function.parameters"


def _without_slashes(pattern: str) -> str:
    """A pattern that can stand between slashes."""
    return re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found.group(), found.group()), pattern)
