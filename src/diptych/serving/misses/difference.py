"""The text at which two prompts part, and what it looks like: only where prompt texts are kept."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_TOKENS = 64  # behind the place, in which the prompts may become alike again
ALIKE_TOKENS = 4  # in a row, that make them alike again
BEFORE_TOKENS = 16  # shown before the place
MAX_SHOWN = 80  # characters of a text that does not become alike again

# What a word looks like, the first that fits.
_KINDS = (
    ("a time stamp", re.compile(r"\d{1,2}:\d{2}|\d{4}-\d{2}-\d{2}T\d|^\d{10,}")),
    ("a date", re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}")),
    ("an id", re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-|(?=[a-fA-F]*\d)[0-9a-fA-F]{12,}")),
    ("a number", re.compile(r"^\W*\d+([.,]\d+)*\W*$")),
)
_WORD_BEFORE, _WORD_AFTER = re.compile(r"[\w:./+-]*$"), re.compile(r"[\w:./+-]*")

_STOPS = ".,;:!?"

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class TextDifference:
    """before: the text that both prompts have there. was, now: the words that differ after it, in the earlier prompt
    and in this one; of prompts that do not become alike again soon, how they go on. kind: what the words look like
    ("": not known)."""

    before: str
    was: str
    now: str
    kind: str


def difference(before: Sequence[int], was: Sequence[int], now: Sequence[int], decode: Decode) -> TextDifference:
    """The difference between two prompts that continue with the token ids ``was`` and ``now`` behind ``before``."""
    was, now = was[:MAX_TOKENS], now[:MAX_TOKENS]
    before_text = decode(before[-BEFORE_TOKENS:])
    ends = alike_again(was, now)
    if ends is None:
        return TextDifference(before_text, decode(was)[:MAX_SHOWN], decode(now)[:MAX_SHOWN], "")
    head = _WORD_BEFORE.search(before_text)
    begun = head.group() if head else ""
    words = [begun + _whole_word(tokens, end, decode) for tokens, end in zip((was, now), ends, strict=True)]
    if all(word[-1:] in _STOPS and word[:-1] for word in words):
        words = [word[:-1] for word in words]
    return TextDifference(before_text[: len(before_text) - len(begun)], words[0], words[1], kind_of(*words))


def alike_again(was: Sequence[int], now: Sequence[int]) -> tuple[int, int] | None:
    """Tokens of each after which they go on alike, with as few as possible left out; None: they do not."""
    for count in range(len(was) + len(now)):
        for in_now in range(max(0, count - len(was)), min(count, len(now)) + 1):
            in_was = count - in_now
            following = now[in_now : in_now + ALIKE_TOKENS]
            if len(following) == ALIKE_TOKENS and following == was[in_was : in_was + ALIKE_TOKENS]:
                return in_was, in_now
    return None


def kind_of(was: str, now: str) -> str:
    """What both words look like."""
    if was.casefold() == now.casefold():
        return "upper and lower case"
    if was.split() == now.split():
        return "white space"
    return next((name for name, pattern in _KINDS if pattern.search(was.strip()) and pattern.search(now.strip())), "")


def _whole_word(tokens: Sequence[int], end: int, decode: Decode) -> str:
    """The text of the tokens before ``end``, up to the end of its word."""
    text, longer = decode(tokens[:end]), decode(tokens[: end + ALIKE_TOKENS])
    rest = _WORD_AFTER.match(longer[len(text) :]) if longer.startswith(text) else None
    return text + (rest.group() if rest else "")
