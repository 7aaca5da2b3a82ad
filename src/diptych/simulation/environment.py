"""Virtual time: a heap of (time, priority, number, action) and nothing else.

Times are integer nanoseconds. Actions of the same nanosecond run by priority, then in the order in which they were
scheduled, so that a run has exactly one order.
"""

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]

MESSAGE, STEP_END = 0, 1  # priorities: a message that has arrived is read before a step ends; + the worker's number


class Environment:
    """The clock and what is to happen."""

    def __init__(self) -> None:
        self.now = 0
        self.num_events = 0
        self._heap: list[tuple[int, int, int, Action]] = []
        self._num_scheduled = 0
        self._cancelled: set[int] = set()
        self.is_stopped = False

    def at(self, time_ns: int, priority: int, action: Action) -> int:
        """Run ``action`` at ``time_ns`` (not before now). Returns a number for ``cancel``."""
        assert time_ns >= self.now, f"scheduled at {time_ns}, now is {self.now}"
        self._num_scheduled += 1
        heappush(self._heap, (time_ns, priority, self._num_scheduled, action))
        return self._num_scheduled

    def cancel(self, number: int) -> None:
        """Forget a scheduled action that has not run."""
        self._cancelled.add(number)

    def stop(self) -> None:
        """Let nothing more happen after the present action."""
        self.is_stopped = True

    def run(self, until_ns: int | None = None) -> None:
        """Run until nothing is left to happen, or ``stop``. Raises AssertionError when something is to happen after
        ``until_ns``."""
        heap, cancelled = self._heap, self._cancelled
        while heap and not self.is_stopped:
            time_ns, _, number, action = heappop(heap)
            assert until_ns is None or time_ns <= until_ns, f"still something to happen at {time_ns}"
            if cancelled and number in cancelled:
                cancelled.remove(number)
                continue
            self.now = time_ns
            self.num_events += 1
            try:
                action()
            except Exception as error:
                error.add_note(f"in the simulation, at {time_ns} ns")
                raise
