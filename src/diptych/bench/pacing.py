"""Waiting until a moment, to within tens of microseconds: an event loop's own timers tick in milliseconds.

On Linux a timerfd that the event loop watches, by ctypes: os.timerfd_create comes with Python 3.13. Elsewhere a thread
that sleeps.
"""

import asyncio
import ctypes
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from diptych.control.slo import NS_PER_S

_CLOCK_MONOTONIC, _FLAGS = 1, os.O_NONBLOCK | os.O_CLOEXEC


class _Timer(ctypes.Structure):
    """``struct itimerspec``: the interval (zero: once) and the time until the end, in seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerPacer:
    """A timer of the kernel that is a file: it becomes readable when it ends. For a single waiter at a time."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._timer = _Timer()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._loop.add_reader(self._file, self._on_end)

    async def sleep(self, ns: int) -> None:
        """Return ``ns`` nanoseconds from now."""
        self._timer.value_s, self._timer.value_ns = divmod(max(1, ns), NS_PER_S)
        self._waiter = self._loop.create_future()
        if self._libc.timerfd_settime(self._file, 0, ctypes.byref(self._timer), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
        await self._waiter

    def close(self) -> None:
        """Release the timer."""
        self._loop.remove_reader(self._file)
        os.close(self._file)

    def _on_end(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ThreadPacer:
    """A thread that sleeps."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    async def sleep(self, ns: int) -> None:
        """Return ``ns`` nanoseconds from now."""
        await asyncio.get_running_loop().run_in_executor(self._thread, time.sleep, ns / NS_PER_S)

    def close(self) -> None:
        """Release the timer."""
        self._thread.shutdown()


Pacer: TypeAlias = TimerPacer | ThreadPacer


def pacer() -> Pacer:
    """The most precise of this system."""
    return TimerPacer() if sys.platform == "linux" else ThreadPacer()
