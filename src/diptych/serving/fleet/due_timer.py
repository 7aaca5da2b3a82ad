"""One timer of the running loop that follows a time that changes."""

import asyncio
from collections.abc import Callable

from diptych.control.slo import NS_PER_S


class DueTimer:
    """Calls ``on_due`` once at the time that was last set. clock: nanoseconds, of the times that are set."""

    def __init__(self, clock: Callable[[], int], on_due: Callable[[], None]) -> None:
        self._clock = clock
        self._on_due = on_due
        self._handle: asyncio.TimerHandle | None = None
        self._due_ns: int | None = None

    def set(self, due_ns: int | None) -> None:
        """Set when it is due (None: never), in place of what was set before."""
        if due_ns == self._due_ns:
            return
        self.cancel()
        self._due_ns = due_ns
        if due_ns is not None:
            delay_s = max(0.0, (due_ns - self._clock()) / NS_PER_S)
            self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def cancel(self) -> None:
        """Cancel what was set."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._due_ns = None

    def _fire(self) -> None:
        self._handle = self._due_ns = None
        self._on_due()
