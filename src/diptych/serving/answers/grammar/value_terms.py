"""Sets of JSON values of one type each, and what two of them have in common.

A schema is a union of such terms. What stands inside arrays and objects is not looked into: it is a conjunction of
parts of the schema, of which each holds or does not hold.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import isfinite, lcm
from typing import Any, NamedTuple

from diptych.serving.answers.grammar.schema_document import Node


class Blame(NamedTuple):
    """The keyword that is named, and left out, where what it asks for cannot be enforced."""

    node: Node
    keyword: str


class Literal(NamedTuple):
    """A part of a schema that holds, or does not. blame: in place of its own keywords."""

    node: Node
    holds: bool = True
    blame: Blame | None = None


_BEYOND = Fraction(10**400)
Conjunction = tuple[Literal, ...]
TRUE: Conjunction = ()
SOME = -1  # items: see Arrays


def conjunction(*parts: Conjunction) -> Conjunction:
    """Parts that all hold; each once, in their order."""
    found: dict[Literal, None] = {}
    for part in parts:
        for literal in part:
            if literal.node.keywords is not literal.holds:  # neither "true holds" nor "false does not"
                found[literal] = None
    return tuple(found)


def holds(*nodes: Node) -> Conjunction:
    """Parts that all hold."""
    return conjunction(tuple(map(Literal, nodes)))


def is_false(part: Conjunction) -> bool:
    """Whether a part is the schema that allows nothing; others may allow nothing, too."""
    return any(isinstance(literal.node.keywords, bool) for literal in part)


@dataclass(frozen=True, slots=True)
class Nulls:
    """null."""


@dataclass(frozen=True, slots=True)
class Booleans:
    """true, false or either."""

    values: frozenset[bool] = frozenset((True, False))


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers in an interval. multiple: of which they are multiples. values: the only ones."""

    low: Fraction | None = None
    high: Fraction | None = None
    is_low_open: bool = False
    is_high_open: bool = False
    is_integer: bool = False
    multiple: Fraction | None = None
    values: tuple[int | float, ...] | None = None

    def contains(self, value: int | float) -> bool:
        """Whether a number is one of them, values aside."""
        exact = exactly(value)
        return not (
            (self.low is not None and (exact < self.low or (self.is_low_open and exact == self.low)))
            or (self.high is not None and (exact > self.high or (self.is_high_open and exact == self.high)))
            or (self.is_integer and exact.denominator != 1)
            or (self.multiple is not None and (exact / self.multiple).denominator != 1)
        )

    def allowed(self, values: Iterable[int | float]) -> tuple[int | float, ...]:
        """The values that are among these numbers, in the order given."""
        own = None if self.values is None else set(map(exactly, self.values))
        return tuple(v for v in values if self.contains(v) and (own is None or exactly(v) in own))


@dataclass(frozen=True, slots=True)
class TextPattern:
    """A regular expression, and whether texts match it."""

    text: str
    blame: Blame
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts with a range of lengths in characters. values: the only ones; excluded: those that it is not."""

    low: int = 0
    high: int | None = None
    patterns: tuple[TextPattern, ...] = ()
    formats: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None
    excluded: frozenset[str] = frozenset()

    def may_contain(self, value: str) -> bool:
        """Whether a text is one of them, patterns, formats and values aside."""
        return self.low <= len(value) and (self.high is None or len(value) <= self.high) and value not in self.excluded

    def allowed(self, values: Iterable[str]) -> tuple[str, ...]:
        """The values that are among these texts, patterns and formats aside, in the order given."""
        own = None if self.values is None else set(self.values)
        return tuple(v for v in values if self.may_contain(v) and (own is None or v in own))


@dataclass(frozen=True, slots=True)
class Arrays:
    """Arrays with a range of lengths in items: the first ones, and all others. unique: no item comes twice. placed:
    what says of some items where they stand. seen: how many of the first items keywords which hold speak of; None:
    all; SOME: of those that match."""

    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction = TRUE
    low: int = 0
    high: int | None = None
    unique: Blame | None = None
    placed: Blame | None = None
    seen: int | None = 0

    def item(self, number: int) -> Conjunction:
        """What one of the items is."""
        return self.prefix[number] if number < len(self.prefix) else self.rest


@dataclass(frozen=True, slots=True)
class PropertyPattern:
    """Properties whose names match a regular expression."""

    text: str
    blame: Blame
    value: Conjunction


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects with a range of numbers of properties. A name is one of ``properties``, or matches one of ``patterns``,
    or is one of the others. counted: what limits their number; named: what speaks of names that are not known. seen:
    names and patterns that keywords which hold speak of; None: all."""

    properties: Mapping[str, Conjunction] = field(default_factory=dict)
    patterns: tuple[PropertyPattern, ...] = ()
    others: Conjunction = TRUE
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    counted: Blame | None = None
    named: Blame | None = None
    seen: frozenset[str] | None = frozenset()
    seen_patterns: frozenset[str] = frozenset()

    @property
    def is_closed(self) -> bool:
        """Whether all names are known."""
        return not self.patterns and is_false(self.others)


Term = Nulls | Booleans | Numbers | Texts | Arrays | Objects
EVERYTHING: tuple[Term, ...] = (Nulls(), Booleans(), Numbers(), Texts(), Arrays(), Objects())
TYPES: Mapping[str, type[Any]] = {
    "null": Nulls,
    "boolean": Booleans,
    "integer": Numbers,
    "number": Numbers,
    "string": Texts,
    "array": Arrays,
    "object": Objects,
}


def exactly(value: int | float) -> Fraction:
    """The number that stands in the JSON text."""
    if isinstance(value, int):
        return Fraction(value)
    return Fraction(repr(value)) if isfinite(value) else _BEYOND * (1 if value > 0 else -1)  # 1e400 is read as inf


def smaller(left: int | None, other: int | None) -> int | None:
    """The smaller limit; None is no limit."""
    return other if left is None else left if other is None else min(left, other)


def common(left: Term, other: Term) -> Term | None:
    """What is in both of two terms, but for objects (see object_terms.py); None: nothing is."""
    if isinstance(left, Nulls) and isinstance(other, Nulls):
        return left
    if isinstance(left, Booleans) and isinstance(other, Booleans):
        values = left.values & other.values
        return Booleans(values) if values else None
    if isinstance(left, Numbers) and isinstance(other, Numbers):
        return _common_numbers(left, other)
    if isinstance(left, Texts) and isinstance(other, Texts):
        return _common_texts(left, other)
    if isinstance(left, Arrays) and isinstance(other, Arrays):
        length = max(len(left.prefix), len(other.prefix))
        prefix = tuple(conjunction(left.item(number), other.item(number)) for number in range(length))
        high = smaller(left.high, other.high)
        low = max(left.low, other.low)
        if high is not None and high < low:
            return None
        return Arrays(
            prefix,
            conjunction(left.rest, other.rest),
            low,
            high,
            left.unique or other.unique,
            left.placed or other.placed,
            _all_seen(left.seen, other.seen),
        )
    return None


def _all_seen(left: int | None, other: int | None) -> int | None:
    if left is None or other is None:
        return None
    return SOME if SOME in (left, other) else max(left, other)


def _common_numbers(left: Numbers, other: Numbers) -> Numbers | None:
    low, is_low_open = _tighter(left.low, left.is_low_open, other.low, other.is_low_open, 1)
    high, is_high_open = _tighter(left.high, left.is_high_open, other.high, other.is_high_open, -1)
    multiple = left.multiple or other.multiple
    if left.multiple and other.multiple:
        first, second = left.multiple, other.multiple
        divisor = lcm(first.denominator, second.denominator)
        multiple = Fraction(lcm(int(first * divisor), int(second * divisor)), divisor)
    found = Numbers(low, high, is_low_open, is_high_open, left.is_integer or other.is_integer, multiple)
    given = left.values if left.values is not None else other.values
    if given is not None:
        values = other.allowed(left.allowed(given))
        return replace(found, values=values) if values else None
    if low is not None and high is not None and (low > high or (low == high and (is_low_open or is_high_open))):
        return None
    return found


def _tighter(
    left: Fraction | None, is_one_open: bool, other: Fraction | None, is_other_open: bool, sign: int
) -> tuple[Fraction | None, bool]:
    if left is None or other is None:
        return (other, is_other_open) if left is None else (left, is_one_open)
    if left == other:
        return left, is_one_open or is_other_open
    return (left, is_one_open) if (left - other) * sign > 0 else (other, is_other_open)


def _common_texts(left: Texts, other: Texts) -> Texts | None:
    low, high = max(left.low, other.low), smaller(left.high, other.high)
    patterns = tuple(dict.fromkeys((*left.patterns, *other.patterns)))
    formats = tuple(dict.fromkeys((*left.formats, *other.formats)))
    excluded = left.excluded | other.excluded
    if high is not None and high < low:
        return None
    given = left.values if left.values is not None else other.values
    if given is None:
        return Texts(low, high, patterns, formats, None, excluded)
    values = other.allowed(left.allowed(given))
    return Texts(low, high, patterns, formats, values, frozenset()) if values else None


def without(term: Numbers, values: Iterable[int | float]) -> list[Numbers]:
    """The numbers of a term but for some: the intervals between them."""
    if term.values is not None:
        gone = set(map(exactly, values))
        left = tuple(value for value in term.values if exactly(value) not in gone)
        return [replace(term, values=left)] if left else []
    ends = sorted(set(map(exactly, values)))
    lows: Sequence[Fraction | None] = [None, *ends]
    highs: Sequence[Fraction | None] = [*ends, None]
    pieces = [Numbers(low, high, True, True) for low, high in zip(lows, highs, strict=True)]
    return [found for piece in pieces if (found := _common_numbers(term, piece)) is not None]
