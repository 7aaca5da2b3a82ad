"""Regular expressions of JSON schemas (ECMA 262's) as the compiler of grammars takes them: without looking around.

A text matches the schema's expression when it matches all of those that ``plain`` returns.
"""

import re
from collections.abc import Iterable


def plain(pattern: str, *, holds: bool = True) -> list[str]:
    """Expressions that together say the same; holds: or else what it does not match. Raises ValueError."""
    if not holds:
        raise ValueError(f"what does not match {pattern[:60]!r} cannot be written")
    return [pattern]


def none_of(texts: Iterable[str]) -> str:
    """An expression for every text but these."""
    return f"^{_other_than(sorted(set(texts)))}$"


def _other_than(texts: list[str]) -> str:
    """Everything but some texts: their common beginnings, and the character or the end that makes the difference."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    first = "".join(_in_class(character) for character in by_first)
    choices = [rf"[^{first}][\s\S]*" if first else r"[\s\S]+"]
    choices += [f"{re.escape(character)}{_other_than(rest)}" for character, rest in by_first.items()]
    if "" not in texts:
        choices.append("")
    return f"(?:{'|'.join(choices)})"


def _in_class(character: str) -> str:
    return rf"\u{{{ord(character):x}}}" if not character.isalnum() else character
