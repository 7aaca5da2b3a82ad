"""Calls whose arguments are tags with a text in each: ``<parameter=key>value</parameter>`` and its relatives.

A value is text of any kind, so a closing tag ends it only where something follows that may follow there: the next
argument, or the end of the call. An argument whose closing tag is missing ends where a line begins with the next one
that the tool knows, or where the call ends. Each argument goes out when it is complete, with the type of its schema.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diptych.serving.answers.response.call_readers import AnswerPart, PartKind, Reading
from diptych.serving.answers.response.json_text import as_json
from diptych.serving.answers.response.pattern import Pattern, Prefix
from diptych.serving.answers.response.value_types import property_of, with_type

MAX_INDENT = 64  # of a line that begins with an argument


@dataclass(frozen=True, slots=True)
class TagForm:
    """How such a format is written. key: the opening of an argument, with the group ``key`` and perhaps ``is_text``
    ("true" or "false": whether the value is no JSON). key_mark: how it begins. value_close, end: close a value and the
    call. wrapper: what may stand around calls; wrapper_close: its end; next: how another call begins. is_trimmed: one
    line break at each edge of a value does not belong to it."""

    key: str
    key_mark: str
    value_close: str
    end: str
    wrapper: str = ""
    wrapper_close: str = ""
    next: str = ""
    is_trimmed: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """All that may have special tokens in it."""
        return (self.key.replace("\\", ""), self.value_close, self.end, self.wrapper, self.wrapper_close)


class TagPatterns:
    """What a reader of a form looks for; made once."""

    def __init__(self, form: TagForm) -> None:
        literal = re.escape
        self.form = form
        self.key = Pattern(form.key)
        self.end = Pattern(literals=[form.end])
        behind = [text for text in (form.wrapper, form.wrapper_close, form.next) if text]
        followed = "|".join(map(literal, behind))
        ends = {
            True: rf"{literal(form.end)}\s*(?:{followed})",  # within a wrapper
            False: rf"{literal(form.end)}[ \t]*(?:\n|{followed})" if followed else rf"{literal(form.end)}[ \t]*\n",
        }
        self.behind_value = {
            wrapped: Pattern(rf"{literal(form.value_close)}\s*(?:{form.key}|{end})") for wrapped, end in ends.items()
        }
        self.ends = {wrapped: Pattern(end) for wrapped, end in ends.items()}
        mark = literal(form.key_mark)
        self.stops = re.compile(rf"{literal(form.value_close)}|{literal(form.end)}|\n[ \t]{{0,{MAX_INDENT}}}{mark}")
        longest = max(len(form.value_close), len(form.end), len(form.key_mark))
        starts = "|".join(f"(?:{_prefixes(text)})" for text in (form.value_close, form.end, form.key_mark))
        self.open_stop = re.compile(rf"\n[ \t]{{0,{MAX_INDENT}}}(?:{_prefixes(form.key_mark)})?\Z|(?:{starts})\Z")
        self.tail = longest + MAX_INDENT + 1


def _prefixes(text: str) -> str:
    """A pattern for each beginning of a text."""
    return "|".join(re.escape(text[:size]) for size in range(len(text), 0, -1))


class TaggedCall:
    """Reads one call, whose name was in its opening."""

    def __init__(self, name: str, patterns: TagPatterns, schema: Mapping[str, Any], *, is_wrapped: bool) -> None:
        self.reading = Reading.OPEN
        self.rest = ""
        self.is_complete = False
        self.is_broken = False
        self._name, self._patterns, self._schema = name, patterns, schema
        self._is_wrapped = is_wrapped and bool(patterns.form.wrapper)
        self._text = ""  # what is not certain yet
        self._value: list[str] | None = None  # of the present argument, so far
        self._key, self._is_text = "", True
        self._keys: set[str] = set()
        self._looking: Prefix | None = None  # at the beginning of ``_text``
        self._behind: list[str] = []  # text behind that, at which it has looked
        self._is_last = False  # the answer is over

    def push(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._looking is not None:  # it decides about all that waits
            self._behind.append(text)
            if not self._looking.push(text) and not self._is_last:
                return parts
            text = "".join(self._behind)
            self._behind.clear()
        self._text += text
        while self._text and self.reading in (Reading.OPEN, Reading.CALLING):
            step = self._between(parts) if self._value is None else self._in_value(parts)
            if not step:
                break
        return parts

    def end(self, *, is_cut: bool) -> list[AnswerPart]:
        self._is_last = True
        parts = self.push("")
        if self.reading is Reading.OPEN:
            self.reading, self.rest = Reading.REFUSED, self._text
        elif self.reading is Reading.CALLING:
            if self._value is not None:
                self._value.append(self._text)
                self._text = ""
                parts += self._argument(is_cut=is_cut)
            if not is_cut:
                parts.append(AnswerPart(PartKind.ARGUMENTS, "}"))
            self.reading, self.rest = Reading.OVER, self._text
        return parts

    def _look(self, pattern: Pattern) -> Prefix | None:
        """The pattern at the beginning of the text; None where more text is needed to know."""
        if self._looking is None:
            self._looking = Prefix(pattern)
            self._looking.push(self._text)
        if not self._looking.is_over and not self._is_last:
            return None
        found, self._looking = self._looking, None
        return found

    def _between(self, parts: list[AnswerPart]) -> bool:
        """Where an argument begins or the call ends. Whether something was certain."""
        form = self._patterns.form
        self._text = self._text.lstrip()
        if self._text.startswith(form.end):
            parts += self._close()
            return True
        if form.end.startswith(self._text) and not self._is_last:
            return False
        found = self._look(self._patterns.key)
        if found is None:
            return False
        if not found.size:
            return self._stop(parts)
        groups = found.groups(self._text)
        self._text = self._text[found.size :]
        self._open(groups, parts)
        return True

    def _open(self, groups: Mapping[str, str], parts: list[AnswerPart]) -> None:
        if self.reading is Reading.OPEN:
            self.reading = Reading.CALLING
            parts.append(AnswerPart(PartKind.CALL, self._name))
        self._key, self._is_text = groups["key"].strip(), groups.get("is_text", "") == "true"
        self._value = []

    def _stop(self, parts: list[AnswerPart]) -> bool:
        """End at something that does not belong to a call."""
        if self.reading is Reading.OPEN:
            self.reading, self.rest = Reading.REFUSED, self._text
        else:
            parts.append(AnswerPart(PartKind.ARGUMENTS, "}" if self._keys else "{}"))
            self.reading, self.rest = Reading.OVER, self._text
        return True

    def _close(self) -> list[AnswerPart]:
        """The closing tag of the call."""
        begun = [AnswerPart(PartKind.CALL, self._name)] if self.reading is Reading.OPEN else []
        self.reading, self.rest, self.is_complete = Reading.OVER, self._text[len(self._patterns.form.end) :], True
        return [*begun, AnswerPart(PartKind.ARGUMENTS, "}" if self._keys else "{}")]

    def _in_value(self, parts: list[AnswerPart]) -> bool:
        """One step in a value: to a tag, over one, or to its end. Whether something was certain."""
        assert self._value is not None
        patterns = self._patterns
        found = patterns.stops.match(self._text)
        if found is None:
            found = patterns.stops.search(self._text)
            at = found.start() if found else self._certain()
            self._value.append(self._text[:at])
            self._text = self._text[at:]
            return found is not None
        stop = self._text[: found.end()]
        if stop == patterns.form.value_close:
            return self._at_value_close(parts)
        if stop == patterns.form.end:
            return self._at_end(parts)
        return self._at_key(parts, found.end() - len(patterns.form.key_mark))

    def _certain(self) -> int:
        """How much of the text, in which no tag is, cannot belong to one that begins."""
        tail = max(0, len(self._text) - self._patterns.tail)
        found = self._patterns.open_stop.search(self._text, tail)
        return found.start() if found and not self._is_last else len(self._text)

    def _text_on(self, size: int) -> bool:
        """Take the next ``size`` characters as text of the value."""
        assert self._value is not None
        self._value.append(self._text[:size])
        self._text = self._text[size:]
        return True

    def _at_value_close(self, parts: list[AnswerPart]) -> bool:
        form = self._patterns.form
        found = self._look(self._patterns.behind_value[self._is_wrapped])
        if found is None:
            return False
        rest = self._text[len(form.value_close) :].strip()
        if not found.size and not (self._is_last and (not rest or rest == form.end)):
            return self._text_on(len(form.value_close))
        self._text = self._text[len(form.value_close) :]
        parts += self._argument(is_cut=False)
        return True

    def _at_end(self, parts: list[AnswerPart]) -> bool:
        """The end of the call within a value: its closing tag may be missing."""
        form = self._patterns.form
        found = self._look(self._patterns.ends[self._is_wrapped])
        if found is None:
            return False
        if not found.size and not (self._is_last and self._text.strip() == form.end):
            return self._text_on(len(form.end))
        parts += self._argument(is_cut=False)
        return True

    def _at_key(self, parts: list[AnswerPart], at: int) -> bool:
        """A line that begins as an argument does: the closing tag of the one before may be missing."""
        found = self._look(self._patterns.key)
        if found is None:
            return False
        key = found.groups(self._text)["key"].strip() if found.size else ""
        properties = self._schema.get("properties")
        is_known = isinstance(properties, Mapping) and key in properties and key != self._key
        if not is_known or key in self._keys:
            return self._text_on(at + len(self._patterns.form.key_mark))
        parts += self._argument(is_cut=False)
        return True

    def _argument(self, *, is_cut: bool) -> list[AnswerPart]:
        """The present argument as JSON. is_cut: the answer ended within it."""
        assert self._value is not None
        value, self._value = "".join(self._value), None
        if self._patterns.form.is_trimmed:
            value = value.removeprefix("\n")
            value = value if is_cut else value.removesuffix("\n")
        opening = ", " if self._keys else "{"
        self._keys.add(self._key)
        opening += f"{json.dumps(self._key, ensure_ascii=False)}: "
        if is_cut:
            return [AnswerPart(PartKind.ARGUMENTS, opening + json.dumps(value, ensure_ascii=False)[:-1])]
        return [AnswerPart(PartKind.ARGUMENTS, opening + self._written(value))]

    def _written(self, value: str) -> str:
        schema = property_of(self._schema, self._key)
        typed = value if self._is_text else with_type(value, schema, self._schema)
        if isinstance(typed, str) and schema is None and not self._is_text and self._patterns.form.key.count("is_text"):
            return as_json(value) or json.dumps(value, ensure_ascii=False)
        return json.dumps(typed, ensure_ascii=False)
