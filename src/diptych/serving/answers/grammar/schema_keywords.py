"""The keywords of one part of a schema, read: values of the right kind, and parts of the schema as nodes.

Raises SchemaError for what is malformed. Keywords that are left out are not there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from diptych.serving.answers.grammar.schema_document import Node, SchemaError
from diptych.serving.answers.grammar.term_sets import TermSets
from diptych.serving.answers.grammar.value_terms import TYPES, Numbers, common, exactly

MAX_COUNT = 2**31 - 1
_GROUPS: Mapping[str, str] = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(
        ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        "object",
    ),
}


class Keywords:
    """The keywords of ``node``, which is neither true nor false. found: those that are not left out."""

    def __init__(self, node: Node, sets: TermSets) -> None:
        assert isinstance(node.keywords, Mapping)
        self.node = node
        self._sets = sets
        self.found: dict[str, Any] = {key: value for key, value in node.keywords.items() if not sets.skips(node, key)}

    def present(self) -> Iterator[str]:
        """The keywords in their order; those that limit values of one type as one group. Types come first."""
        groups = dict.fromkeys(_GROUPS.get(keyword, keyword) for keyword in self.found)
        yield from sorted(groups, key=lambda group: group != "type")

    def first_of(self, group: str) -> str:
        """The first keyword of a group."""
        return next((keyword for keyword in self.found if _GROUPS.get(keyword) == group), group)

    def error(self, keyword: str, why: str) -> SchemaError:
        """What is to be raised for a keyword."""
        return SchemaError(*self._sets.blame(self.node, keyword), why)

    def _wrong(self, keyword: str, value: Any, wanted: str) -> SchemaError:
        return self.error(keyword, f"it is {value!r}"[:60] + f", and must be {wanted}")

    def types(self) -> Sequence[str]:
        """The types of "type"."""
        given = self.found["type"]
        kinds = given if isinstance(given, list) else [given]
        for kind in kinds:
            if not isinstance(kind, str) or kind not in TYPES:
                raise self._wrong("type", kind, f"one of {', '.join(TYPES)}")
        return kinds

    def values(self, keyword: str) -> Sequence[Any]:
        """A list of any values."""
        given = self.found.get(keyword, [])
        if not isinstance(given, list):
            raise self._wrong(keyword, given, "a list")
        return given

    def part(self, keyword: str) -> Node:
        """The schema at a keyword; without one, what allows anything."""
        if keyword not in self.found:
            return self._sets.document.anything
        with self._sets.under(None):
            return self._sets.document.child(self.node, keyword)

    def nodes(self, keyword: str) -> Sequence[Node]:
        """A list of schemas."""
        given = self.values(keyword)
        if keyword in self.found and not given and keyword != "prefixItems":
            raise self._wrong(keyword, given, "a list of at least one schema")
        return [self._sets.document.child(self.node, keyword, str(number)) for number in range(len(given))]

    def table(self, keyword: str) -> Mapping[str, Node]:
        """Schemas by name."""
        given = self.found.get(keyword, {})
        if not isinstance(given, Mapping):
            raise self._wrong(keyword, given, "an object")
        return {name: self._sets.document.child(self.node, keyword, name) for name in given}

    def names(self, keyword: str) -> Sequence[str]:
        """A list of texts."""
        given = self.values(keyword)
        if not all(isinstance(name, str) for name in given):
            raise self._wrong(keyword, given, "a list of texts")
        return given

    def name_lists(self, keyword: str) -> Mapping[str, Sequence[str]]:
        """Lists of texts by name."""
        given = self.found[keyword]
        if not isinstance(given, Mapping) or not all(
            isinstance(names, list) and all(isinstance(name, str) for name in names) for names in given.values()
        ):
            raise self._wrong(keyword, given, "an object of lists of texts")
        return given

    def text(self, keyword: str) -> str | None:
        """A text, or none."""
        given = self.found.get(keyword)
        if given is not None and not isinstance(given, str):
            raise self._wrong(keyword, given, "a text")
        return given

    def flag(self, keyword: str) -> bool:
        """true or false."""
        given = self.found.get(keyword, False)
        if not isinstance(given, bool):
            raise self._wrong(keyword, given, "true or false")
        return given

    def range(self, low_name: str, high_name: str, default: int = 0) -> tuple[int, int | None]:
        """Two counts; None: without an end."""
        low, high = self._count(low_name, default), self._count(high_name, None)
        assert low is not None
        return low, high

    def _count(self, keyword: str, default: int | None) -> int | None:
        given = self.found.get(keyword, default)
        if given is None:
            return None
        if isinstance(given, float) and given.is_integer():
            given = int(given)
        if type(given) is not int or not 0 <= given <= MAX_COUNT:
            raise self._wrong(keyword, given, f"an integer in [0, {MAX_COUNT}]")
        return given

    def numbers(self) -> Numbers:
        """What the keywords for numbers allow."""
        low, high, above, below = (
            self._number(name) for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        )
        multiple = self._number("multipleOf")
        if multiple == 0:
            raise self._wrong("multipleOf", 0, "greater than 0")
        found: Any = Numbers(low, high, multiple=abs(multiple) if multiple is not None else None)
        if above is not None or below is not None:
            found = common(found, Numbers(above, below, above is not None, below is not None))
        if found is None or (low is not None and high is not None and low > high):
            return replace(Numbers(), values=())
        assert isinstance(found, Numbers)
        return found

    def _number(self, keyword: str) -> Fraction | None:
        given = self.found.get(keyword)
        if given is None:
            return None
        if type(given) not in (int, float):
            raise self._wrong(keyword, given, "a number")
        return exactly(given)

    def target(self) -> Node:
        """What the reference of the part leads to."""
        keyword = next(name for name in ("$ref", "$dynamicRef", "$recursiveRef") if name in self.found)
        try:
            return self._sets.document.target(self.node, keyword)
        except SchemaError as error:
            raise self.error(keyword, error.why) from None
