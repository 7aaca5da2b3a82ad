"""Limits on prompts that are prefilled at the same time, enforced in every step.

A capped request is skipped and the loop goes on; a cap never ends it.
"""

from collections.abc import Iterable

from diptych.control.config import CapsConfig
from diptych.control.request import Request


class Caps:
    """Counts of one step: partial prefills after it, long prompts in it."""

    def __init__(self, config: CapsConfig) -> None:
        self._max_partial = config.max_partial_prefills
        self._max_long = config.max_long_partial_prefills
        self._threshold = config.long_prefill_threshold
        self._num_partial = 0
        self._num_long = 0

    def is_long(self, request: Request, uncached_tokens: int) -> bool:
        """Whether a prompt with this much left to compute counts as long; that of a stream never does."""
        return not request.is_stream and self._threshold > 0 and uncached_tokens > self._threshold

    def open(self, admitted: Iterable[Request]) -> None:
        """A new step; every admitted prompt is unfinished so far."""
        self._num_partial = self._num_long = 0
        for request in admitted:
            self._num_partial += 1
            self._num_long += request.is_long

    @property
    def long_is_full(self) -> bool:
        """Whether no further long prompt may start."""
        return bool(self._max_long) and self._num_long >= self._max_long

    def allows(self, *, is_long: bool, is_partial: bool) -> bool:
        """Whether a waiting prompt may start; ``is_partial``: it would not finish in this step."""
        if is_long and self.long_is_full:
            return False
        return not (is_partial and self._max_partial and self._num_partial >= self._max_partial)

    def started(self, *, is_long: bool) -> None:
        """A waiting prompt was admitted."""
        self._num_partial += 1
        self._num_long += is_long

    def finished_prefill(self) -> None:
        """An admitted prompt ends with this step (a long one still counts as long in it)."""
        self._num_partial -= 1
