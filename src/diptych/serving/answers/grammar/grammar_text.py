"""Grammars as text: a JSON schema, a regular expression, choices or tool calls in the Lark dialect of llguidance.

Objects are written on a single line, as ``json.dumps`` writes them: where no white space can be chosen, more tokens are
certain without the model.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from typing import Any

from diptych.base.byte_size import utf8_size
from diptych.control.errors import InvalidRequestError
from diptych.serving import edge_limits
from diptych.serving.answers.grammar.call_arguments import (
    CallArguments,
    MarkedArguments,
    PythonArguments,
    TaggedArguments,
    quoted,
)
from diptych.serving.answers.grammar.schema_parts import Schema, refuse, with_nulls
from diptych.serving.answers.grammar.schema_rewriting import Check, SchemaRefusedError, rewrite
from diptych.serving.answers.response.response_template import CallForm

SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
SCHEMA = "%schema "  # in a rule: a schema that is yet to be written as the compiler takes it, on one line of JSON
_ARGUMENTS: dict[str, type[CallArguments]] = {
    "tags": TaggedArguments, "python": PythonArguments, "marked": MarkedArguments,
}  # fmt: skip
RULE_BYTES = 150  # of a tool beside its schema, about
_ANY_TEXT = r"/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar. rule: what the answer is; rules: those that it names. start: of the text, in which ``answer`` is a
    name. foreign: the client's own text instead, in Lark or GBNF. left_out: paths of keywords that are not enforced, as
    far as that is known before it is tried."""

    rule: str
    rules: str = ""
    param: str = "response_format"
    start: str = "start: answer\n"
    foreign: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The grammar in Lark, with schemas as clients wrote them (see SCHEMA), or the client's own. Raises
        InvalidRequestError for one that is too long."""
        written = self._written
        if (num_bytes := utf8_size(written)) > edge_limits.GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"{self.param} makes a grammar of {num_bytes} bytes; the limit is {edge_limits.GRAMMAR_BYTES}",
                param=self.param,
            )
        return written

    @property
    def num_bytes(self) -> int:
        """Bytes of the text."""
        return utf8_size(self._written)

    @property
    def _written(self) -> str:
        return self.foreign or f"{self.start}answer: {self.rule}\n{self.rules}"

    def otherwise(self, other: "Grammar") -> "Grammar":
        """Answers of this grammar or of the other one. The names of their rules differ."""
        rule, rules = f"{self.rule} | {other.rule}", self.rules + other.rules
        return Grammar(rule, rules, self.param, self.start, left_out=self.left_out + other.left_out)


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

    def schema(self, schema: Schema, param: str, whitespace: str | None = None, *, is_strict: bool = True) -> Grammar:
        """Values of a JSON schema. whitespace: a regular expression for what may stand between its parts. is_strict:
        what cannot be enforced is refused, and not left out."""
        rules = f"value: {json_rule(schema, param, whitespace, is_strict=is_strict)}\n"
        return Grammar("value", rules, param, self._start())

    def regex(self, pattern: str, param: str) -> Grammar:
        """Texts that a regular expression matches whole."""
        return Grammar("VALUE", f"VALUE: /{_without_slashes(pattern)}/\n", param, self._start())

    def choice(self, choices: Sequence[str], param: str) -> Grammar:
        """One of these texts. They are one terminal: as alternatives of a rule, each would be an item of the parser's
        row, of which there may be 2,000."""
        return Grammar("VALUE", "VALUE: " + " | ".join(map(quoted, choices)) + "\n", param, self._start())

    def calls(
        self,
        form: CallForm,
        schemas: Mapping[str, Schema],
        max_calls: int | None,
        strict: Collection[str] = (),
        positions: Mapping[str, int] | None = None,
        beside: int = 0,
    ) -> Grammar:
        """Calls of these tools, at least one, and nothing else. strict: tools of whose schemas nothing is left out.
        positions: of the tools in the request, for errors. Where the schemas are too long together, the longest of
        those that are not strict are left out whole, about as few as can be: their names are enforced, and that their
        arguments are an object. beside: bytes of another grammar that an answer may follow. Raises InvalidRequestError
        where the strict ones alone are too long."""
        more = "" if max_calls == 1 or form.separator is None else f" ({self.text(form.separator)} call)*"
        rule = f"{self.text(form.first)} call{more} {self.text(form.last)}"
        weights = {name: len(json.dumps(schema)) + RULE_BYTES for name, schema in schemas.items()}
        last_first = [name for name in reversed(weights) if name not in strict]
        longest = sorted(last_first, key=lambda name: weights[name], reverse=True)
        per_weight, num_open = 0.0, 0
        while True:
            rules, left_out = self._call_rules(form, schemas, strict, positions, frozenset(longest[:num_open]))
            found = Grammar(rule, "\n".join(rules) + "\n", "tools", self._start(), left_out=left_out)
            excess = found.num_bytes + beside - edge_limits.GRAMMAR_BYTES
            if excess <= 0:
                return found
            if num_open == len(longest):
                raise _too_many_tools(len(schemas), len(schemas) - len(longest), found.num_bytes)
            per_weight = per_weight or found.num_bytes / sum(weights.values())  # of the rules that a schema becomes
            freed, least = 0.0, num_open + 1 + num_open // 256  # so that few rounds are enough
            while num_open < len(longest) and (freed < excess or num_open < least):
                freed += weights[longest[num_open]] * per_weight
                num_open += 1

    def text_with_calls(
        self, form: CallForm, schemas: Mapping[str, Schema], positions: Mapping[str, int] | None = None
    ) -> Grammar:
        """Text, in which calls of these tools follow their schemas, of which nothing is left out."""
        if form.is_whole:
            calls = self.calls(form, schemas, None, schemas, positions)
            if form.final:
                others = f" & ~/(?s:.*){form.separator}(?s:.*)/" if form.separator else ""
                free = Grammar(f"{self.text(form.final)} FREE", f"FREE: {_ANY_TEXT}{others}\n", "tools")
                return calls.otherwise(free)
            first = re.escape((form.first or form.begin)[0])
            return calls.otherwise(Grammar("FREE", rf"FREE: /[^\s{first}](?s:.*)/" + "\n", "tools"))
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
        marked_form = form if form.first else replace(form, begin=begin)
        rules, _ = self._call_rules(marked_form, schemas, schemas, positions)
        body = "call"
        if form.first:
            rest = self.text(form.first[len(mark) :])
            body = f"{rest} call ({self.text(form.separator or '')} call)* {self.text(form.last)}"
        start = f"TEXT <[{self._special_tokens[mark]}]>" if known else "marked"
        marked = "" if known else f"\nmarked[lazy]: TEXT {quoted(mark)}"
        free_text = f"{_ANY_TEXT} & ~/(?s:.*){form.twin}(?s:.*)/" if form.twin else _ANY_TEXT
        text = f"tag: {start} {body}{marked}\nTEXT: {free_text}\n" + "\n".join(rules) + "\n"
        return Grammar("(tag)* TEXT", text, "tools")

    def _messages_with_calls(
        self, form: CallForm, schemas: Mapping[str, Schema], positions: Mapping[str, int] | None
    ) -> Grammar:
        """Messages in their order, of which the last is a call or the final one. Their marks are special tokens."""
        before = " | ".join(f"{self.text(begin)} TEXT {self.text(end)}" for begin, end in form.before)
        call_rules, _ = self._call_rules(form, schemas, schemas, positions)
        rules = [f"before: {before}", f"TEXT: {_ANY_TEXT}", *call_rules]
        rule = f"(before)* (call | {self.text(form.final)} TEXT)"
        return Grammar(rule, "\n".join(rules) + "\n", "tools")

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
        self,
        form: CallForm,
        schemas: Mapping[str, Schema],
        strict: Collection[str],
        positions: Mapping[str, int] | None,
        opened: Collection[str] = (),
    ) -> tuple[list[str], tuple[str, ...]]:
        """The rules, and what of the schemas is left out. opened: tools whose arguments may be any object."""
        rules: list[str] = []
        others = _ARGUMENTS.get(form.arguments, PythonArguments)(form, self.text)
        left_out: list[str] = []
        numbers: list[int] = []  # of the tools with rules of their own
        names: list[str] = []  # of the others
        for number, (name, schema) in enumerate(schemas.items()):
            written = json.dumps(name) if form.quotes_name else name
            where = f"tools.{number if positions is None else positions[name]}.function"
            param = f"{where}.parameters"
            if form.arguments == "python" and not all(
                part.isidentifier() and not iskeyword(part) for part in name.split(".")
            ):
                refuse(f"{where}.name", f"{name!r} is no name in Python")
            arguments = {"type": "object", **schema} if isinstance(schema, Mapping) else {"type": "object"}
            if name in opened or arguments == {"type": "object"}:
                left_out += [param] if name in opened else []
                names.append(self.text(written))
                continue
            numbers.append(number)
            rules.append(
                f"call_{number}: {self.text(form.begin)} {self.text(written + form.between)} "
                f"arguments_{number} {self.text(form.end)}"
            )
            left_out += self._add_arguments(rules, others, form, str(number), arguments, param, name in strict)
        choices = [f"call_{number}" for number in numbers]
        if names:
            choices.append("call_any")
            rules.append(
                f"call_any: {self.text(form.begin)} name_any {self.text(form.between)} arguments_any "
                f"{self.text(form.end)}"
            )
            rules.append("name_any: " + " | ".join(names))
            self._add_arguments(rules, others, form, "any", {"type": "object"}, "tools", False)
        more = [f"{name}: {right}" for name, right in others.rules.items()]
        return ["call: " + " | ".join(choices), *rules, *more], tuple(left_out)

    @staticmethod
    def _add_arguments(
        rules: list[str], others: CallArguments, form: CallForm, name: str, schema: Schema, param: str, is_strict: bool
    ) -> list[str]:
        """Add the rule ``arguments_NAME``. Returns what of the schema is left out."""
        if form.arguments == "json":
            rules.append(f"arguments_{name}: {json_rule(schema, param, is_strict=is_strict)}")
            return []
        return add_arguments(others, f"arguments_{name}", schema, param, form.arguments, is_strict)

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


def _too_many_tools(num_tools: int, num_strict: int, num_bytes: int) -> InvalidRequestError:
    most = edge_limits.GRAMMAR_BYTES
    what = f"{num_tools} tools, {num_strict} of them with strict schemas," if num_strict else f"{num_tools} tools"
    hint = "; schemas that are not strict are left out where they do not fit" if num_strict else ""
    return InvalidRequestError(
        f"tools: {what} make a grammar of {num_bytes} bytes; the limit is {most}{hint}", param="tools"
    )


def json_rule(schema: Schema, param: str, whitespace: str | None = None, *, is_strict: bool = True) -> str:
    """The right side of a rule for values of a schema. Raises InvalidRequestError for one that is too deep."""
    check_size(schema, param)
    options: dict[str, Any] = dict(SEPARATORS)
    if whitespace is not None:
        options = {"whitespace_pattern": whitespace}
    described = {"param": param, "schema": schema, "is_strict": is_strict, "options": options}
    return SCHEMA + json.dumps(described, ensure_ascii=False)


def with_schemas(text: str, check: Check | None = None) -> tuple[str, list[str]]:
    """The text of a grammar with its schemas as the compiler takes them, and the paths of what is left out of them.
    check: see ``rewrite``. Raises InvalidRequestError for a schema that is refused."""
    left_out: list[str] = []
    lines = []
    for line in text.split("\n"):
        head, mark, described = line.partition(SCHEMA)
        if not mark or not re.fullmatch(r"\w+: ", head):
            lines.append(line)
            continue
        given = json.loads(described)
        try:
            written = rewrite(given["schema"], is_strict=given["is_strict"], check=check)
        except SchemaRefusedError as refusal:
            raise refused(refusal, given["param"]) from None
        left_out += [".".join((given["param"], *path)) for path in written.left_out]
        schema = {} if written.schema is True else written.schema
        assert isinstance(schema, dict)
        whole = json.dumps({**schema, "x-guidance": given["options"]}, ensure_ascii=False)
        lines.append(f"{head}%json {whole}")
    return "\n".join(lines), left_out


def add_arguments(rules: CallArguments, name: str, schema: Schema, param: str, form: str, is_strict: bool) -> list[str]:
    """Add the rules of arguments that are not JSON. Returns what of their schema is left out. Raises
    InvalidRequestError."""
    check_size(schema, param)
    try:
        written = rewrite(with_nulls(schema), is_strict=is_strict, form="tags" if form == "tags" else "python")
    except SchemaRefusedError as refusal:
        raise refused(refusal, param) from None
    left_out = [".".join((param, *path)) for path in written.left_out]
    whole = written.schema if isinstance(written.schema, Mapping) else {"type": "object"}
    unions = whole.get("anyOf", ())
    if not unions:
        rules.add(name, whole, param)
        return left_out
    shared = {key: whole[key] for key in ("$defs",) if key in whole}
    for number, choice in enumerate(unions):
        rules.add(f"{name}_x{number}", {**shared, **choice}, param)
    rules.rule(name, " | ".join(f"{name}_x{number}" for number in range(len(unions))))
    return left_out


def refused(refusal: SchemaRefusedError, param: str) -> InvalidRequestError:
    """The error for a schema that is refused."""
    path = ".".join((param, *refusal.path))
    hint = '; with "strict": false it is left out' if refusal.can_be_weakened and takes_strict(param) else ""
    return InvalidRequestError(f"{path}: {refusal.why}{hint}", param=path, code="invalid_grammar")


def takes_strict(param: str) -> bool:
    """Whether there is a field ``strict`` beside a schema."""
    return param.startswith(("response_format", "tools", "text"))


def check_size(schema: Any, param: str) -> None:
    """Raise InvalidRequestError for what has too many parts, or, with its path, for what is nested too deeply."""
    nodes, num_parts, depth = [schema], 1, 0
    while nodes:
        if depth > edge_limits.SCHEMA_DEPTH:
            path = ".".join((param, *_path_down(schema, depth)))
            raise InvalidRequestError(
                f"{path[:200]}... is nested more than {edge_limits.SCHEMA_DEPTH} deep", param=param
            )
        inner: list[Any] = []
        for node in nodes:
            if isinstance(node, Mapping):
                inner.extend(node.values())
            elif isinstance(node, list):
                inner.extend(node)
            if num_parts + len(inner) > edge_limits.SCHEMA_PARTS:
                raise InvalidRequestError(f"{param} has more than {edge_limits.SCHEMA_PARTS} parts", param=param)
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


def _without_slashes(pattern: str) -> str:
    """A pattern that can stand between slashes."""
    return re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found.group(), found.group()), pattern)
