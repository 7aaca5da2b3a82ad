"""Regular expressions of JSON schemas (ECMA 262's) as the compiler of grammars takes them: without looking around.

A text matches the schema's expression when it matches all of those that ``plain`` returns.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from diptych.serving.answers.grammar.regular_languages import Language

# A class of all characters but a quotation mark or a backslash: beside control characters, the compiler allows both as
# escapes in JSON, so one control character is left out, too.
_ALL_BUT = re.compile(r"\\[\s\S]|\[\^(?:\\[\s\S]|\[[^\]]*\]|[^\]\\])*\]")
_LOOKS = re.compile(r"\(\?(?:[=!]|<[=!])")


def plain(pattern: str, *, holds: bool = True) -> list[str]:
    """Expressions that together say the same; holds: or else what it does not match. Raises ValueError."""
    found = [pattern] if holds and not _LOOKS.search(pattern) else _without_looking(pattern, holds)
    return [_ALL_BUT.sub(_without_nul, text) for text in found]


def _without_nul(found: re.Match[str]) -> str:
    text = found.group()
    is_all_but = text.startswith("[^") and ('"' in text or "\\\\" in text)
    return rf"[^\x00{text[2:]}" if is_all_but else text


@lru_cache(256)
def _without_looking(pattern: str, holds: bool) -> tuple[str, ...]:
    try:
        found: list[str] = []
        while holds and (split := _first_look(pattern)) is not None:
            ahead, is_wanted, pattern = split
            found += plain(ahead) if is_wanted else [Language(ahead, holds=False).written()]
        if holds and not _LOOKS.search(pattern):
            return (*found, pattern)
        return (*found, Language(pattern, holds=holds).written())
    except RecursionError:
        raise ValueError("the regular expression is too large to be enforced") from None


def _first_look(pattern: str) -> tuple[str, bool, str] | None:
    """The lookahead at the beginning of the text, whether it is wanted, and the pattern without it."""
    if not pattern.startswith(("^(?=", "^(?!")):
        return None
    depth, is_in_class, ends = 0, False, []
    for found in re.finditer(r"\\[\s\S]|[\[\]()|]", pattern):
        sign = found.group()
        if is_in_class:
            is_in_class = sign != "]"
        elif sign == "[":
            is_in_class = True
        elif sign == "(":
            depth += 1
        elif sign == ")":
            depth -= 1
            if depth == 0:
                ends.append(found.start())
        elif sign == "|" and depth == 0:
            return None  # it does not look for the whole pattern
    end = ends[0]
    return f"^(?:{pattern[4:end]})", pattern[3] == "=", "^" + pattern[end + 1 :]


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
    choices = [rf"[^\x00{first}][\s\S]*" if first else r"[\s\S]+"]
    choices += [f"{re.escape(character)}{_other_than(rest)}" for character, rest in by_first.items()]
    if "" not in texts:
        choices.append("")
    return f"(?:{'|'.join(choices)})"


def _in_class(character: str) -> str:
    return rf"\u{{{ord(character):x}}}" if not character.isalnum() else character
