"""JSON schemas as the compiler of grammars takes them: the same values, in the keywords that it enforces.

Annotations are dropped, keywords that refuse nothing too; ``not``, ``oneOf``, ``if`` and the like become unions of
what is left. What cannot be enforced is refused with its path, or left out and named, so that more than the schema's
values are allowed.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import Any

from diptych.control.errors import InvalidRequestError
from diptych.serving.answers.grammar import object_terms, text_patterns
from diptych.serving.answers.grammar.call_arguments import patterns_of
from diptych.serving.answers.grammar.schema_document import Node, SchemaDocument, SchemaError
from diptych.serving.answers.grammar.schema_sets import SchemaSets
from diptych.serving.answers.grammar.value_terms import (
    EVERYTHING,
    Arrays,
    Blame,
    Booleans,
    Conjunction,
    Nulls,
    Numbers,
    Objects,
    Term,
    Texts,
    holds,
    is_false,
)

MAX_PARTS = 20_000  # of what is written
MAX_LEFT_OUT = 100  # keywords, before a schema is left out as a whole
MAX_COUNTED = 64  # objects that differ in which of their properties there are
_LONG_TEXT = 32  # characters that a text with a pattern and a greatest length can have in any case
_NOT_IN_CALLS = "it cannot be enforced in calls as this model writes them"
_INLINE_DEPTH = 24  # of parts that stand within others; deeper ones are references
_LARGEST = Fraction(10**18)  # that an interval can end with
_NEXT = Fraction(1, 10**9)  # as a share of a number: of the same size as what floating point keeps of it
_OF_TEXTS = frozenset(("minLength", "maxLength"))
_NOT_ASSERTED = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "example")
) | {"$schema", "$id", "$defs", "definitions", "contentEncoding", "contentMediaType"}

Check = Callable[[Any], str]  # why a schema does not compile; "" when it does


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A schema that says the same. left_out: paths of keywords that it does not say."""

    schema: dict[str, Any] | bool
    left_out: tuple[tuple[str, ...], ...] = ()


class SchemaRefusedError(Exception):
    """A schema that cannot be enforced. path: of the keyword. can_be_weakened: without it, the rest can be."""

    def __init__(self, path: tuple[str, ...], why: str, *, can_be_weakened: bool = False) -> None:
        super().__init__(why)
        self.path = path
        self.why = why
        self.can_be_weakened = can_be_weakened


def rewrite(schema: Any, *, is_strict: bool = True, check: Check | None = None, form: str = "json") -> Rewritten:
    """A schema in other words. is_strict: nothing is left out. check: each regular expression is tried, too. form: of
    the values, "json", or "tags" or "python" with properties by name only (call_arguments.py). Raises
    SchemaRefusedError."""
    skipped: dict[tuple[tuple[str, ...], str], None] = {}
    while True:
        try:
            document = SchemaDocument(schema, frozenset(path for path, keyword in skipped if not keyword))
            sets = SchemaSets(document, frozenset(skipped))
            writer = _SchemaWriter(sets, check, form)
            written = writer.whole(document.root, stops=is_strict)
            errors = writer.errors or (sets.cut if written is False else [])
        except SchemaError as error:
            errors = [error]
        except RecursionError:
            raise SchemaRefusedError((), "it is nested too deeply") from None
        if not errors:
            break
        if is_strict:
            path = (*errors[0].node.path, *((errors[0].keyword,) if errors[0].keyword else ()))
            raise SchemaRefusedError(path, errors[0].why, can_be_weakened=True)
        places = dict.fromkeys((error.node.path, error.keyword) for error in errors)
        if places.keys() & skipped.keys() or len(skipped) >= MAX_LEFT_OUT:
            return Rewritten(True, ((),))
        skipped |= places
    if written is False:
        raise SchemaRefusedError((), "it allows no value")
    return Rewritten(written, tuple((*path, keyword) if keyword else path for path, keyword in skipped))


class _PartPlace:
    """Where a part will stand."""

    __slots__ = ("part",)

    def __init__(self, part: Conjunction) -> None:
        self.part = part


class _SchemaWriter:
    """Writes each part once, and then all of them as one schema."""

    def __init__(self, sets: SchemaSets, check: Check | None, form: str) -> None:
        self._sets = sets
        self._form = form
        self.errors: list[SchemaError] = []
        self._roots: set[Conjunction] = set()  # the whole, and what it refers to
        self._values: set[Conjunction] = set()  # of the properties of the whole
        self._form_of_objects = self._form_of_values = form  # of the part that is written
        self._check = check
        self._checked: dict[str, str] = {}
        self._bodies: dict[Conjunction, Any] = {}
        self._pending: list[Conjunction] = []
        self._uses: Counter[Conjunction] = Counter()
        self._names: dict[Conjunction, str] = {}

    def whole(self, root: Node, *, stops: bool = True) -> dict[str, Any] | bool:
        """The schema with all parts that it refers to. stops: at the first error, which is raised; others are kept in
        ``errors``."""
        part = holds(root)
        self._roots.add(part)
        first = self._place(part)
        if first is False:
            return False
        while self._pending:
            inner = self._pending.pop()
            is_root = inner in self._roots
            if self._form == "tags":  # what is in a value is JSON
                self._form_of_objects = "tags" if is_root else "json"
                self._form_of_values = "tags" if inner in self._values else "json"
            try:
                body = self._bodies[inner] = self._body(inner)
            except SchemaError as error:
                if stops:
                    raise
                self.errors.append(error)
                body = self._bodies[inner] = True
            if is_root and isinstance(body, _PartPlace):
                self._roots.add(body.part)
            if len(self._bodies) > MAX_PARTS:
                raise SchemaError(root, "", f"it has more than {MAX_PARTS} parts")
        written: dict[str, Any] | bool = self._assembled(first, 0)
        defined: dict[str, Any] = {}
        while len(defined) < len(self._names):
            for inner, name in list(self._names.items()):
                if name not in defined:
                    defined[name] = self._assembled(self._bodies[inner], 1)
        if not defined or isinstance(written, bool):
            return written
        return {**written, "$defs": defined}

    def _place(self, part: Conjunction) -> Any:
        """Where a part stands within another; false where it allows nothing."""
        if not part:
            return True
        if self._sets.is_empty(part):
            return False
        self._uses[part] += 1
        if part not in self._bodies:
            self._bodies[part] = None
            self._pending.append(part)
        return _PartPlace(part)

    def _assembled(self, value: Any, depth: int) -> Any:
        if isinstance(value, _PartPlace):
            body = self._bodies[value.part]
            is_small = not isinstance(body, Mapping) or not any(map(_is_deep, body.values()))
            if depth == 0 or is_small or (self._uses[value.part] == 1 and depth < _INLINE_DEPTH):
                if depth:
                    return self._assembled(body, depth + 1)
                self._uses[value.part] += 1  # the whole is not written twice
                name = self._name(value.part) if self._uses[value.part] > 2 else ""
                return {"$ref": f"#/$defs/{name}"} if name else self._assembled(body, 1)
            return {"$ref": f"#/$defs/{self._name(value.part)}"}
        if isinstance(value, dict):
            return {key: self._assembled(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, tuple):  # a list of parts; lists are constants
            return [self._assembled(inner, depth + 1) for inner in value]
        return value

    def _name(self, part: Conjunction) -> str:
        return self._names.setdefault(part, f"p{len(self._names)}")

    def _body(self, part: Conjunction) -> Any:
        if len(part) == 1 and part[0].holds and (direct := self._direct(part[0].node)) is not None:
            return direct
        terms = self._sets.terms(part)
        if len(terms) == len(EVERYTHING) and set(map(_plain, terms)) == set(map(_plain, EVERYTHING)):
            return True
        return _union([body for term in terms for body in self._bodies_of(term)])

    def _direct(self, node: Node) -> Any:
        """A part without anything to be rewritten, but for what is in it."""
        keywords = node.keywords
        if isinstance(keywords, bool) or not isinstance(keywords.get("type", ""), str):
            return None
        if any(self._sets.skips(node, keyword) for keyword in keywords):
            return None
        own = keywords.keys() - _NOT_ASSERTED
        if own == {"$ref"}:
            return self._place(holds(self._sets.document.target(node)))
        kind = keywords.get("type")
        if own == {"type"} and kind in ("string", "number", "integer", "boolean", "null", "array", "object"):
            return {"type": kind}
        if kind == "string" and own <= _OF_TEXTS | {"type"} and _are_counts(keywords, own - {"type"}):
            return {"type": "string", **{key: keywords[key] for key in keywords if key in _OF_TEXTS}}
        return None

    def _bodies_of(self, term: Term) -> Iterator[Any]:
        match term:
            case Nulls():
                yield {"type": "null"}
            case Booleans():
                yield {"type": "boolean"} if len(term.values) == 2 else {"enum": sorted(term.values)}
            case Numbers():
                yield self._numbers(term)
            case Texts():
                yield from self._texts(term)
            case Arrays():
                for single in self._sets.listed(term) if term.unique is not None else (term,):
                    if isinstance(single, Arrays):
                        yield self._array(single)
            case Objects():
                yield from self._objects(term)

    def _numbers(self, term: Numbers) -> Any:
        if term.values is not None:
            return {"enum": list(term.values)}
        found: dict[str, Any] = {"type": "integer" if term.is_integer else "number"}
        term = term if term.is_integer else _without_ends(term)
        if (term.low is not None and term.low > _LARGEST) or (term.high is not None and term.high < -_LARGEST):
            raise SchemaError(self._sets.document.root, "", "numbers beyond 2**63 cannot be enforced")
        if term.low is not None and term.low < -_LARGEST:
            term = replace(term, low=-_LARGEST, is_low_open=False)
        if term.high is not None and term.high > _LARGEST:
            term = replace(term, high=_LARGEST, is_high_open=False)
        if term.low is not None:
            found["exclusiveMinimum" if term.is_low_open else "minimum"] = _number(term.low)
        if term.high is not None:
            found["exclusiveMaximum" if term.is_high_open else "maximum"] = _number(term.high)
        if term.multiple is not None:
            found["multipleOf"] = _number(term.multiple)
        return found

    def _texts(self, term: Texts) -> Iterator[Any]:
        form, patterns = self._form_of_values, list[str]()
        for pattern in term.patterns:
            try:
                patterns += text_patterns.plain(pattern.text, holds=pattern.holds)
            except ValueError as error:
                raise SchemaError(*pattern.blame, str(error)) from None
            for text in patterns:
                self._try({"type": "string", "pattern": text}, pattern.blame)
            if form == "python" or (form == "tags" and not _fits_a_tag(patterns)):
                raise SchemaError(*pattern.blame, _NOT_IN_CALLS)
        if term.excluded and form == "json":
            patterns.append(text_patterns.none_of(term.excluded))
        if term.values is not None and not patterns and not term.formats:
            yield {"enum": list(term.values)}
            return
        found: dict[str, Any] = {"type": "string"}
        if term.values is not None:
            found["enum"] = list(term.values)
        if term.low:
            found["minLength"] = term.low
        if term.high is not None:
            found["maxLength"] = term.high
        more = [{"type": "string", "pattern": text} for text in patterns[1:]]
        more += [{"type": "string", "format": name} for name in term.formats[1:]]
        if patterns:
            found["pattern"] = patterns[0]
        if term.formats:
            found["format"] = term.formats[0]
        found = {**found, "allOf": tuple(more)} if more else found
        if term.patterns and self._check is not None and (len(found) > 2 or more):
            self._simplify(found, [pattern.blame for pattern in term.patterns])
        yield found

    def _simplify(self, found: dict[str, Any], blames: list[Blame]) -> None:
        """Where texts are too hard for the compiler, a format (an annotation) gives way, and then long texts do."""
        if not self._try(found, None):
            return
        found.pop("format", None)
        length = found.get("maxLength", 0)
        while self._try(found, None) and length // 2 >= max(_LONG_TEXT, found.get("minLength", 0)):
            length = found["maxLength"] = length // 2
        self._try(found, blames[0])

    def _try(self, schema: dict[str, Any], blame: Blame | None) -> str:
        """Why something does not compile by itself. Raises SchemaError where there is something to blame."""
        if self._check is None:
            return ""
        key = json.dumps(schema)
        if key not in self._checked:
            self._checked[key] = self._check(schema)
        error = self._checked[key]
        if error and blame is not None and "nsatisfiable" not in error:
            raise SchemaError(*blame, "the regular expression cannot be enforced")
        return error

    def _array(self, term: Arrays) -> Any:
        found: dict[str, Any] = {"type": "array"}
        prefix = term.prefix if term.high is None else term.prefix[: term.high]
        while prefix and prefix[-1] == term.rest:
            prefix = prefix[:-1]
        if prefix and self._form == "python" and term.placed is not None:
            raise SchemaError(*term.placed, _NOT_IN_CALLS)
        if prefix:
            found["prefixItems"] = tuple(self._place(item) for item in prefix)
        if term.rest:
            found["items"] = self._place(term.rest)
        if term.low:
            found["minItems"] = term.low
        if term.high is not None:
            found["maxItems"] = term.high
        return found

    def _objects(self, term: Objects) -> Iterator[Any]:
        optional = [name for name in term.properties if name not in term.required]
        optional = [name for name in optional if not self._sets.is_empty(term.properties[name])]
        low = max(0, term.low - len(term.required))
        high = None if term.high is None else term.high - len(term.required)
        if term.is_closed and high is not None and high >= len(optional):
            high = None
        if not low and high is None:
            yield self._object(replace(term, low=0, high=None))
        elif not optional:
            yield self._object(term)
        else:
            yield from self._counted(term, optional, low, high)

    def _counted(self, term: Objects, optional: list[str], low: int, high: int | None) -> Iterator[Any]:
        """Objects by which of their optional properties they have: the compiler counts only those without names."""
        nothing = holds(self._sets.document.nothing)
        most = len(optional) if high is None else min(high, len(optional))
        count = 0
        for size in range(most + 1):
            is_enough = high is None and size == low
            if high is None and size > low:
                break
            for chosen in combinations(optional, size):
                count += 1
                if count > MAX_COUNTED:
                    assert term.counted is not None
                    raise SchemaError(*term.counted, "it cannot be enforced with so many optional properties")
                required = (*term.required, *chosen)
                if is_enough:
                    yield self._object(replace(term, required=required, low=0, high=None))
                    continue
                absent = {name: nothing for name in optional if name not in chosen}
                if term.is_closed and size < low:
                    continue
                yield self._object(replace(term, properties={**term.properties, **absent}, required=required))

    def _object(self, term: Objects) -> Any:
        found: dict[str, Any] = {"type": "object"}
        if self._form_of_objects != "json":
            if term.counted is not None and (term.low > len(term.required) or term.high is not None):
                raise SchemaError(*term.counted, _NOT_IN_CALLS)
            if term.named is not None and not (term.properties or term.required or is_false(term.others)):
                raise SchemaError(*term.named, _NOT_IN_CALLS)
        if self._form_of_objects != "json" and (term.properties or term.required):
            names = {**term.properties, **dict.fromkeys(term.required)}  # others do not come
            properties = {name: object_terms.value_of(self._sets, term, name) for name in names}
            term = replace(term, properties=properties, patterns=(), others=holds(self._sets.document.nothing))
        if term.properties:
            if self._form_of_objects == "tags":
                self._values.update(term.properties.values())
            found["properties"] = {name: self._place(value) for name, value in term.properties.items()}
        if term.patterns:
            merged: dict[str, Any] = {}
            for pattern in term.patterns:
                [text, *more] = self._name_patterns(pattern.text, pattern.blame)
                if more:
                    raise SchemaError(*pattern.blame, f"the pattern {pattern.text[:60]!r} cannot be enforced")
                merged[text] = self._place(pattern.value)
            found["patternProperties"] = merged
            self._try_patterns(merged, term)
        if is_false(term.others):
            found["additionalProperties"] = False
        elif term.others:
            found["additionalProperties"] = self._place(term.others)
        if term.required:
            found["required"] = list(term.required)
        if term.low > len(term.required):
            found["minProperties"] = term.low
        if term.high is not None:
            found["maxProperties"] = term.high
        return found

    def _name_patterns(self, pattern: str, blame: Blame) -> list[str]:
        try:
            return text_patterns.plain(pattern)
        except ValueError as error:
            raise SchemaError(*blame, str(error)) from None

    def _try_patterns(self, patterns: Mapping[str, Any], term: Objects) -> None:
        blame = term.patterns[0].blame
        error = self._try({"type": "object", "patternProperties": dict.fromkeys(patterns, True)}, None)
        if error:
            raise SchemaError(*blame, "names that match several of its patterns cannot be enforced")


def _union(bodies: list[Any]) -> Any:
    """One of several; constants are one enumeration."""
    constants: list[Any] = []
    others: list[Any] = []
    for body in bodies:
        if isinstance(body, dict) and body.keys() == {"enum"}:
            constants += body["enum"]
        elif body not in others:
            others.append(body)
    if constants:
        others.append({"enum": constants})
    if not others:
        return False
    return others[0] if len(others) == 1 else {"anyOf": tuple(others)}


def _is_deep(value: Any) -> bool:
    return isinstance(value, _PartPlace | tuple) or (isinstance(value, dict) and bool(value))


def _plain(term: Term) -> str:
    """A term without what keywords it was made of."""
    return repr(replace(term, seen=None, seen_patterns=frozenset()) if isinstance(term, Objects) else term)


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


def _fits_a_tag(patterns: list[str]) -> bool:
    try:
        return len(patterns) == 1 and bool(patterns_of({"pattern": patterns[0]}, ""))
    except InvalidRequestError:
        return False


def _without_ends(term: Numbers) -> Numbers:
    """An interval between an integer that is not in it and another number of the same integer part begins just beside
    the integer: the compiler would allow it."""
    low, high = term.low, term.high
    if low is None or high is None or high - low >= 1:
        return term
    if term.is_low_open and low.denominator == 1:
        term = replace(term, low=low + _NEXT * max(Fraction(1), abs(low)), is_low_open=False)
    if term.is_high_open and high.denominator == 1:
        term = replace(term, high=high - _NEXT * max(Fraction(1), abs(high)), is_high_open=False)
    return term


def _are_counts(keywords: Mapping[str, Any], names: Any) -> bool:
    return all(type(keywords[name]) is int and keywords[name] >= 0 for name in names) and keywords.get(
        "minLength", 0
    ) <= keywords.get("maxLength", 1 << 62)
