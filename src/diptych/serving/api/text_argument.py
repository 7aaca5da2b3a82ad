"""The text of a custom tool's call, read from the JSON of a function's arguments while that arrives."""

import json
import re

from diptych.serving.api.responses_tools import CUSTOM_INPUT

_HEAD = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_WHOLE_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?!d[89ab])[0-9a-f]{4}|\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})*', re.IGNORECASE
)


class TextArgument:
    """The only argument of one call. Takes parts of ``{"input": "..."}``; what is no such JSON is a text as it is."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._told: list[str] = []
        self._pending = ""  # JSON that is not read yet
        self._has_begun = self._is_over = False

    def feed(self, part: str) -> str:
        """What the text has more, as far as it is certain."""
        self._parts.append(part)
        if self._is_over:
            return ""
        self._pending += part
        if not self._has_begun:
            head = _HEAD.match(self._pending)
            if head is None:
                return ""
            self._has_begun, self._pending = True, self._pending[head.end() :]
        characters = _WHOLE_CHARACTERS.match(self._pending)
        assert characters is not None
        self._pending = self._pending[characters.end() :]
        self._is_over = self._pending.startswith('"')
        try:
            self._told.append(json.loads(f'"{characters[0]}"', strict=False))
        except ValueError:  # an escape that JSON does not know
            self._told.append(characters[0])
        return self._told[-1]

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
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
