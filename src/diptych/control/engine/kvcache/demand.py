"""How much KV will be needed: expected output lengths and the future peak of what is admitted.

The peak is the exact maximum under the expected lengths, assuming that all grow one token per step (the rule that
LightLLM calls "future token peak"): sort by remaining length; just before the i-th longest ends, the i longest are
there and each has grown by that much.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

HISTORY = 256
MIN_HISTORY = 16
DEFAULT_TOKENS = 256
QUANTILE = 0.8


class OutputLengths:
    """Expected output length from the lengths that were seen: a high quantile of those longer than what is there."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, num_tokens: int) -> None:
        """A request ended by itself after this many tokens."""
        if len(self._recent) == HISTORY:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)

    def expected_remaining(self, num_generated: int, max_tokens: int) -> int:
        """Tokens still to come for a request with this many so far."""
        limit = max_tokens - num_generated
        if len(self._sorted) < MIN_HISTORY:
            return min(limit, max(DEFAULT_TOKENS - num_generated, 1))
        first_longer = bisect_right(self._sorted, num_generated)
        count = len(self._sorted) - first_longer
        if count == 0:  # longer than all that was seen: expect as much again
            return min(limit, max(num_generated, 1))
        quantile = self._sorted[first_longer + min(count - 1, int(QUANTILE * count))]
        return min(limit, quantile - num_generated)


def future_peak_blocks(demands: Iterable[tuple[int, int]], block_size: int) -> int:
    """Largest number of blocks ever held by requests given as (blocks held now, tokens still to come)."""
    held, peak = 0, 0
    for count, (blocks, remaining) in enumerate(sorted(demands, key=lambda demand: -demand[1]), start=1):
        held += blocks
        peak = max(peak, held + count * -(-remaining // block_size))
    return peak
