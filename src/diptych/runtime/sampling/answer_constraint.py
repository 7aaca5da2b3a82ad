"""The constraint of an answer, as its request wants it: a grammar, a budget for reasoning, or both."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from diptych.control.constraint import TokenConstraint
from diptych.control.errors import ConstraintError
from diptych.control.request import SamplingParams

if TYPE_CHECKING:
    from diptych.runtime.sampling.grammar import Grammars


def constraint_of(sampling: SamplingParams, grammars: "Grammars | None") -> TokenConstraint | None:
    """None where every token may follow. grammars: None where none can be followed. Raises ConstraintError."""
    inner: TokenConstraint | None = None
    if sampling.grammar:
        if grammars is None:
            raise ConstraintError("grammars cannot be followed: llguidance is not installed, or there is no tokenizer")
        inner = grammars.constraint_of(sampling)
    if sampling.thinking_budget is None:
        return inner
    return ThinkingBudget(sampling.thinking_budget, sampling.thinking_begin, sampling.thinking_end, inner)


class ThinkingBudget:
    """A TokenConstraint that ends reasoning after ``budget`` tokens: then the tokens of its closing mark are forced.
    begin: the opening mark (empty: the prompt has opened it). An answer that does not begin with reasoning is left
    alone."""

    def __init__(
        self, budget: int, begin: Sequence[int], end: Sequence[int], inner: TokenConstraint | None = None
    ) -> None:
        self._limit = len(begin) + budget
        self._begin, self._end = list(begin), list(end)
        self._inner = inner
        self._tokens: list[int] = []
        self._ended_at: int | None = None  # tokens when the closing mark was complete

    def forced(self, limit: int) -> Sequence[int]:
        rest = self._end[len(self._tokens) - self._limit :] if len(self._tokens) >= self._limit else []
        if rest and self._is_thinking:
            return rest[:limit]
        return self._inner.forced(limit) if self._inner is not None else ()

    def allowed(self) -> bytes | None:
        return self._inner.allowed() if self._inner is not None else None

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Count the leading tokens that are allowed. Drafts may not run past the budget."""
        count = len(token_ids) if self._inner is None else self._inner.count_allowed(token_ids)
        return min(count, max(0, self._limit - len(self._tokens))) if self._is_thinking else count

    def accept(self, token_ids: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.accept(token_ids)
        for token in token_ids:
            self._tokens.append(token)
            if self._ended_at is None and self._tokens[-len(self._end) :] == self._end:
                self._ended_at = len(self._tokens)

    def rollback(self, num_tokens: int) -> None:
        if self._inner is not None:
            self._inner.rollback(num_tokens)
        if num_tokens:
            del self._tokens[-num_tokens:]
        if self._ended_at is not None and self._ended_at > len(self._tokens):
            self._ended_at = None

    @property
    def _is_thinking(self) -> bool:
        return self._ended_at is None and self._tokens[: len(self._begin)] == self._begin
