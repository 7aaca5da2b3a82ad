"""Whether another process answers at an engine's address: its metrics say when it was started."""

import re

_STARTED = re.compile(rb"process_start_time_seconds(?:\{[^}\n]*\})?[ \t]+([0-9.eE+]{1,32})(?=[ \t\r\n]|$)")
CLOCK_S = 1.0  # by which the times of one process may differ: its host's clock is adjusted


class EngineProcess:
    """One engine's, through all its lives. Where several processes answer in turn, nothing is concluded any more."""

    def __init__(self) -> None:
        self._newest_s: float | None = None
        self._is_awaited = True  # the engine has come up, and has not said yet when it was started
        self._are_several = False

    def begin(self) -> None:
        """The engine has come up: whatever process it is now, it is known."""
        self._is_awaited = True

    def is_another(self, page: bytes) -> bool:
        """Whether this page of its metrics is of a later process than those since ``begin``."""
        started_s, before_s = started_of(page), self._newest_s
        if started_s is None or self._are_several:
            return False
        was_awaited, self._is_awaited = self._is_awaited, False
        if before_s is None or started_s > before_s + CLOCK_S:
            self._newest_s = started_s
            return before_s is not None and not was_awaited
        self._are_several = started_s < before_s - CLOCK_S
        return False


def started_of(page: bytes) -> float | None:
    """Seconds since the epoch; None where a page says nothing, or several things."""
    values: set[float] = set()
    for found in _STARTED.finditer(page):
        if found.start() == 0 or page[found.start() - 1 : found.start()] == b"\n":
            try:
                values.add(float(found[1]))
            except ValueError:
                return None
    return values.pop() if len(values) == 1 else None
