"""What reads tool calls in an answer: the protocol, and the readers of calls whose arguments are JSON.

A reader gets the text behind the opening mark of a field. It says early whether that is a call of a tool of the
request: the name comes out as soon as the arguments have begun, then the arguments as they are written. Text that is no
such call is refused, and is content. Formats that are not JSON: tagged_calls.py and whole_calls.py.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

from diptych.serving.answers.response.held_text import HeldText
from diptych.serving.answers.response.json_text import JsonText
from diptych.serving.answers.response.pattern import Pattern, Search

Tools = Mapping[str, Mapping[str, Any]]  # name to the schema of its arguments
_SPACE = re.compile(r"\s*")
_GAP = re.compile(r"[\s;,]*")
_WRAPPERS = ("function",)  # members that may hold the name and the arguments
_KNOWN = ("id", "type", "index", "call_id", "tool_call_id")  # members that say nothing to the client


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


class Reading(StrEnum):
    """How far a reader is."""

    OPEN = "open"  # not known yet whether this is a call
    CALLING = "calling"  # it is one
    OVER = "over"  # behind the calls; ``rest`` does not belong to them
    EMPTY = "empty"  # a call only if the closing mark follows right here; ``rest`` as above
    REFUSED = "refused"  # no call


class CallReader(Protocol):
    """Reads one field of calls. rest: text that was pushed and does not belong to it, once it is over."""

    reading: Reading
    rest: str

    def push(self, text: str) -> list[AnswerPart]:
        """More of the field's text, until the reading is over or refused."""
        ...

    def end(self, *, is_cut: bool) -> list[AnswerPart]:
        """The answer ends here. is_cut: because of a limit of tokens: what is open stays open then. Afterwards the
        reading is over or refused; ``is_complete`` says whether nothing was missing."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether all calls so far have their arguments."""
        ...

    @property
    def is_broken(self) -> bool:
        """Whether the arguments are certainly not what they should be."""
        ...


def call_parts(name: str, arguments: str) -> list[AnswerPart]:
    """A call with these first arguments."""
    begun = [AnswerPart(PartKind.CALL, name)]
    return [*begun, AnswerPart(PartKind.ARGUMENTS, arguments)] if arguments else begun


def joined_parts(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """The parts, with neighbours of a kind as one."""
    joined: list[AnswerPart] = []
    for kind, group in groupby(parts, key=attrgetter("kind")):
        texts = [part.text for part in group]
        joined += [AnswerPart(kind, text) for text in (texts if kind is PartKind.CALL else ["".join(texts)])]
    return joined


class _Arguments:
    """The JSON of a call's arguments. Where it is no JSON, it ends at the closing mark of the field, or not at all."""

    def __init__(self, close: Pattern | None, marks: Sequence[tuple[str, str]]) -> None:
        self._json = JsonText(marks)
        self._close = close
        self._search: Search | None = None
        self._held, self._base = HeldText(), 1  # behind the place where it broke; where in the search that begins
        self.is_over = False

    @property
    def is_complete(self) -> bool:
        return self._json.is_over

    @property
    def is_broken(self) -> bool:
        return self._json.is_broken

    def push(self, text: str) -> tuple[str, str]:
        """What the text adds, and what stands behind the arguments."""
        written = ""
        if self._search is None:
            written, text = self._json.push(text)
            if self._json.is_over:
                self.is_over = True
                return written, text
            if not self._json.is_broken:
                return written, ""
            self._search = Search([self._close] if self._close is not None else [], self._base)
        match = self._search.push(text)
        self._held.append(text)
        if match is not None:
            self.is_over = True
            return written + self._held.take(match.start - self._base), self._held.take()
        size, self._base = self._search.hold - self._base, self._search.hold
        return written + self._held.take(size), ""

    def end(self) -> str:
        """The answer ends within them: what was held back."""
        return self._json.end() + self._held.take()


class NamedCall:
    """A call whose name was in the opening; the text is the JSON of its arguments."""

    def __init__(self, name: str, close: Pattern | None, marks: Sequence[tuple[str, str]] = ()) -> None:
        self.reading = Reading.OPEN
        self.rest = ""
        self._name = name
        self._arguments = _Arguments(close, marks)

    @property
    def is_complete(self) -> bool:
        return self._arguments.is_complete

    @property
    def is_broken(self) -> bool:
        return self._arguments.is_broken

    def push(self, text: str) -> list[AnswerPart]:
        if self.reading is Reading.CALLING:
            return self._push(text)
        kept = text.lstrip()
        if not kept:
            return []
        if kept[0] != "{":
            self.reading, self.rest = Reading.EMPTY, kept
            return []
        self.reading = Reading.CALLING
        return [AnswerPart(PartKind.CALL, self._name), *self._push(kept)]

    def _push(self, text: str) -> list[AnswerPart]:
        written, self.rest = self._arguments.push(text)
        if self._arguments.is_over:
            self.reading = Reading.OVER
        return [AnswerPart(PartKind.ARGUMENTS, written)] if written else []

    def without_arguments(self) -> list[AnswerPart]:
        """The call, of which the opening is followed by the closing mark."""
        return call_parts(self._name, "{}")

    def end(self, *, is_cut: bool) -> list[AnswerPart]:
        if self.reading is Reading.OPEN:
            self.reading = Reading.REFUSED
            return []
        self.reading = Reading.OVER
        written = self._arguments.end()
        return [AnswerPart(PartKind.ARGUMENTS, written)] if written else []


class JsonCalls:
    """Objects with a name and arguments: a single one, a list of them, or some in a row. Members are looked for by the
    usual names besides those of the format; the text of others is content. names: of the tools. needs_arguments: an
    object without any is no call."""

    def __init__(
        self,
        keys: tuple[str, str],
        names: Collection[str],
        close: Pattern | None,
        marks: Sequence[tuple[str, str]] = (),
        *,
        needs_arguments: bool = False,
    ) -> None:
        self.reading = Reading.OPEN
        self.rest = ""
        self._name_keys = {keys[0], "name"}
        self._arguments_keys = {keys[1], "arguments", "parameters"}
        self._names, self._close, self._marks = names, close, marks
        self._needs_arguments = needs_arguments
        self._waiting: list[str] = []  # what is not certain yet, before the present piece
        self._piece, self._begin, self._at = "", 0, 0  # what is not certain of it, and how far it was read
        self._next = self._between
        self._is_list = False
        self._begin_object()

    def _begin_object(self) -> None:
        self._levels = 0
        self._key: str | None = None
        self._name: str | None = None
        self._given: str | None = None  # arguments that came before the name
        self._is_called = False
        self._others: list[AnswerPart] = []  # members that a call does not have: they are content
        self._value: JsonText | None = None
        self._pieces: list[str] = []  # of that value
        self._written = ""
        self._arguments = _Arguments(self._close, self._marks)

    @property
    def is_complete(self) -> bool:
        return self._next == self._between or (self._is_called and self._arguments.is_complete)

    @property
    def is_broken(self) -> bool:
        return self._arguments.is_broken

    def push(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        self._piece, self._begin, self._at = text, 0, 0
        while self._at < len(self._piece) and self.reading in (Reading.OPEN, Reading.CALLING):
            if self._next != self._in_value and self._next != self._in_arguments:
                self._at = _SPACE.match(self._piece, self._at).end()  # type: ignore[union-attr]
                if self._at == len(self._piece):
                    break
            parts += self._next(self._piece[self._at])
        if self.reading in (Reading.OPEN, Reading.CALLING):
            self._waiting.append(self._piece[self._begin :])
        self._piece = ""
        return parts

    def end(self, *, is_cut: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._next == self._in_arguments:
            written = self._arguments.end()
            parts = [AnswerPart(PartKind.ARGUMENTS, written)] if written else []
            self._sure()
        self._refuse()
        return parts

    def _sure(self) -> None:
        """The text so far belongs to calls."""
        self._waiting.clear()
        self._begin = self._at

    def _refuse(self) -> list[AnswerPart]:
        """What follows the text that is certain is no call."""
        self.rest = "".join([*self._waiting, self._piece[self._begin :]])
        self.reading = Reading.OVER if self.reading is Reading.CALLING else Reading.REFUSED
        return []

    def _between(self, character: str) -> list[AnswerPart]:
        """Take a character before an object."""
        is_first = self.reading is Reading.OPEN
        if character == "[" and is_first and not self._is_list:
            self._is_list = True
            self._at += 1
        elif character == "{":
            self._begin_object()
            self._levels = 1
            self._at += 1
            self._next = self._member
        elif character == "]" and self._is_list and not is_first:
            self._at += 1
            self._sure()
            return self._refuse()
        elif character in ",;" and not is_first:
            self._at = _GAP.match(self._piece, self._at).end()  # type: ignore[union-attr]
        else:
            return self._refuse()
        return []

    def _member(self, character: str) -> list[AnswerPart]:
        """The key of a member, or the end of an object without any."""
        if character == "}":
            return self._end_object()
        if character in "{[":
            return self._refuse()
        self._value, self._key = JsonText(self._marks), None
        self._next = self._in_value
        return []

    def _in_value(self, character: str) -> list[AnswerPart]:
        """A key, or a value that is read whole."""
        assert self._value is not None
        written, rest = self._value.push(self._piece[self._at :])
        self._pieces.append(written)
        self._at = len(self._piece) - len(rest)
        if self._value.is_broken:
            return self._refuse()
        if not self._value.is_over:
            return []
        self._written = "".join(self._pieces)
        self._pieces.clear()
        if self._key is None:
            self._key = str(_decoded(self._written))
            self._next = self._colon
            return []
        self._next = self._behind_value
        return self._take(_decoded(self._written))

    def _colon(self, character: str) -> list[AnswerPart]:
        if character != ":":
            return self._refuse()
        self._at += 1
        self._next = self._begin_value
        return []

    def _begin_value(self, character: str) -> list[AnswerPart]:
        if character == "{" and self._key in _WRAPPERS and not self._is_called:
            self._levels += 1
            self._at += 1
            self._next = self._member
            return []
        if character == "{" and self._key in self._arguments_keys and self._name is not None and not self._is_called:
            self._next = self._in_arguments
            return self._call("")
        self._value = JsonText(self._marks)
        self._next = self._in_value
        return []

    def _in_arguments(self, character: str) -> list[AnswerPart]:
        written, self._piece = self._arguments.push(self._piece[self._at :])
        self._at = 0
        self._sure()
        if self._arguments.is_over:
            self._next = self._behind_value
        return [AnswerPart(PartKind.ARGUMENTS, written)] if written else []

    def _behind_value(self, character: str) -> list[AnswerPart]:
        if character == ",":
            self._at += 1
            self._next = self._member
            return []
        return self._end_object() if character == "}" else self._refuse()

    def _take(self, value: Any) -> list[AnswerPart]:
        """The value of the present member."""
        is_name = self._key in self._name_keys or self._key in _WRAPPERS
        if is_name and self._name is None and isinstance(value, str):
            if value not in self._names:
                return self._refuse()
            self._name = value
            return self._call(self._given) if self._given is not None else []
        if self._key in self._arguments_keys and not self._is_called and self._given is None:
            arguments = _as_object(self._written, value)
            if arguments is None:
                return self._refuse()
            self._given = arguments
            return self._call(arguments) if self._name is not None else []
        if self._key in _KNOWN:
            return []
        other = AnswerPart(PartKind.CONTENT, f"{json.dumps(self._key, ensure_ascii=False)}: {self._written}\n")
        if self._is_called:
            self._sure()
            return [other]
        self._others.append(other)
        return []

    def _end_object(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        self._levels -= 1
        if not self._levels and not self._is_called:
            if self._name is None or self._needs_arguments or self._others:
                return self._refuse()
            parts = self._call("{}")
        self._at += 1
        if self._is_called:
            self._sure()
        self._next = self._between if not self._levels else self._behind_value
        return parts

    def _call(self, arguments: str) -> list[AnswerPart]:
        assert self._name is not None
        self.reading = Reading.CALLING
        self._is_called = True
        if arguments:  # the whole of them
            self._arguments.push(arguments)
        self._sure()
        return [*self._others, *call_parts(self._name, arguments)]


def _as_object(written: str, value: Any) -> str | None:
    """Arguments that were read whole, as the JSON of an object; None where they are none."""
    if value is None or value == []:
        return "{}"
    if isinstance(value, str):
        inner = JsonText()
        written, rest = inner.push(value.strip())
        if not inner.is_over or rest:
            return None
        value = _decoded(written)
    return written if isinstance(value, dict) else None


def _decoded(written: str) -> Any:
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written
