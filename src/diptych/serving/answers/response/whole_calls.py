"""Calls that are read when their end is there: those of a model's own description in other formats than JSON, and lists
of Python calls."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from diptych.serving.answers.response.call_readers import AnswerPart, Reading, Tools, call_parts
from diptych.serving.answers.response.content_formats import CONTENT_FORMATS
from diptych.serving.answers.response.pattern import Pattern, Search, find_all
from diptych.serving.answers.response.value_types import property_of, with_type

MAX_ENDS = 8  # closing marks at which a text is tried
_PLAIN = re.compile(r"""[^\[\](){}"']*""")
_STOPS = {mark: re.compile(rf"\\|{mark}") for mark in ("'", '"', "'''", '"""')}
_OPEN, _CLOSE = "([{", ")]}"

ReadElement = Callable[[Any], tuple[str, Any]]


class WholeCalls:
    """The calls in the text up to a closing mark. content, arguments: the format (see content_formats.py). A text that
    cannot be read whole goes on to the next closing mark. read: the name and the arguments of an element."""

    def __init__(
        self,
        content: str,
        content_args: Mapping[str, Any],
        read: ReadElement,
        tools: Tools,
        close: Pattern | None,
        *,
        is_list: bool,
    ) -> None:
        self.reading = Reading.OPEN
        self.rest = ""
        self._content, self._content_args, self._read, self._tools = content, content_args, read, tools
        self._is_list = is_list
        self._close = close
        self._pieces: list[str] = []  # of the text so far
        self._num_ends = 0
        self._search = Search([close] if close is not None else [], 1)

    @property
    def is_complete(self) -> bool:
        return self.reading is Reading.OVER

    @property
    def is_broken(self) -> bool:
        return False

    def push(self, text: str) -> list[AnswerPart]:
        self._pieces.append(text)
        while (match := self._search.push(text)) is not None:
            whole = self._whole()
            if calls := self._calls(whole[: match.start - 1]):
                return self._over(calls, match.start - 1)
            self._num_ends += 1
            if self._num_ends == MAX_ENDS:
                self.reading, self.rest = Reading.REFUSED, whole
                break
            self._search = Search([self._close] if self._close is not None else [], match.end)
            text = whole[match.end - 1 :]
        return []

    def end(self, *, is_cut: bool) -> list[AnswerPart]:
        match, whole = self._search.finish(), self._whole()
        size = match.start - 1 if match else len(whole)
        if (match or not is_cut) and (calls := self._calls(whole[:size])):
            return self._over(calls, size)
        self.reading, self.rest = Reading.REFUSED, whole
        return []

    def _whole(self) -> str:
        """The text so far. Only where it may be over: it is not copied for each piece."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def _over(self, calls: list[tuple[str, str]], size: int) -> list[AnswerPart]:
        self.reading, self.rest = Reading.OVER, self._whole()[size:]
        return [part for call in calls for part in call_parts(*call)]

    def _calls(self, text: str) -> list[tuple[str, str]]:
        """The calls of a whole text; none where something in it was not read."""
        try:
            if self._content == "xml-inline" and _unread(self._content_args["tag_pattern"], text):
                return []
            value = CONTENT_FORMATS[self._content](text, self._content_args)
            elements = value if self._is_list and isinstance(value, list) else [value]
            return [self._call(element) for element in elements]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            return []

    def _call(self, element: Any) -> tuple[str, str]:
        name, arguments = self._read(element)
        if name not in self._tools:
            raise ValueError("no tool of the request")
        if self._content in ("xml-inline", "kv-lines") and isinstance(arguments, dict):
            schema = self._tools[name]
            arguments = {key: with_type(value, property_of(schema, key), schema) for key, value in arguments.items()}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise ValueError("arguments that are no object")
        return name, json.dumps(arguments, ensure_ascii=False)


def _unread(pattern: Pattern, text: str) -> str:
    """What stands between the tags, but for space."""
    between, at = [], 0
    for match in find_all(pattern, text):
        between.append(text[at : match.start])
        at = match.end
    return "".join([*between, text[at:]]).strip()


class PythonCalls:
    """``[name(key=value), ...]``: over where its bracket closes, wherever brackets stand in its strings. Line breaks in
    strings are taken, though Python does not take them."""

    def __init__(self, tools: Tools) -> None:
        self.reading = Reading.OPEN
        self.rest = ""
        self._tools = tools
        self._text = ""  # not looked at yet
        self._raw: list[str] = []  # what was looked at
        self._python: list[str] = []  # the same, as Python takes it
        self._brackets: list[str] = []
        self._has_begun = False
        self._string = ""

    @property
    def is_complete(self) -> bool:
        return self.reading is Reading.OVER

    @property
    def is_broken(self) -> bool:
        return False

    def push(self, text: str) -> list[AnswerPart]:
        self._text += text
        while self._text:
            is_certain = self._in_string() if self._string else self._outside()
            if not is_certain:
                break
            if self._has_begun and not self._brackets:
                return self._finish()
        return []

    def end(self, *, is_cut: bool) -> list[AnswerPart]:
        self.reading, self.rest = Reading.REFUSED, "".join([*self._raw, self._text])
        return []

    def _advance(self, size: int, *, is_line: bool = False) -> None:
        """Move past ``size`` characters. is_line: they are in a string that Python wants on one line."""
        text, self._text = self._text[:size], self._text[size:]
        self._raw.append(text)
        self._python.append(text.replace("\n", "\\n") if is_line else text)

    def _outside(self) -> bool:
        self._advance(_PLAIN.match(self._text).end())  # type: ignore[union-attr]
        if not self._text:
            return False
        character = self._text[0]
        if character in _OPEN:
            self._brackets.append(_CLOSE[_OPEN.index(character)])
            self._has_begun = True
        elif character in _CLOSE:
            if not self._brackets or self._brackets.pop() != character:
                self._has_begun, self._brackets = True, []
        else:
            if len(self._text) < 3 and self._text == character * len(self._text):
                return False  # three of them, perhaps
            self._string = character * (3 if self._text.startswith(character * 3) else 1)
            self._advance(len(self._string))
            return True
        self._advance(1)
        return True

    def _in_string(self) -> bool:
        mark = self._string
        is_line = len(mark) == 1
        stop = _STOPS[mark].search(self._text)
        if stop is None:
            sure = len(self._text) - len(mark) + 1
            self._advance(max(0, sure), is_line=is_line)
            return False
        self._advance(stop.start(), is_line=is_line)
        if stop.group() == mark:
            self._string = ""
            self._advance(len(mark))
        elif len(self._text) < 2:
            return False
        else:
            self._advance(2)
        return True

    def _finish(self) -> list[AnswerPart]:
        try:
            calls = CONTENT_FORMATS["python-calls"]("".join(self._python), {})
        except (ValueError, RecursionError):
            calls = []
        if not calls or any(call["name"] not in self._tools for call in calls):
            return self.end(is_cut=False)
        self.reading, self.rest = Reading.OVER, self._text
        written = [(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls]
        return [part for call in written for part in call_parts(*call)]
