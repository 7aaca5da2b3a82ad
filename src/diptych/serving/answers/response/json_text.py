"""One JSON value inside a growing text: where it ends, and the same value as JSON that every client can read.

What models write is nearly JSON. Valid JSON comes out as it was written. These are mended on the way: control
characters and wrong escapes in strings, the constants and quotes of Python, bare words, commas before a closing
bracket, and strings between marks of their own (``<|"|>``). Where the structure is no JSON's, reading ends:
``is_broken``. Every character is looked at once.
"""

import json
import re
from collections.abc import Sequence

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = {mark: re.compile(rf"[^{mark}\\\x00-\x1f]*") for mark in "\"'"}
_WORD = re.compile(r"""[^\s,:{}\[\]"'<]+""")
_WORD_REST = re.compile(r"""[^\s,:{}\[\]"'<]*""")
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_CONSTANTS = {
    "True": "true", "False": "false", "None": "null", "NaN": "null", "Infinity": "null", "-Infinity": "null",
}  # fmt: skip
_CLOSING = {"{": "}", "[": "]"}


class JsonText:
    """Reads one value. marks: pairs of texts around a string, besides quotes."""

    def __init__(self, marks: Sequence[tuple[str, str]] = ()) -> None:
        self.is_over = False
        self.is_broken = False
        self._marks = tuple(marks)
        self._closings: list[str] = []  # of the brackets that are open
        self._is_key: list[bool] = []  # for each of them, whether a key comes next
        self._expects = "value"  # or: "first" (a value or key, or the end), "colon", "comma"
        self._string = ""  # the mark that ends the present string
        self._comma: list[str] = []  # a comma and the space behind it: left out before a closing bracket
        self._rest = ""  # the beginning of something that is not complete: a few characters
        self._word: list[str] = []  # a word so far

    def push(self, text: str) -> tuple[str, str]:
        """More text. Returns what it adds to the value, and the text behind the value once that is over or broken."""
        if self.is_broken:
            return "", text
        text, self._rest = self._rest + text, ""
        out: list[str] = []
        at = 0
        if self._word:
            at = _WORD_REST.match(text).end()  # type: ignore[union-attr]
            self._word.append(text[:at])
            if at == len(text):
                return "", ""
            word = self._take_word(out)
            if self.is_broken:
                return self._take_comma(), word + text[at:]
        while at < len(text) and not self.is_over:
            step = self._in_string(text, at, out) if self._string else self._outside(text, at, out)
            if self.is_broken:
                out.append(self._take_comma())
                break
            if step is None:
                self._rest = text[at:]
                return "".join(out), ""
            at = step
        return "".join(out), text[at:]

    def end(self) -> str:
        """The text ends here: what was held back. A word or number is over with it."""
        rest, self._rest = self._rest, ""
        if rest and not self._string and _WORD.fullmatch(rest):
            self._word.append(rest)
        if self._word:
            out: list[str] = []
            rest = self._take_word(out)
            if not self.is_broken:
                return "".join(out)
        return self._take_comma() + rest

    def _take_word(self, out: list[str]) -> str:
        """The word so far, which is over."""
        word = "".join(self._word)
        self._word.clear()
        self._write_word(word, out)
        return word

    def _take_comma(self) -> str:
        comma = "".join(self._comma)
        self._comma.clear()
        return comma

    def _in_string(self, text: str, at: int, out: list[str]) -> int | None:
        """The position behind what could be read of a string; None where more text is needed."""
        mark = self._string
        if len(mark) > 1:
            return self._in_marks(text, at, out)
        end = _PLAIN[mark].match(text, at).end()  # type: ignore[union-attr]
        if end > at:
            plain = text[at:end]
            out.append(plain if mark == '"' else plain.replace('"', '\\"'))
            return end
        character = text[at]
        if character == mark:
            out.append('"')
            self._end_string()
            return at + 1
        if character != "\\":
            out.append(_ESCAPES.get(character) or f"\\u{ord(character):04x}")
            return at + 1
        following = text[at + 1 : at + 2]
        if not following:
            return None
        if following == "u":
            digits = text[at + 2 : at + 6]
            if all(digit in "0123456789abcdefABCDEF" for digit in digits):
                if len(digits) < 4:
                    return None
                out.append(text[at : at + 6])
                return at + 6
        elif following in '"\\/bfnrt':
            out.append(text[at : at + 2])
            return at + 2
        elif following == "'":
            out.append("'")
            return at + 2
        out.append("\\\\")
        return at + 1

    def _in_marks(self, text: str, at: int, out: list[str]) -> int | None:
        end = text.find(self._string, at)
        stop = end if end >= 0 else len(text) - _overlap(text, self._string, at)
        if stop > at:
            out.append(json.dumps(text[at:stop], ensure_ascii=False)[1:-1])
        if end >= 0:
            out.append('"')
            end += len(self._string)
            self._end_string()
            return end
        return stop if stop > at else None

    def _outside(self, text: str, at: int, out: list[str]) -> int | None:
        end = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if end > at:
            if self._comma:
                self._comma.append(text[at:end])
            else:
                out.append(text[at:end])
            return end
        character = text[at]
        if character in "{[":
            if self._begins(out, is_text=False):
                out.append(character)
                self._closings.append(_CLOSING[character])
                self._is_key.append(character == "{")
                self._expects = "first"
        elif character in "}]":
            self._close(character, out)
        elif character == ",":
            self.is_broken = self._expects != "comma"
            if not self.is_broken:
                self._comma, self._expects = [","], "value"
                self._is_key[-1] = self._closings[-1] == "}"
        elif character == ":":
            self.is_broken = self._expects != "colon"
            if not self.is_broken:
                out.append(":")
                self._expects = "value"
        elif character in "\"'":
            if self._begins(out):
                out.append('"')
                self._string = character
        else:
            return self._other(text, at, out)
        return at + 1

    def _other(self, text: str, at: int, out: list[str]) -> int | None:
        """A mark of a string, a word or a number."""
        for opening, closing in self._marks:
            if text.startswith(opening, at):
                if self._begins(out):
                    out.append('"')
                    self._string = closing
                return at + len(opening)
            if opening.startswith(text[at:]):
                return None
        found = _WORD.match(text, at)
        if found is None:
            self.is_broken = True
            return at
        if found.end() == len(text):
            self._word.append(found.group())
        else:
            self._write_word(found.group(), out)
        return found.end()

    def _write_word(self, word: str, out: list[str]) -> None:
        is_key = bool(self._is_key) and self._is_key[-1]
        if self._begins(out):
            out.append(json.dumps(word, ensure_ascii=False) if is_key else _literal(word))
            self._end_value()

    def _close(self, character: str, out: list[str]) -> None:
        """A closing bracket."""
        is_missing = self._expects == "colon" or (self._expects == "value" and not self._comma)
        if is_missing or not self._closings or self._closings[-1] != character:
            self.is_broken = True
            return
        out += [*self._comma[1:], character]
        self._comma.clear()
        self._closings.pop()
        self._is_key.pop()
        self._end_value()

    def _begins(self, out: list[str], *, is_text: bool = True) -> bool:
        """Whether a value or a key may begin here. is_text: with a text, as a key must."""
        is_key = bool(self._is_key) and self._is_key[-1]
        self.is_broken = self._expects not in ("value", "first") or (is_key and not is_text)
        if not self.is_broken:
            out.append(self._take_comma())
        return not self.is_broken

    def _end_string(self) -> None:
        self._string = ""
        self._end_value()

    def _end_value(self) -> None:
        if not self._closings:
            self.is_over = True
        elif self._is_key[-1]:
            self._is_key[-1], self._expects = False, "colon"
        else:
            self._expects = "comma"


def _literal(word: str) -> str:
    """A word as JSON."""
    if _LITERAL.fullmatch(word):
        return word
    return _CONSTANTS.get(word) or json.dumps(word, ensure_ascii=False)


def _overlap(text: str, mark: str, at: int) -> int:
    """How many of the last characters, from ``at`` on, may be the beginning of the mark."""
    most = min(len(mark) - 1, len(text) - at)
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)


def as_json(text: str, marks: Sequence[tuple[str, str]] = ()) -> str | None:
    """A text that is one value, as JSON; None for another text."""
    reader = JsonText(marks)
    written, rest = reader.push(text.strip())
    written += reader.end() if not reader.is_over else ""
    return written if reader.is_over and not reader.is_broken and not rest.strip() else None
