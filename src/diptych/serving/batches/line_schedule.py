"""Which line runs next, how many run at once, and for how long they give way. Pure: no I/O; the time is an
argument (Unix seconds as a float, only compared).

Among batches the one whose window ends first goes first, then the older; inside a batch the lines go in the order of
their file, those that come back after a failed attempt when their time has come. Holds a bounded number of lines.

Lines run while nothing else does: they give way to other requests, where the workers know how to, and else start only
while there are none. Beside other requests run only as many as the operator allows, unless a batch would miss its
window: it runs all the same when, at the pace of its lines so far, what is left of it needs more than half of the time
that is left; a batch of which nothing is known yet, when half of its window is over.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from diptych.control.errors import ConfigError
from diptych.serving.batches.batch_records import Batch, End, LinePlace

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
        self.line_s: float | None = None  # seconds per line; None: not known yet
        self._gaps: deque[tuple[float, int]] = deque(maxlen=PACE_LINES)
        self._last: float | None = None

    def on_done(self, count: int, now: float) -> None:
        """Count ``count`` lines as done. (The pace is taken here and not where it is asked for, which is once for each
        batch whenever lines may start.)"""
        if self._last is not None and now - self._last <= LONGEST_GAP_S:
            self._gaps.append((max(0.0, now - self._last), count))
            num_lines = sum(entry[1] for entry in self._gaps)
            self.line_s = sum(entry[0] for entry in self._gaps) / num_lines if num_lines else None
        self._last = now

    def slack_s(self, num_left: int, created: float, expires: float, now: float) -> float:
        """Seconds for which a batch with ``num_left`` lines left can wait for a quiet time; negative: no longer."""
        line_s, time_left = self.line_s, expires - now
        if line_s is None:
            return time_left - (expires - created) / SPARE
        return time_left - num_left * line_s * SPARE


BUFFERED_LINES = 32  # of a batch, read ahead
BUFFERED_BYTES = 4 * 2**20


@dataclass(slots=True)
class WaitingLine:
    """A line with its text, and how often it was tried. best_effort_s: for how long others go before it, while it is
    run."""

    place: LinePlace
    text: bytes
    num_attempts: int = 0
    best_effort_s: float = 1.0


@dataclass(slots=True)
class RunningBatch:
    """A batch in progress. after: the last line that was read of its file; is_read: all were. held: lines that are run
    or whose rows are being written. num_done: lines whose rows are on disk. end: none of its lines is to run any more,
    and this is what becomes of it."""

    batch: Batch
    after: int = 0
    is_read: bool = False
    buffer: deque[WaitingLine] = field(default_factory=deque)
    later: list[tuple[float, int, WaitingLine]] = field(default_factory=list)  # heap of (when, line, line)
    held: dict[int, WaitingLine] = field(default_factory=dict)
    num_done: int = 0
    end: End | None = None

    @property
    def wants_lines(self) -> bool:
        """Whether more of its file is to be read before its next line is chosen."""
        return self.end is None and not self.is_read and not self.buffer

    @property
    def is_done(self) -> bool:
        """Whether no line of it runs or waits here, and none is to be read."""
        if self.held:
            return False
        return self.end is not None or (self.is_read and not self.buffer and not self.later)


class LineSchedule:
    """The batches in progress, by number."""

    def __init__(self) -> None:
        self.batches: dict[int, RunningBatch] = {}

    @property
    def num_held(self) -> int:
        """Lines that run or whose rows are being written."""
        return sum(len(running.held) for running in self.batches.values())

    @property
    def num_beside(self) -> int:
        """Lines that run beside other requests."""
        return sum(not line.best_effort_s for running in self.batches.values() for line in running.held.values())

    def add(self, batch: Batch) -> None:
        """A batch is in progress."""
        self.batches[batch.number] = RunningBatch(batch, num_done=batch.completed + batch.failed, end=batch.end)

    def in_order(self) -> list[RunningBatch]:
        """Batches whose lines may run, the most urgent first."""
        found = [running for running in self.batches.values() if running.end is None]
        return sorted(found, key=lambda running: (running.batch.expires_s, running.batch.number))

    def read(self, running: RunningBatch, lines: list[tuple[LinePlace, bytes]]) -> None:
        """Lines of its file were read; none: all were."""
        running.is_read = not lines
        for place, text in lines:
            running.after = place.number
            running.buffer.append(WaitingLine(place, text))

    def take(self, running: RunningBatch, now: float) -> WaitingLine | None:
        """The batch's next line, which is held from now on; None when none is here, or none of them may run yet. While
        many are to be tried again, no new ones begin."""
        if running.end is not None:
            return None
        if running.later and running.later[0][0] <= now:
            line = heappop(running.later)[2]
        elif running.buffer and len(running.later) < BUFFERED_LINES:
            line = running.buffer.popleft()
        else:
            return None
        line.num_attempts += 1
        running.held[line.place.number] = line
        return line

    def put_back(self, number: int, line: WaitingLine, when: float) -> None:
        """The line could not be run; it is tried again, not before ``when``."""
        running = self.batches[number]
        del running.held[line.place.number]
        if running.end is None:
            heappush(running.later, (when, line.place.number, line))

    def done(self, number: int, line: int) -> None:
        """The row of a line is on disk."""
        running = self.batches[number]
        del running.held[line]
        running.num_done += 1

    def next_retry(self) -> float | None:
        """When a line that failed may run again."""
        return min((running.later[0][0] for running in self.batches.values() if running.later), default=None)

    def over(self, now: float) -> list[RunningBatch]:
        """Batches whose window is over and that have not been told."""
        return [entry for entry in self.batches.values() if entry.end is None and entry.batch.expires_s <= now]

    def give_up(self, running: RunningBatch, end: End) -> None:
        """No more lines of this batch are to run; those that are held are for the caller to stop."""
        running.end = end
        running.buffer.clear()
        running.later.clear()
