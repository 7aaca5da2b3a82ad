"""The text of a custom tool's call, read from the JSON of a function's arguments while that arrives."""

import json
import re

from diptych.serving.api.responses_tools import CUSTOM_INPUT

_HEAD = ("{", f'"{CUSTOM_INPUT}"', ":", '"')  # with white space before each
_HEX = "[0-9a-fA-F]"
_LOW = rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
_NO_LOW = r"[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]"
# Text and escapes that are whole; half of a pair only where the other half does not follow. The second group: escapes
# that JSON does not know.
_CERTAIN = re.compile(
    rf'((?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB]){_HEX}{{4}}|\\u[dD][89abAB]{_HEX}{{2}}(?:{_LOW}|(?={_NO_LOW})))+)'
    rf'|(\\[^u"\\/bfnrt]|\\u(?={_HEX}{{0,3}}[^0-9a-fA-F]))'
)


class TextArgument:
    """The only argument of one call. Takes parts of ``{"input": "..."}``; what is no such JSON is a text as it is."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._told: list[str] = []
        self._num_marks, self._num_matched = 0, 0  # of ``_HEAD`` so far, and characters of the next one
        self._pending = ""  # an escape that is not whole
        self._is_over = False

    @property
    def _has_begun(self) -> bool:
        return self._num_marks == len(_HEAD)

    def feed(self, part: str) -> str:
        """What the text has more, as far as it is certain."""
        self._parts.append(part)
        begin = 0 if self._has_begun else self._read_head(part)
        if self._is_over or not self._has_begun:
            return ""
        text, at = self._pending + part[begin:], 0
        said = []
        while (found := _CERTAIN.match(text, at)) is not None:
            said.append(_decoded(found[1]) if found[1] else found[2])
            at = found.end()
        self._is_over = text.startswith('"', at)
        self._pending = "" if self._is_over else text[at:]
        self._told += said
        return "".join(said)

    def _read_head(self, part: str) -> int:
        """Look for what stands before the text. Returns how much of the part that takes."""
        for at, character in enumerate(part):
            if self._is_over or self._has_begun:
                return at
            mark = _HEAD[self._num_marks]
            if character == mark[self._num_matched]:
                self._num_matched += 1
                if self._num_matched == len(mark):
                    self._num_marks, self._num_matched = self._num_marks + 1, 0
            elif self._num_matched or not character.isspace():
                self._is_over = True  # no such JSON
        return len(part)

    def rest(self) -> str:
        """What the text has more now that the arguments are whole, or were cut."""
        told, whole = "".join(self._told), self._whole()
        return whole[len(told) :] if whole.startswith(told) else ""

    def _whole(self) -> str:
        arguments = "".join(self._parts)
        try:
            value = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return "".join(self._told) if self._has_begun else arguments
        if isinstance(value, dict):
            text = value.get(CUSTOM_INPUT, next(iter(value.values())) if len(value) == 1 else None)
            value = text if isinstance(text, str) else arguments
        text = value if isinstance(value, str) else arguments
        return _without_halves(text)


def _decoded(characters: str) -> str:
    """The text that JSON writes so."""
    return _without_halves(json.loads(f'"{characters}"', strict=False))


def _without_halves(text: str) -> str:
    """The text with U+FFFD for half of a pair, which no client could read."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
