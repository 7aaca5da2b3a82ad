"""Counts the characters that an object copies while it grows."""

from collections import deque
from collections.abc import Iterator
from typing import Any


class Copies:
    """The characters of all texts that an object has made and kept since the first look: in its attributes and those of
    what it holds. A text to which each token is added is a new one each time, with all that was before."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._seen: dict[int, str | bytes] = {}  # by id, and held, so that no id is given again
        self.num_characters = 0
        self.look()
        self.num_characters = 0

    def look(self) -> None:
        """Count what is new."""
        for text in texts_of(self._root):
            if id(text) not in self._seen:
                self._seen[id(text)] = text
                self.num_characters += len(text)


def texts_of(root: object) -> Iterator[str | bytes]:
    """All texts in an object of ours."""
    stack, done = [root], set[int]()
    while stack:
        found: Any = stack.pop()
        if isinstance(found, str | bytes):
            yield found
        elif id(found) not in done:
            done.add(id(found))
            if isinstance(found, dict):
                stack += [*found, *found.values()]
            elif isinstance(found, list | tuple | set | frozenset | deque):
                stack += found
            elif type(found).__module__.startswith("diptych"):
                stack += [getattr(found, name) for name in _attributes(found) if hasattr(found, name)]


def _attributes(found: object) -> set[str]:
    slots = [name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())]
    return {*slots, *getattr(found, "__dict__", ())}
