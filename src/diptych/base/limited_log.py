"""Log lines about what clients, or a full disk, can repeat at will: at most one a minute of each kind."""

import logging
import time
from collections.abc import Callable
from typing import Any

INTERVAL_S = 60.0
MAX_KINDS = 256  # of one log; the one that was written longest ago is forgotten

Clock = Callable[[], float]


class Pacer:
    """Says which lines are written. clock: seconds. For one thread, or for several that may lose a count."""

    def __init__(self, interval_s: float = INTERVAL_S, clock: Clock = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}  # when a line was written, and how many were not since

    def take(self, kind: str) -> int | None:
        """A line of this kind is to be written: how many were left out since the last one; None: leave it out."""
        now = self._clock()
        written_s, num_left_out = self._kinds.get(kind, (now - self._interval_s, 0))
        if now - written_s < self._interval_s:
            self._kinds[kind] = (written_s, num_left_out + 1)
            return None
        self._kinds.pop(kind, None)
        if len(self._kinds) >= MAX_KINDS:
            self._kinds.pop(next(iter(self._kinds)), None)
        self._kinds[kind] = (now, 0)
        return num_left_out


class LimitedLog:
    """A logger whose lines have a kind: of those that follow the first within a minute only the number is kept, and the
    next line of the kind says it. Kinds are few: words of the code, never of clients."""

    def __init__(self, logger: logging.Logger, interval_s: float = INTERVAL_S, clock: Clock = time.monotonic) -> None:
        self._logger = logger
        self._pacer = Pacer(interval_s, clock)

    def error(self, kind: str, message: str, *arguments: object, error: BaseException | None = None) -> None:
        """A failure. error: whose traceback is part of the line."""
        self._log(logging.ERROR, kind, message, arguments, error)

    def warning(self, kind: str, message: str, *arguments: object) -> None:
        """What is not as it should be."""
        self._log(logging.WARNING, kind, message, arguments, None)

    def _log(
        self, level: int, kind: str, message: str, arguments: tuple[object, ...], error: BaseException | None
    ) -> None:
        num_left_out = self._pacer.take(kind)
        if num_left_out is None:
            return
        if num_left_out:
            message, arguments = f"{message} (and %d more of this kind before)", (*arguments, num_left_out)
        more: dict[str, Any] = {} if error is None else {"exc_info": error}
        self._logger.log(level, message, *arguments, **more)


class LimitedErrors(logging.Filter):
    """A filter for the logger of a library: it passes errors at most once a minute, by their words and the place of the
    exception."""

    def __init__(self, interval_s: float = INTERVAL_S, clock: Clock = time.monotonic) -> None:
        super().__init__()
        self._pacer = Pacer(interval_s, clock)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        if record.levelno < logging.ERROR:
            return True
        error = record.exc_info[1] if record.exc_info else None
        kind = str(record.msg) if error is None else f"{record.msg} {kind_of(error)}"
        num_left_out = self._pacer.take(kind)
        if num_left_out:
            record.msg = f"{str(record.msg).rstrip()} (and {num_left_out} more of this kind before)"
        return num_left_out is not None


def kind_of(error: BaseException) -> str:
    """One kind for all failures of a type at a place in the code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"{type(error).__qualname__} {place}"
