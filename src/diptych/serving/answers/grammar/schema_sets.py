"""What a JSON schema allows, as a union of terms (value_terms.py): the values for which its parts hold, and, in
schema_complements.py, those for which they do not.

Raises SchemaError for what is malformed, and where such a union cannot be written. What would be written at too great
length is cut down to fewer values, all of them valid (REACH).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, permutations
from math import lcm
from typing import Any

from diptych.serving.answers.grammar import object_terms, schema_complements
from diptych.serving.answers.grammar.schema_document import (
    MAX_REFERENCES,
    Node,
    OpenPartError,
    SchemaDocument,
    SchemaError,
)
from diptych.serving.answers.grammar.schema_keywords import Keywords
from diptych.serving.answers.grammar.value_terms import (
    EVERYTHING,
    SOME,
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
    common,
    exactly,
    holds,
)

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # that are enforced
REACH = 12  # items of an array of any length, among which the one that it has to contain may be
MAX_TERMS = 512  # of one part
MAX_WORK = 60_000  # pairs of terms that are compared
MAX_LISTED = 400  # arrays of which no item comes twice


class SchemaSets:
    """The terms of the parts of one schema. skipped: paths and keywords that are left out."""

    def __init__(self, document: SchemaDocument, skipped: frozenset[tuple[tuple[str, ...], str]] = frozenset()) -> None:
        self.document = document
        self.reach, self.max_terms = REACH, MAX_TERMS
        self._skipped = skipped
        self._terms: dict[Conjunction, list[Term]] = {}
        self._is_empty: dict[Conjunction, bool] = {}
        self.cut: list[SchemaError] = []  # where some of the values that a part does not allow were left out
        self._blame: Blame | None = None
        self._overlaps: dict[int, list[list[int]]] = {}  # by the number of the part with oneOf
        self._depth = 0
        self._open: set[Conjunction] = set()  # whose terms are being found
        self._work = 0

    def skips(self, node: Node, keyword: str) -> bool:
        """Whether a keyword is left out."""
        return keyword != "oneOf" and (node.path, keyword) in self._skipped

    def terms(self, part: Conjunction) -> list[Term]:
        """All values for which a part holds; those that are known to be empty are left out."""
        found = self._terms.get(part)
        if found is not None:
            return found
        if part in self._open:
            raise OpenPartError(*self.blame(part[0].node, "$ref"), "it leads to itself")
        self._open.add(part)
        depth, self._depth = self._depth, 0
        try:
            found = list(EVERYTHING)
            for literal in sorted(part, key=lambda literal: not literal.holds):
                found = self._with(literal, found)
            found = [_listed_texts(term) if isinstance(term, Texts) else term for term in found]
            found = self._terms[part] = [term for term in found if not self.is_empty_term(term)]
        finally:
            self._depth = depth
            self._open.remove(part)
        return found

    def known_terms(self, part: Conjunction) -> list[Term] | None:
        """The terms of a part; None where they are being found."""
        return None if part in self._open else self.terms(part)

    def _with(self, literal: Literal, terms: Sequence[Term]) -> list[Term]:
        with self.under(literal.blame):
            if literal.holds:
                return self.holding(literal.node, terms)
            return schema_complements.missing(self, literal.node, terms)

    def is_empty(self, part: Conjunction) -> bool:
        """Whether no value is known to be possible."""
        if part in self._open:
            return False  # it is not known yet
        if part not in self._is_empty:
            self._is_empty[part] = False  # a part that contains itself
            try:
                self._is_empty[part] = not self.terms(part)
            except OpenPartError:
                del self._is_empty[part]
                return False
            except SchemaError:
                del self._is_empty[part]
                raise
        return self._is_empty[part]

    def is_empty_term(self, term: Term) -> bool:
        """The same of one term."""
        if isinstance(term, Numbers):
            return term.values is None and not has_number(term)
        if isinstance(term, Texts):
            return term.values is not None and matching(term) == []
        if isinstance(term, Objects):
            if term.high is not None and term.high < max(term.low, len(term.required)):
                return True
            if term.is_closed and term.low > sum(not self.is_empty(value) for value in term.properties.values()):
                return True
            return any(self.is_empty(object_terms.value_of(self, term, name)) for name in term.required)
        if isinstance(term, Arrays):
            return any(self.is_empty(term.item(number)) for number in range(min(term.low, len(term.prefix) + 1)))
        return False

    @contextmanager
    def under(self, blame: Blame | None) -> Iterator[None]:
        """Errors within are errors of this keyword, or of the one that it is itself under."""
        if blame is None:
            yield
            return
        before, self._blame = self._blame, self._blame or blame
        try:
            yield
        except OpenPartError as error:
            raise OpenPartError(*self._blame, error.why) from None
        except SchemaError as error:
            raise SchemaError(*self._blame, error.why) from None
        finally:
            self._blame = before

    def blame(self, node: Node, keyword: str) -> Blame:
        """What is to be named where a keyword cannot be enforced."""
        return self._blame or Blame(node, keyword)

    def meet(self, terms: Iterable[Term], others: Sequence[Term], node: Node, keyword: str) -> list[Term]:
        """What is in both of two unions. Raises SchemaError where that is too much."""
        found: list[Term] = []
        for term in terms:
            for other in others:
                if type(term) is not type(other):
                    continue
                self._work += 1
                if isinstance(term, Objects) and isinstance(other, Objects):
                    both: Term | None = object_terms.common_objects(self, term, other)
                else:
                    both = common(term, other)
                if both is not None:
                    found.append(both)
        if len(found) > MAX_TERMS or self._work > MAX_WORK:
            raise SchemaError(*self.blame(node, keyword), "it has too many combinations")
        return found

    def narrowed(self, terms: Iterable[Term], kind: type[Term], others: Sequence[Term], at: Blame) -> list[Term]:
        """Values of one type are further limited; values of other types stay."""
        found: list[Term] = []
        for term in terms:
            found += self.meet([term], others, *at) if isinstance(term, kind) else [term]
        return found

    def holding(self, node: Node, terms: Sequence[Term]) -> list[Term]:
        """The values of some terms for which a part holds."""
        if isinstance(node.keywords, bool):
            return list(terms) if node.keywords else []
        self.enter(node)
        try:
            if node.keywords.keys() & {"unevaluatedProperties", "unevaluatedItems"}:
                own = self._all_keywords(node, EVERYTHING)
                return self.meet(terms, self._evaluated(node, own), node, "allOf")
            return self._all_keywords(node, terms)
        finally:
            self.leave()

    def enter(self, node: Node) -> None:
        """One part within another begins, at the same value. Raises SchemaError where there is no end to that."""
        if self._depth >= MAX_REFERENCES:
            raise SchemaError(*self.blame(node, "$ref"), f"it leads to itself or through over {MAX_REFERENCES} parts")
        self._depth += 1

    def leave(self) -> None:
        """The inner part ends."""
        self._depth -= 1

    def _all_keywords(self, node: Node, terms: Sequence[Term]) -> list[Term]:
        found = list(terms)
        keywords = Keywords(node, self)
        for keyword in keywords.present():
            method = _HOLDING.get(keyword)
            if method is not None:
                found = method(self, keywords, found)
        return found

    def _type(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        kinds = keywords.types()
        known = tuple({TYPES[kind] for kind in kinds})
        found = [term for term in terms if isinstance(term, known)]
        if "integer" in kinds and "number" not in kinds:
            return self.narrowed(found, Numbers, [Numbers(is_integer=True)], Blame(keywords.node, "type"))
        return found

    def _const(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        return self.meet(terms, self.of_values([keywords.found["const"]], keywords.node), keywords.node, "const")

    def _enum(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        return self.meet(terms, self.of_values(keywords.values("enum"), keywords.node), keywords.node, "enum")

    def of_values(self, values: Sequence[Any], node: Node) -> list[Term]:
        """The terms of some values."""
        found: list[Term] = []
        if any(value is None for value in values):
            found.append(Nulls())
        if flags := frozenset(value for value in values if isinstance(value, bool)):
            found.append(Booleans(flags))
        numbers = {exactly(value): value for value in values if type(value) in (int, float)}
        if numbers:
            found.append(Numbers(values=tuple(numbers.values())))
        if texts := tuple(dict.fromkeys(value for value in values if isinstance(value, str))):
            found.append(Texts(values=texts))
        false = holds(self.document.nothing)
        for value in values:
            if isinstance(value, list):
                items = tuple(holds(self.document.made({"const": item}, node)) for item in value)
                found.append(Arrays(items, false, len(items), len(items)))
            elif isinstance(value, Mapping):
                parts = {name: holds(self.document.made({"const": item}, node)) for name, item in value.items()}
                found.append(Objects(parts, (), false, tuple(parts)))
        return found

    def _numbers(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        return self.narrowed(terms, Numbers, [keywords.numbers()], Blame(keywords.node, keywords.first_of("number")))

    def _texts(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        low, high = keywords.range("minLength", "maxLength")
        patterns: tuple[TextPattern, ...] = ()
        if (pattern := keywords.text("pattern")) is not None:
            patterns = (TextPattern(pattern, self.blame(keywords.node, "pattern")),)
        given = keywords.text("format")
        found = Texts(low, high, patterns, (given,) if given in FORMATS and given is not None else ())
        return self.narrowed(terms, Texts, [found], Blame(keywords.node, keywords.first_of("string")))

    def _arrays(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        node = keywords.node
        low, high = keywords.range("minItems", "maxItems")
        prefix = tuple(holds(part) for part in keywords.nodes("prefixItems"))
        placed = self.blame(node, "prefixItems") if prefix else None
        unique = self.blame(node, "uniqueItems") if keywords.flag("uniqueItems") else None
        seen = None if "items" in keywords.found else len(prefix)
        found = Arrays(prefix, holds(keywords.part("items")), low, high, unique, placed, seen)
        return self.narrowed(terms, Arrays, [found], Blame(node, keywords.first_of("array")))

    def _contains(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        """The items that are wanted can stand at several places; REACH says how far they are looked for."""
        node, wanted = keywords.node, keywords.part("contains")
        low, high = keywords.range("minContains", "maxContains", 1)
        at = Blame(node, "contains")
        if wanted.keywords is True:
            return self.narrowed(terms, Arrays, [Arrays(low=low, high=high, seen=None)], at)
        yes, no = holds(wanted), (Literal(wanted, False, self.blame(node, "contains")),)
        found: list[Term] = []
        for term in terms:
            if not isinstance(term, Arrays):
                found.append(term)
                continue
            counts = [low] if high is None else range(low, high + 1)
            for count in counts:
                found += self.meet([term], _placed(count, yes, TRUE if high is None else no, term.high), *at)
        return found

    def _objects(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        wanted = object_terms.of_keywords(self, keywords)
        return self.narrowed(terms, Objects, [wanted], Blame(keywords.node, keywords.first_of("object")))

    def _names(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        at = Blame(keywords.node, "propertyNames")
        return self.narrowed(terms, Objects, object_terms.of_names(self, keywords.part("propertyNames"), at), at)

    def _dependent_required(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        at = Blame(keywords.node, "dependentRequired")
        absent = holds(self.document.nothing)
        for name, needed in keywords.name_lists("dependentRequired").items():
            if needed:
                choices = [Objects({name: absent}), Objects(required=(name, *needed))]
                terms = self.narrowed(terms, Objects, choices, at)
        return terms

    def _dependent_schemas(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        at = Blame(keywords.node, "dependentSchemas")
        absent = holds(self.document.nothing)
        for name, part in keywords.table("dependentSchemas").items():
            if part.keywords is not True:
                have = self.narrowed(terms, Objects, [Objects(required=(name,))], at)
                have = self.holding(part, [term for term in have if isinstance(term, Objects)])
                terms = [*self.narrowed(terms, Objects, [Objects({name: absent})], at), *have]
        return terms

    def _all_of(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        for part in keywords.nodes("allOf"):
            terms = self.holding(part, terms)
        return terms

    def _any_of(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        return self._union((self.holding(part, terms) for part in keywords.nodes("anyOf")), keywords.node, "anyOf")

    def _one_of(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        parts = keywords.nodes("oneOf")
        if (keywords.node.path, "oneOf") in self._skipped:  # then as anyOf
            return self._union((self.holding(part, terms) for part in parts), keywords.node, "oneOf")
        return self._union(self._only_one(parts, keywords.node, terms), keywords.node, "oneOf")

    def _only_one(self, parts: Sequence[Node], node: Node, terms: Sequence[Term]) -> Iterator[list[Term]]:
        overlaps = self._overlaps.get(node.number)
        if overlaps is None:
            overlaps = self._overlaps[node.number] = self.overlapping(parts)
        for number, part in enumerate(parts):
            found = self.holding(part, terms)
            with self.under(Blame(node, "oneOf")):
                for other in overlaps[number]:
                    found = [term for term in found if not self.is_empty_term(term)]
                    found = schema_complements.missing(self, parts[other], found)
            yield found

    def overlapping(self, parts: Sequence[Node]) -> list[list[int]]:
        """The numbers, for each part, of those parts that may hold for the same value."""
        found: list[list[int]] = [[] for _ in parts]
        known = [self.terms(holds(part)) for part in parts]
        by_name = object_terms.told_apart(self, known)
        for number, other in combinations(range(len(parts)), 2):
            if not by_name and any(
                not self.is_empty_term(term) for term in self.meet(known[number], known[other], parts[number], "oneOf")
            ):
                found[number].append(other)
                found[other].append(number)
        return found

    def _union(self, unions: Iterable[list[Term]], node: Node, keyword: str) -> list[Term]:
        found: dict[int, Term] = {}
        for union in unions:
            found.update((id(term), term) for term in union)
            if len(found) > MAX_TERMS:
                raise SchemaError(*self.blame(node, keyword), "it has too many combinations")
        return list(found.values())

    def _not(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        with self.under(Blame(keywords.node, "not")):
            return schema_complements.missing(self, keywords.part("not"), terms)

    def _if(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        then, otherwise = keywords.part("then"), keywords.part("else")
        if then.keywords is True and otherwise.keywords is True:
            return terms
        with self.under(Blame(keywords.node, "if")):
            condition = keywords.part("if")
            met, unmet = self.holding(condition, terms), schema_complements.missing(self, condition, terms)
        return self._union((self.holding(then, met), self.holding(otherwise, unmet)), keywords.node, "if")

    def _ref(self, keywords: Keywords, terms: list[Term]) -> list[Term]:
        return self.holding(keywords.target(), terms)

    def _evaluated(self, node: Node, terms: Sequence[Term]) -> list[Term]:
        """What no keyword of a part speaks of is as its unevaluated... keywords say."""
        keywords = Keywords(node, self)
        others, rest = holds(keywords.part("unevaluatedProperties")), holds(keywords.part("unevaluatedItems"))
        speaks_of = keywords.found.keys()  # with which nothing is left that no keyword speaks of
        found: list[Term] = []
        for term in terms:
            if isinstance(term, Objects) and "unevaluatedProperties" in speaks_of and term.seen is not None:
                wanted = object_terms.seen_only(self, term, others, node) if others else Objects(seen=None)
                found += self.meet([term], [wanted], node, "allOf")
            elif isinstance(term, Arrays) and "unevaluatedItems" in speaks_of and term.seen is not None:
                if term.seen == SOME and rest:
                    raise SchemaError(*self.blame(node, "unevaluatedItems"), "it cannot be enforced beside contains")
                found += self.meet([term], [Arrays((TRUE,) * max(0, term.seen), rest, seen=None)], node, "allOf")
            else:
                found.append(term)
        return found

    def listed(self, term: Arrays) -> list[Term]:
        """The arrays of a term in which no item comes twice, one by one. Raises SchemaError."""
        at = term.unique
        assert at is not None
        if (term.high is not None and term.high <= 1) or (not term.prefix and self.is_empty(term.rest)):
            return [replace(term, unique=None)]
        values = finite_values(self.terms(term.rest)) if not term.prefix else None
        if values is None:
            raise SchemaError(*at, "it cannot be enforced")
        found: list[Term] = []
        for length in range(term.low, min(len(values), term.high if term.high is not None else len(values)) + 1):
            for chosen in permutations(values, length):
                found += self.of_values([list(chosen)], at.node)
                if len(found) > MAX_LISTED:
                    raise SchemaError(*at, "it cannot be enforced")
        return found


def has_number(term: Numbers) -> bool:
    """Whether a number is in the interval of a term, and a multiple of what it has to be."""
    if term.low is None or term.high is None:
        return True
    step = term.multiple
    if term.is_integer:
        step = Fraction(lcm(step.numerator, step.denominator), step.denominator) if step is not None else Fraction(1)
    if step is None:
        return True
    first = -(-term.low // step) * step
    if term.is_low_open and first == term.low:
        first += step
    return first < term.high or (first == term.high and not term.is_high_open)


def matching(term: Texts) -> list[str] | None:
    """The values of a term that match its patterns; None where that is left to the compiler."""
    assert term.values is not None
    try:
        return [
            value
            for value in term.values
            if all(
                object_terms.matches(pattern.text, value, pattern.blame) == pattern.holds for pattern in term.patterns
            )
        ]
    except SchemaError:
        return None


def _listed_texts(term: Texts) -> Texts:
    """The same, without patterns where the values are known."""
    if term.values is None or not term.patterns or (values := matching(term)) is None:
        return term
    return replace(term, values=tuple(values), patterns=())


def finite_values(terms: Iterable[Term]) -> list[Any] | None:
    """All values of some terms, where they are few; None: too many, or not known."""
    found: list[Any] = []
    for term in terms:
        match term:
            case Nulls():
                found.append(None)
            case Booleans():
                found += sorted(term.values)
            case Numbers(values=tuple() as values):
                found += values
            case Texts(values=tuple() as texts, patterns=(), formats=()):
                found += texts
            case _:
                return None
    return found if len(found) == len({(type(value), value) for value in found}) else None


def _placed(count: int, yes: Conjunction, no: Conjunction, high: int | None) -> list[Arrays]:
    """Arrays in which at least ``count`` items are of one kind; all others are of the other kind."""
    if count == 0:
        return [Arrays(rest=no, seen=SOME)]
    reach = min(REACH, high) if high is not None else REACH
    if count > reach:
        return []
    places = list(combinations(range(reach if count < 3 else count + 1), count))
    return [
        Arrays(tuple(yes if at in chosen else no for at in range(chosen[-1] + 1)), no, chosen[-1] + 1, seen=SOME)
        for chosen in places
    ]


_HOLDING = {
    "type": SchemaSets._type,
    "const": SchemaSets._const,
    "enum": SchemaSets._enum,
    "number": SchemaSets._numbers,
    "string": SchemaSets._texts,
    "array": SchemaSets._arrays,
    "contains": SchemaSets._contains,
    "object": SchemaSets._objects,
    "propertyNames": SchemaSets._names,
    "dependentRequired": SchemaSets._dependent_required,
    "dependentSchemas": SchemaSets._dependent_schemas,
    "allOf": SchemaSets._all_of,
    "anyOf": SchemaSets._any_of,
    "oneOf": SchemaSets._one_of,
    "not": SchemaSets._not,
    "if": SchemaSets._if,
    "$ref": SchemaSets._ref,
    "$recursiveRef": SchemaSets._ref,
    "$dynamicRef": SchemaSets._ref,
}
