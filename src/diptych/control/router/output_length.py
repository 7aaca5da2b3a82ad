"""How long an answer will be, by class: a high quantile of what answers of that class were, learned as they end.

A class is a service class (interactive, standard, batch) and a power of two of the prompt's size, so that there are few
of them. Owns what was learned.
"""

from diptych.control.engine.kvcache.demand import MIN_HISTORY, OutputLengths


class OutputLengthClasses:
    """One history per class, and one of all for classes that are still young."""

    def __init__(self) -> None:
        self._all = OutputLengths()
        self._classes: dict[str, tuple[OutputLengths, int]] = {}

    def name(self, service_class: str, num_prompt_tokens: int) -> str:
        """The class of a request."""
        return f"{service_class}<{1 << num_prompt_tokens.bit_length()}"

    def expected(self, name: str, max_tokens: int) -> int:
        """Tokens that a request of the class will generate, at most ``max_tokens``."""
        lengths, count = self._classes.get(name, (self._all, 0))
        return (lengths if count >= MIN_HISTORY else self._all).expected_remaining(0, max_tokens)

    def observe(self, name: str, num_tokens: int) -> None:
        """A request of the class ended (not aborted) after this many tokens."""
        lengths, count = self._classes.get(name) or (OutputLengths(), 0)
        lengths.observe(num_tokens)
        self._all.observe(num_tokens)
        self._classes[name] = (lengths, count + 1)
