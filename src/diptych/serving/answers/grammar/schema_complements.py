"""What a JSON schema does not allow: the values of some terms for which a part of it does not hold.

Each keyword has its own complement, and the whole is their union. A complement that has no end (a property of any name,
an item at any place) is cut down to what can be written, where values of that type are left; else SchemaError.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from diptych.serving.answers.grammar import object_terms
from diptych.serving.answers.grammar.schema_document import Node, SchemaError
from diptych.serving.answers.grammar.schema_keywords import Keywords
from diptych.serving.answers.grammar.term_sets import TermSets
from diptych.serving.answers.grammar.value_terms import (
    TRUE,
    TYPES,
    Arrays,
    Blame,
    Booleans,
    Conjunction,
    Literal,
    Nulls,
    Numbers,
    Objects,
    Term,
    TextPattern,
    Texts,
    exactly,
    holds,
    is_false,
    without,
)

Piece = tuple[list[Term], type[Term] | None]  # values, and the type of those that could not be written
CANNOT_BE_WRITTEN = "what it does not allow cannot be written"
_SCALARS = (Nulls, Booleans, Numbers, Texts)


def missing(sets: TermSets, node: Node, terms: Sequence[Term]) -> list[Term]:
    """The values of some terms for which a part does not hold."""
    if isinstance(node.keywords, bool):
        return [] if node.keywords else list(terms)
    if not terms:
        return []
    keywords = Keywords(node, sets)
    if keywords.found.keys() & {"unevaluatedProperties", "unevaluatedItems"}:
        raise keywords.error("not", "what does not hold cannot depend on unevaluated properties or items")
    found: list[Term] = []
    cut: list[tuple[str, type[Term]]] = []
    for keyword in keywords.present():
        method = _MISSING.get(keyword)
        if method is not None:
            values, kind = method(sets, keywords, terms)
            found += [term for term in values if not sets.is_empty_term(term)]
            if kind is not None:
                cut.append((keyword, kind))
    for keyword, kind in cut:
        error = keywords.error(keyword, CANNOT_BE_WRITTEN)
        if not any(isinstance(term, kind) for term in found):
            raise error
        sets.cut.append(error)
    if len(found) > sets.max_terms:
        raise keywords.error("anyOf", "it has too many combinations")
    return found


def not_of(sets: TermSets, node: Node, keyword: str = "not") -> Conjunction:
    """The part that another one does not hold."""
    if isinstance(node.keywords, bool):
        return holds(sets.document.nothing if node.keywords else sets.document.anything)
    return (Literal(node, False, sets.blame(node, keyword)),)


def _complete(terms: Iterable[Term]) -> Piece:
    return list(terms), None


def _type(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    kinds = keywords.types()
    known = tuple(TYPES[kind] for kind in kinds)
    others: list[Term] = [term for term in terms if not isinstance(term, known)]
    if "integer" in kinds and "number" not in kinds:
        for term in terms:
            if isinstance(term, Numbers) and not term.is_integer:
                if term.values is None:
                    sets.cut.append(keywords.error("type", CANNOT_BE_WRITTEN))
                    return others, (None if others else Numbers)
                values = tuple(value for value in term.values if exactly(value).denominator != 1)
                others += [replace(term, values=values)] if values else []
    return _complete(others)


def _const(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    return _without_values(sets, [keywords.found["const"]], keywords.node, terms)


def _enum(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    return _without_values(sets, keywords.values("enum"), keywords.node, terms)


def _without_values(sets: TermSets, values: Sequence[object], node: Node, terms: Sequence[Term]) -> Piece:
    gone = sets.of_values(values, node)
    found: list[Term] = []
    for term in terms:
        left: list[Term] = [term]
        for other in gone:
            left = [piece for whole in left for piece in _minus(sets, whole, other, node)]
        found += left
    return _complete(found)


def _minus(sets: TermSets, term: Term, gone: Term, node: Node) -> list[Term]:
    """A term but for constants."""
    match term, gone:
        case Nulls(), Nulls():
            return []
        case Booleans(), Booleans():
            left = term.values - gone.values
            return [Booleans(left)] if left else []
        case Numbers(), Numbers(values=tuple() as numbers):
            return list(without(term, numbers))
        case Texts(), Texts(values=tuple() as texts):
            if term.values is None:
                return [replace(term, excluded=term.excluded | frozenset(texts))]
            values = tuple(value for value in term.values if value not in texts)
            return [replace(term, values=values)] if values else []
        case Arrays(), Arrays():
            return _other_arrays(sets, [term], gone, node)[0]
        case Objects(), Objects():
            return _other_objects(sets, [term], gone, node)[0]
    return [term]


def _number(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    wanted = keywords.numbers()
    pieces = []
    if wanted.values == ():  # no number at all
        return _complete(term for term in terms if isinstance(term, Numbers))
    if wanted.low is not None:
        pieces.append(Numbers(high=wanted.low, is_high_open=not wanted.is_low_open))
    if wanted.high is not None:
        pieces.append(Numbers(low=wanted.high, is_low_open=not wanted.is_high_open))
    found = sets.meet(terms, pieces, keywords.node, "not")
    if wanted.multiple is None:
        return _complete(found)
    is_cut = False
    for term in terms:
        if isinstance(term, Numbers) and term.values is not None:
            values = tuple(x for x in term.values if (exactly(x) / wanted.multiple).denominator != 1)
            found += [replace(term, values=values)] if values else []
        elif isinstance(term, Numbers):
            is_divided = term.multiple is not None and (term.multiple / wanted.multiple).denominator == 1
            is_cut = is_cut or not (is_divided or (term.is_integer and wanted.multiple == 1))
    return found, Numbers if is_cut else None


def _string(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    low, high = keywords.range("minLength", "maxLength")
    pieces = [Texts(high=low - 1)] if low else []
    if high is not None:
        pieces.append(Texts(low=high + 1))
    if (pattern := keywords.text("pattern")) is not None:
        pieces.append(Texts(patterns=(TextPattern(pattern, sets.blame(keywords.node, "pattern"), False),)))
    return _complete(sets.meet(terms, pieces, keywords.node, "not"))


def _array(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    low, high = keywords.range("minItems", "maxItems")
    prefix = tuple(holds(part) for part in keywords.nodes("prefixItems"))
    values, cut = _other_arrays(
        sets, terms, Arrays(prefix, holds(keywords.part("items")), low, high), keywords.node, keywords
    )
    if keywords.flag("uniqueItems") and any(
        isinstance(term, Arrays) and (term.high is None or term.high > 1) for term in terms
    ):
        cut = Arrays
    return values, cut


def _other_arrays(
    sets: TermSets, terms: Sequence[Term], wanted: Arrays, node: Node, keywords: Keywords | None = None
) -> Piece:
    """Arrays that are too long or too short, or have an item that is not as it should be."""
    found: list[Term] = []
    cut: type[Term] | None = None
    for term in terms:
        if not isinstance(term, Arrays):
            continue
        pieces = [Arrays(high=wanted.low - 1)] if wanted.low else []
        if wanted.high is not None:
            pieces.append(Arrays(low=wanted.high + 1))
        last = len(wanted.prefix)
        if is_false(wanted.rest):
            pieces.append(Arrays(low=last + 1))
        elif wanted.rest:
            most = min(term.high if term.high is not None else last + sets.reach, last + sets.reach)
            last = max(last, most)
            cut = Arrays if term.high is None or term.high > last else cut
        pieces += [
            Arrays((TRUE,) * number + (_negated(sets, wanted.item(number), node),), TRUE, number + 1)
            for number in range(last)
            if wanted.item(number)
        ]
        found += sets.meet([term], pieces, node, "not")
    if cut is not None and found:  # a wrong item is among the first ones
        sets.cut.append(SchemaError(*sets.blame(node, "items"), CANNOT_BE_WRITTEN))
        cut = None
    return found, cut


def _negated(sets: TermSets, part: Conjunction, node: Node) -> Conjunction:
    """What does not hold where one part holds."""
    if not part:
        return holds(sets.document.nothing)
    if len(part) == 1 and part[0].holds:
        return not_of(sets, part[0].node)
    if len(part) == 1:
        return holds(part[0].node)
    schemas = [literal.node for literal in part]
    if not all(literal.holds and not isinstance(literal.node.keywords, bool) for literal in part):
        raise SchemaError(*sets.blame(node, "not"), CANNOT_BE_WRITTEN)
    pieces = [sets.document.kept(schema) for schema in schemas]
    return not_of(sets, sets.document.made({"allOf": pieces}, node))


def _contains(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    low, high = keywords.range("minContains", "maxContains", 1)
    wanted = keywords.part("contains")
    if high is not None or low > 1:
        raise keywords.error("contains", CANNOT_BE_WRITTEN)
    pieces = [Arrays(rest=not_of(sets, wanted, "contains"))] if low else []
    return _complete(sets.meet(terms, pieces, keywords.node, "not"))


def _object(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    return _other_objects(sets, terms, object_terms.of_keywords(sets, keywords), keywords.node)


def _other_objects(sets: TermSets, terms: Sequence[Term], wanted: Objects, node: Node) -> Piece:
    """Objects that lack a property, or have too many, too few or a wrong one."""
    at = sets.blame(node, "not")
    nothing = holds(sets.document.nothing)
    found: list[Term] = []
    cut: type[Term] | None = None
    for term in terms:
        if not isinstance(term, Objects):
            continue
        pieces = [Objects({name: nothing}) for name in wanted.required]
        if wanted.low:
            pieces.append(Objects(high=wanted.low - 1, counted=at))
        if wanted.high is not None:
            pieces.append(Objects(low=wanted.high + 1, counted=at))
        names = {**wanted.properties, **object_terms.known_names(term)}
        for name in names:
            value = object_terms.value_of(sets, wanted, name)
            if value:
                pieces.append(Objects({name: _negated(sets, value, node)}, required=(name,)))
        may_have_others = not term.is_closed and (wanted.others or any(pattern.value for pattern in wanted.patterns))
        if may_have_others:
            extra = _with_extra(sets, term, wanted, at)
            cut = cut if extra is not None else Objects
            pieces += extra or []
        found += sets.meet([term], pieces, node, "not")
    return found, cut


def _with_extra(sets: TermSets, term: Objects, wanted: Objects, at: Blame) -> list[Objects] | None:
    """Objects that have a property of a name that is not wanted; None: they cannot be written."""
    if term.patterns or wanted.patterns or not is_false(wanted.others):
        return None
    optional = [name for name in wanted.properties if name not in term.required]
    if len(optional) > 3 or any(name not in wanted.properties for name in term.properties):
        return None
    found: list[Objects] = []
    for mask in range(1 << len(optional)):
        chosen = [name for number, name in enumerate(optional) if mask >> number & 1]
        absent = dict.fromkeys((name for name in optional if name not in chosen), holds(sets.document.nothing))
        inside = [name for name in wanted.properties if name not in optional]
        found.append(Objects(absent, required=tuple(chosen), low=len(inside) + len(chosen) + 1, counted=at))
    return found


def _property_names(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    found: list[Term] = []
    cut: type[Term] | None = None
    names = object_terms.of_names(sets, keywords.part("propertyNames"), Blame(keywords.node, "propertyNames"))
    for wanted in names:
        values, kind = _other_objects(sets, terms, wanted, keywords.node)
        found, cut = found + values, kind or cut
    return found, cut


def _dependent_required(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    nothing = holds(sets.document.nothing)
    pieces = [
        Objects({other: nothing}, required=(name,))
        for name, needed in keywords.name_lists("dependentRequired").items()
        for other in needed
    ]
    return _complete(sets.meet(terms, pieces, keywords.node, "not"))


def _dependent_schemas(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    found: list[Term] = []
    for name, part in keywords.table("dependentSchemas").items():
        have = sets.meet(terms, [Objects(required=(name,))], keywords.node, "not")
        found += missing(sets, part, have)
    return _complete(found)


def _all_of(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    return _complete(term for part in keywords.nodes("allOf") for term in missing(sets, part, terms))


def _any_of(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    found = list(terms)
    for part in keywords.nodes("anyOf"):
        found = missing(sets, part, found)
    return _complete(found)


def _one_of(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    """None of them, or two."""
    parts = keywords.nodes("oneOf")
    found = list(terms)
    for part in parts:
        found = missing(sets, part, found)
    for number, others in enumerate(sets.overlapping(parts)):
        for other in others:
            if other > number:
                found += sets.holding(parts[other], sets.holding(parts[number], terms))
    return _complete(found)


def _not(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    return _complete(sets.holding(keywords.part("not"), terms))


def _if(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    condition, then, otherwise = (keywords.part(name) for name in ("if", "then", "else"))
    met = missing(sets, then, sets.holding(condition, terms))
    return _complete([*met, *missing(sets, otherwise, missing(sets, condition, terms))])


def _ref(sets: TermSets, keywords: Keywords, terms: Sequence[Term]) -> Piece:
    sets.enter(keywords.node)
    try:
        return _complete(missing(sets, keywords.target(), terms))
    finally:
        sets.leave()


_MISSING: dict[str, Callable[[TermSets, Keywords, Sequence[Term]], Piece]] = {
    "type": _type,
    "const": _const,
    "enum": _enum,
    "number": _number,
    "string": _string,
    "array": _array,
    "contains": _contains,
    "object": _object,
    "propertyNames": _property_names,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "$ref": _ref,
    "$recursiveRef": _ref,
    "$dynamicRef": _ref,
}
