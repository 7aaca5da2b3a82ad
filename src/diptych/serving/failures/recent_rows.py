"""The newest inputs of a core, kept in memory so that they can be written down should the core fail.

Always on: a row is one append to a queue. Bounded in seconds, in rows, and in what rows refer to. Rows are those of a
recording (see recorder.py); they hold counts, ids and hashes, never tokens.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from diptych.control.cluster.cluster_events import Arrived, Reported
from diptych.control.events import KVEvents, KVSnapshot

Row = tuple[Any, ...]
Weigh = Callable[[Row], int]

LAST_NS = 30 * 10**9
MAX_ROWS = 8192
MAX_WEIGHT = 200_000  # block ids, hashes and events that the rows refer to: a few MB
ROW_WEIGHT = 8  # of a row that refers to nothing


class RecentRows:
    """The rows of the last LAST_NS. weigh: how much a row refers to, beside itself. clock: nanoseconds."""

    def __init__(self, weigh: Weigh, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.num_dropped = 0  # rows that are not kept any more
        self._weigh = weigh
        self._clock = clock
        self._rows: deque[tuple[int, int, Row]] = deque()
        self._weight = 0

    def write(self, row: Row) -> None:
        """Take a row, and let go of those that are too old or too many."""
        rows, now, weight = self._rows, self._clock(), ROW_WEIGHT + self._weigh(row)
        rows.append((now, weight, row))
        self._weight += weight
        while rows[0][0] < now - LAST_NS or self._weight > MAX_WEIGHT or len(rows) > MAX_ROWS:
            self._weight -= rows.popleft()[1]
            self.num_dropped += 1
            if not rows:
                break

    def rows(self) -> list[Row]:
        """What is kept, the oldest first."""
        return [row for _, _, row in self._rows]


def weigh_cluster_row(row: Row) -> int:
    """Of a RecordingClusterCore."""
    event, commands = row[1], row[2]
    weight = ROW_WEIGHT * len(commands)
    if isinstance(event, Reported):
        weight += ROW_WEIGHT * len(event.events)
        for happened in event.events:
            if isinstance(happened, KVEvents):
                weight += len(happened.stored) + len(happened.evicted)
            elif isinstance(happened, KVSnapshot):
                weight += len(happened.hashes)
    elif isinstance(event, Arrived):
        weight += len(event.submission.hashes)
    return weight


def weigh_engine_row(row: Row) -> int:
    """Of a RecordingEngineCore."""
    kind = row[0]
    if kind == "begin":
        output = row[2]
        if output is None:
            return 0
        return sum(len(chunk.block_ids) for chunk in output.prefills) + len(output.new_blocks) + len(output.swap_out)
    if kind in ("add", "reserve"):
        return len(row[2][3])
    if kind == "end":
        return len(row[4])
    if kind == "tier":
        return len(getattr(row[3], "added", ())) + len(getattr(row[3], "removed", ()))
    return 0


def weigh_planner_row(row: Row) -> int:
    """Of a RecordingPlannerCore."""
    return ROW_WEIGHT * len(row[2])
