"""Terms of objects: what the keywords for them allow, what two have in common, and what tells them apart."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from diptych.serving.answers.grammar.schema_document import Node, SchemaError
from diptych.serving.answers.grammar.schema_keywords import Keywords
from diptych.serving.answers.grammar.term_sets import TermSets
from diptych.serving.answers.grammar.value_terms import (
    TRUE,
    Blame,
    Booleans,
    Conjunction,
    Numbers,
    Objects,
    PropertyPattern,
    Term,
    Texts,
    conjunction,
    exactly,
    holds,
    is_false,
    smaller,
)


@lru_cache(4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\(\?<(?![=!])", "(?P<", pattern), re.ASCII)


def matches(pattern: str, name: str, at: Blame) -> bool:
    """Whether the name of a property matches a regular expression. Raises SchemaError."""
    try:
        return _compiled(pattern).search(name) is not None
    except (re.error, OverflowError, RecursionError):
        raise SchemaError(*at, f"the pattern {pattern[:60]!r} cannot be enforced") from None


def of_keywords(sets: TermSets, keywords: Keywords) -> Objects:
    """What properties, patternProperties, additionalProperties, required and the limits of their number allow."""
    node = keywords.node
    named, others = keywords.table("properties"), keywords.part("additionalProperties")
    low, high = keywords.range("minProperties", "maxProperties")
    patterns = tuple(
        PropertyPattern(pattern, sets.blame(node, "patternProperties"), holds(part))
        for pattern, part in keywords.table("patternProperties").items()
    )
    properties = {
        name: conjunction(
            holds(part), *(pattern.value for pattern in patterns if matches(pattern.text, name, pattern.blame))
        )
        for name, part in named.items()
    }
    required = tuple(dict.fromkeys(keywords.names("required")))
    counts = "minProperties" if "minProperties" in keywords.found else "maxProperties"
    others_by = next((key for key in ("additionalProperties", "patternProperties") if key in keywords.found), "")
    has_all = "additionalProperties" in keywords.found
    return Objects(
        properties,
        patterns,
        holds(others),
        required,
        low,
        high,
        sets.blame(node, counts) if low or high is not None else None,
        sets.blame(node, others_by) if others_by else None,
        None if has_all else frozenset(properties),
        frozenset(pattern.text for pattern in patterns),
    )


def value_of(sets: TermSets, term: Objects, name: str) -> Conjunction:
    """What the value of a property must be."""
    if name in term.properties:
        return term.properties[name]
    found = [pattern.value for pattern in term.patterns if matches(pattern.text, name, pattern.blame)]
    return conjunction(*found) if found else term.others


def common_objects(sets: TermSets, left: Objects, other: Objects) -> Objects | None:
    """What is in both of two terms. Names that match a pattern of each are left to the compiler, which refuses them."""
    high, low = smaller(left.high, other.high), max(left.low, other.low)
    if high is not None and high < low:
        return None
    names = dict.fromkeys((*left.properties, *other.properties))
    properties = {name: conjunction(value_of(sets, left, name), value_of(sets, other, name)) for name in names}
    theirs = {pattern.text: pattern for pattern in other.patterns}
    patterns = []
    for pattern in left.patterns:
        same = theirs.pop(pattern.text, None)
        value = conjunction(pattern.value, same.value if same is not None else other.others)
        patterns.append(PropertyPattern(pattern.text, pattern.blame, value))
    for pattern in theirs.values():
        patterns.append(PropertyPattern(pattern.text, pattern.blame, conjunction(left.others, pattern.value)))
    others = conjunction(left.others, other.others)
    if is_false(others) and all(is_false(pattern.value) for pattern in patterns):
        patterns = []  # beside one that may match, each counts: a name can match both
    seen = None if left.seen is None or other.seen is None else left.seen | other.seen
    return Objects(
        properties,
        tuple(patterns),
        others,
        tuple(dict.fromkeys((*left.required, *other.required))),
        low,
        high,
        left.counted or other.counted,
        left.named or other.named,
        seen,
        left.seen_patterns | other.seen_patterns,
    )


def seen_only(sets: TermSets, term: Objects, others: Conjunction, node: Node) -> Objects:
    """Names that no keyword speaks of have these values."""
    assert term.seen is not None
    at = sets.blame(node, "unevaluatedProperties")
    patterns = tuple(PropertyPattern(pattern, at, TRUE) for pattern in sorted(term.seen_patterns))
    return Objects(dict.fromkeys(term.seen, TRUE), patterns, others, seen=None)


def of_names(sets: TermSets, part: Node, at: Blame) -> list[Objects]:
    """Objects whose names are values of a schema. Raises SchemaError."""
    found = [term for term in sets.terms(holds(part)) if isinstance(term, Texts)]
    nothing = holds(sets.document.nothing)
    if not found:
        return [Objects(others=nothing)]
    if found == [Texts()]:
        return [Objects()]
    if all(term.values is not None and not term.patterns and not term.formats for term in found):
        names = [name for term in found for name in term.values or ()]
        return [Objects(dict.fromkeys(names, TRUE), (), nothing)]
    patterns = [_as_pattern(term) for term in found]
    if None in patterns:
        raise SchemaError(*at, "it cannot be enforced")
    whole = patterns[0] if len(patterns) == 1 else "|".join(f"(?:{pattern})" for pattern in patterns)
    assert whole is not None
    return [Objects({}, (PropertyPattern(whole, at, TRUE),), nothing)]


def _as_pattern(term: Texts) -> str | None:
    """A regular expression for some texts; None: there is none."""
    if term.formats or term.excluded or term.values is not None:
        return None
    if not term.patterns:
        return rf"^[\s\S]{{{term.low},{'' if term.high is None else term.high}}}$"
    is_plain = len(term.patterns) == 1 and term.low == 0 and term.high is None and term.patterns[0].holds
    return term.patterns[0].text if is_plain else None


def told_apart(sets: TermSets, unions: Sequence[Sequence[Term]]) -> bool:
    """Whether one required property with constants of its own tells objects of all unions apart, and nothing else is
    in any of them."""
    if not all(union and all(isinstance(term, Objects) for term in union) for union in unions):
        return False
    first = unions[0][0]
    assert isinstance(first, Objects)
    for name in first.required[:8]:
        taken: set[object] = set()
        count = 0
        for union in unions:
            values = _constants(sets, union, name)
            if values is None:
                break
            taken |= values
            count += len(values)
        else:
            if len(taken) == count:
                return True
    return False


def _constants(sets: TermSets, union: Sequence[Term], name: str) -> set[object] | None:
    found: set[object] = set()
    for term in union:
        if not isinstance(term, Objects) or name not in term.required or is_false(value_of(sets, term, name)):
            return None
        values = sets.known_terms(value_of(sets, term, name))
        if values is None:
            return None
        for value in values:
            match value:
                case Texts(values=tuple() as texts):
                    found |= set(texts)
                case Numbers(values=tuple() as numbers):
                    found |= {("number", exactly(number)) for number in numbers}
                case Booleans():
                    found |= {("boolean", flag) for flag in value.values}
                case _:
                    return None
    return found


def known_names(term: Objects) -> Mapping[str, Conjunction]:
    """The properties that a term names, and those that it requires."""
    return {**dict.fromkeys(term.required, term.others), **term.properties}
