"""The contract between SchemaSets (schema_sets.py) and the modules that find the terms of single keywords for it."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from diptych.serving.answers.grammar.schema_document import Node, SchemaDocument, SchemaError
from diptych.serving.answers.grammar.value_terms import Blame, Conjunction, Term


class TermSets(Protocol):
    """The terms of the parts of one schema.

    reach: of the items of an array without a limit, how many can be the one that it has to contain. max_terms: of one
    part. cut: where some of the values that a part does not allow were left out; grows.
    """

    document: SchemaDocument
    reach: int
    max_terms: int
    cut: list[SchemaError]

    def skips(self, node: Node, keyword: str) -> bool:
        """Whether a keyword is left out."""
        ...

    def terms(self, part: Conjunction) -> list[Term]:
        """All values for which a part holds; those that are known to be empty are left out."""
        ...

    def known_terms(self, part: Conjunction) -> list[Term] | None:
        """The terms of a part; None where they are being found."""
        ...

    def is_empty(self, part: Conjunction) -> bool:
        """Whether no value is known to be possible."""
        ...

    def is_empty_term(self, term: Term) -> bool:
        """Whether no value of the term is known to be possible."""
        ...

    def under(self, blame: Blame | None) -> AbstractContextManager[None]:
        """Errors within are errors of this keyword, or of the one that it is itself under."""
        ...

    def blame(self, node: Node, keyword: str) -> Blame:
        """What is to be named where a keyword cannot be enforced."""
        ...

    def meet(self, terms: Iterable[Term], others: Sequence[Term], node: Node, keyword: str) -> list[Term]:
        """What is in both of two unions. Raises SchemaError where that is too much."""
        ...

    def holding(self, node: Node, terms: Sequence[Term]) -> list[Term]:
        """The values of some terms for which a part holds."""
        ...

    def enter(self, node: Node) -> None:
        """One part within another begins, at the same value. Raises SchemaError where there is no end to that."""
        ...

    def leave(self) -> None:
        """The inner part ends."""
        ...

    def of_values(self, values: Sequence[Any], node: Node) -> list[Term]:
        """The terms of some values."""
        ...

    def overlapping(self, parts: Sequence[Node]) -> list[list[int]]:
        """For each part, the numbers of those that may hold for the same value."""
        ...
