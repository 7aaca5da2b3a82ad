"""How many lines may run at once, and for how long they give way. Pure: it is told the time and what else runs.

Lines run while nothing else does: they give way to other requests, where the workers know how to, and else start only
while there are none. Beside other requests run only as many as the operator allows, unless a batch would miss its
window: it runs all the same when, at the pace of its lines so far, what is left of it needs more than half of the time
that is left; a batch of which nothing is known yet, when half of its window is over.
"""

from collections import deque
from dataclasses import dataclass

from diptych.control.errors import ConfigError

PACE_LINES = 256  # lines over which the pace is taken
SPARE = 2.0  # a batch is urgent when it needs this share less of the time that is left
LONGEST_GAP_S = 60.0  # between two lines: longer ones were pauses


@dataclass(frozen=True, slots=True)
class LineLimits:
    """at_once: lines that run at once while nothing else does. beside: beside other requests, when there is no
    hurry."""

    at_once: int = 32
    beside: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (("at_once", 1, 4096), ("beside", 0, self.at_once)):
            value = getattr(self, name)
            if not least <= value <= most:
                param = "batch_lines" if name == "at_once" else "batch_lines_beside"
                raise ConfigError(f"{param} is {value}; it must be between {least} and {most}", param=param)


class Pace:
    """The pace at which lines get done while they run, over all batches."""

    def __init__(self) -> None:
        self._gaps: deque[tuple[float, int]] = deque(maxlen=PACE_LINES)
        self._last: float | None = None

    def on_done(self, count: int, now: float) -> None:
        """Count ``count`` lines as done."""
        if self._last is not None and now - self._last <= LONGEST_GAP_S:
            self._gaps.append((max(0.0, now - self._last), count))
        self._last = now

    @property
    def line_s(self) -> float | None:
        """Seconds per line; None: not known yet."""
        count = sum(entry[1] for entry in self._gaps)
        return sum(entry[0] for entry in self._gaps) / count if count else None

    def slack_s(self, num_left: int, created: float, expires: float, now: float) -> float:
        """Seconds for which a batch with ``num_left`` lines left can wait for a quiet time; negative: no longer."""
        line_s, time_left = self.line_s, expires - now
        if line_s is None:
            return time_left - (expires - created) / SPARE
        return time_left - num_left * line_s * SPARE
