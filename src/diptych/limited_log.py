"""Log lines about what clients, or a full disk, can repeat at will: at most one a minute of each kind."""

import logging
import time
from collections.abc import Callable
from typing import Any

INTERVAL_S = 60.0
MAX_KINDS = 256  # of one log; the one that was longest silent is forgotten


class LimitedLog:
    """A logger whose lines have a kind: of those that follow the first within a minute only the number is kept, and the
    next line of the kind says it. clock: seconds. For one thread, or for several that may lose a count."""

    def __init__(
        self, logger: logging.Logger, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}  # when a line was written, and how many were not since

    def error(self, kind: str, message: str, *arguments: object, error: BaseException | None = None) -> None:
        """A failure. error: whose traceback is part of the line."""
        self._log(logging.ERROR, kind, message, arguments, error)

    def warning(self, kind: str, message: str, *arguments: object) -> None:
        """What is not as it should be."""
        self._log(logging.WARNING, kind, message, arguments, None)

    def _log(
        self, level: int, kind: str, message: str, arguments: tuple[object, ...], error: BaseException | None
    ) -> None:
        now = self._clock()
        written_s, num_left_out = self._kinds.pop(kind, (None, 0))
        if written_s is not None and now - written_s < self._interval_s:
            self._kinds[kind] = (written_s, num_left_out + 1)
            return
        if len(self._kinds) >= MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[kind] = (now, 0)
        more: dict[str, Any] = {} if error is None else {"exc_info": error}
        if num_left_out:
            message, arguments = message + " (and %d more of this kind before)", (*arguments, num_left_out)
        self._logger.log(level, message, *arguments, **more)


def kind_of(error: BaseException) -> str:
    """One kind for all failures of a type at a place in the code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"{type(error).__qualname__} {place}"
