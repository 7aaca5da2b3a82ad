"""The newest rows of a recording, kept in memory so that they can be written down should the core fail.

Always on, so that a row costs an append: what it refers to is only counted where it may be much (``write``), and times
are looked at when the rows are asked for. Bounded in rows, and in what they refer to. Rows hold counts, ids and hashes,
never tokens.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

Row = tuple[Any, ...]

LAST_NS = 30 * 10**9
MAX_ROWS = 8192
MAX_WEIGHT = 200_000  # block ids, hashes and events that the rows refer to: a few MB
ROW_WEIGHT = 8  # of a row that refers to nothing


class RecentRows:
    """The rows of the last LAST_NS before the newest one. weigh: how much a row refers to, beside itself. time_of: when
    it was written, in nanoseconds; None where a row does not say."""

    def __init__(self, weigh: Callable[[Row], int], time_of: Callable[[Row], int | None]) -> None:
        self._weigh = weigh
        self._time_of = time_of
        self._rows: deque[Row] = deque()
        self._num_gone = 0  # rows that are not kept any more
        self._heavy: deque[tuple[int, int]] = deque()  # number of each row that was weighed, and its weight
        self._weight = 0  # of these

    def write_light(self, row: Row) -> None:
        """Take a row that refers to nothing but itself."""
        rows = self._rows
        rows.append(row)
        if len(rows) > MAX_ROWS:
            self._let_go()

    def write(self, row: Row) -> None:
        """Take a row."""
        weight = self._weigh(row)
        self._rows.append(row)
        if weight:
            self._heavy.append((self._num_gone + len(self._rows), weight))
            self._weight += weight
        while len(self._rows) > MAX_ROWS or self._weight + ROW_WEIGHT * len(self._rows) > MAX_WEIGHT:
            self._let_go()

    def _let_go(self) -> None:
        self._rows.popleft()
        self._num_gone += 1
        if self._heavy and self._heavy[0][0] <= self._num_gone:
            self._weight -= self._heavy.popleft()[1]

    def kept(self) -> tuple[list[Row], int]:
        """The rows, the oldest first, and how many there were before them."""
        rows = list(self._rows)
        times = [self._time_of(row) for row in rows]
        known = [time_ns for time_ns in times if time_ns is not None]
        first = 0
        if known:
            oldest = known[-1] - LAST_NS
            late = [number for number, time_ns in enumerate(times) if time_ns is not None and time_ns < oldest]
            first = late[-1] + 1 if late else 0
        return rows[first:], self._num_gone + first
