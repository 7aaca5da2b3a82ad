"""How far expected lengths of answers are from real ones, over the last WINDOW answers: those that were learned, and
the static expectation beside them, which shows what learning is worth."""

from collections import deque

from diptych.control.length_predictor import DEFAULT_TOKENS

WINDOW = 256  # answers that are looked at


class LengthWatch:
    """Sums of |expected - actual| tokens."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int, int]] = deque()  # wrong tokens: learned, static; actual tokens
        self._learned = 0
        self._static = 0
        self._actual = 0

    @property
    def errors(self) -> dict[str, float]:
        """Mean absolute errors as shares of the mean actual length (0 before any answer). learned: of what was
        expected; static: of DEFAULT_TOKENS for every answer, or its limit, where that is less."""
        actual = max(1, self._actual)
        return {"learned": self._learned / actual, "static": self._static / actual}

    def observe(self, expected: int, max_tokens: int, actual: int) -> None:
        """Compare an answer that ended with the length that was expected on its arrival, all in tokens."""
        static = min(DEFAULT_TOKENS, max_tokens)
        self._add(abs(expected - actual), abs(static - actual), actual, 1)
        self._recent.append((abs(expected - actual), abs(static - actual), actual))
        if len(self._recent) > WINDOW:
            self._add(*self._recent.popleft(), -1)

    def _add(self, learned: int, static: int, actual: int, sign: int) -> None:
        self._learned += sign * learned
        self._static += sign * static
        self._actual += sign * actual
