"""Whether the index of the caches is right: predicted against actual hits, over the last WINDOW prompts.

A router with a wrong index still routes, but badly, and nothing else shows it: the alarm goes to the log and to the
metrics.
"""

from collections import deque

WINDOW = 256  # admissions that are looked at
MIN_ADMISSIONS = 32  # fewer say nothing
ALARM_PERCENT = 20  # of the prompt tokens predicted wrongly: the alarm begins
CALM_PERCENT = 10  # the alarm ends


class HitRateMonitor:
    """Counts |cached as predicted - cached in fact| in tokens."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int, int]] = deque()  # (predicted, actual, prompt) tokens
        self._predicted = 0
        self._actual = 0
        self._wrong = 0
        self._prompt = 0
        self._is_alarmed = False

    @property
    def error(self) -> float:
        """Wrongly predicted share of the prompt tokens of the window (0: the picture was right)."""
        return self._wrong / max(1, self._prompt)

    @property
    def alarm(self) -> str:
        """What is wrong, as text; empty while nothing is. Begins above 20 % and ends below 10 %."""
        if not self._is_alarmed:
            return ""
        return (
            f"of the last {len(self._recent)} prompts ({self._prompt} tokens) {self._predicted} tokens were expected "
            f"in a prefix cache and {self._actual} were found; {100 * self._wrong // max(1, self._prompt)} % were "
            "predicted wrongly"
        )

    def observe(self, predicted: int, actual: int, num_prompt_tokens: int) -> None:
        """A worker reported what it found."""
        self._add((predicted, actual, num_prompt_tokens), 1)
        self._recent.append((predicted, actual, num_prompt_tokens))
        if len(self._recent) > WINDOW:
            self._add(self._recent.popleft(), -1)
        limit = CALM_PERCENT if self._is_alarmed else ALARM_PERCENT
        self._is_alarmed = len(self._recent) >= MIN_ADMISSIONS and 100 * self._wrong > limit * self._prompt

    def _add(self, admission: tuple[int, int, int], sign: int) -> None:
        predicted, actual, num_prompt_tokens = admission
        self._predicted += sign * predicted
        self._actual += sign * actual
        self._wrong += sign * abs(predicted - actual)
        self._prompt += sign * num_prompt_tokens
