"""When the core is to be told that time has passed. Owns the one timer of the loop for that."""

import asyncio
from collections.abc import Callable

from diptych.control.slo import NS_PER_S


class CoreTimer:
    """Calls ``on_time`` when the core said. clock: nanoseconds."""

    def __init__(self, clock: Callable[[], int], on_time: Callable[[], None]) -> None:
        self._clock = clock
        self._on_time = on_time
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns: int | None = None

    def set(self, due_ns: int | None) -> None:
        """The next time (None: there is none)."""
        if due_ns == self._due_ns:
            return
        self.cancel()
        self._due_ns = due_ns
        if due_ns is not None:
            delay_s = max(0.0, (due_ns - self._clock()) / NS_PER_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def cancel(self) -> None:
        """Call nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._due_ns = None

    def _fire(self) -> None:
        self._timer = self._due_ns = None
        self._on_time()
