"""Memory that the allocator of the C library keeps after much of it was freed goes back to the system.

A text of ten megabytes takes a gigabyte to encode, and crowds of half-sent bodies take a hundred megabytes. Who has
freed so much says so (``note``), or is about to; a moment later, when what held it is gone, the allocator is asked in a
thread: the call looks at every free piece, which takes milliseconds.
"""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import Executor

MUCH_BYTES = 2**18
WAIT_S = 1.0  # from a note to the call: the rest of a request, whose input was read in a thread, ends within it


def give_memory_back() -> None:
    """Return what the allocator of the C library keeps for this process to the system. Does nothing where the library
    has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def forget_frames(error: BaseException) -> None:
    """Let go of what an error that is answered has seen. Its traceback holds the frames of a whole request, with a body
    of megabytes in their variables, and one of them often holds the error, through a future or a task: nothing but a
    search for garbage, which may not come for minutes, would free them. What it was raised from goes, too."""
    cause: BaseException | None = error
    while cause is not None:
        following = cause.__cause__ or cause.__context__
        cause.__traceback__ = cause.__cause__ = cause.__context__ = None
        cause = following


class FreedMemory:
    """Memory that one event loop returns to the system. Calls of the allocator are WAIT_S apart or more, and each note
    is followed by one."""

    def __init__(self, threads: Executor, give_back: Callable[[], None] = give_memory_back) -> None:
        self._threads = threads
        self._give_back = give_back
        self._is_noted = False  # since the last call began
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._call: asyncio.Future[None] | None = None

    def note(self, num_bytes: int) -> None:
        """Note that ``num_bytes`` bytes are free now or soon. Little is left to the allocator."""
        if num_bytes < MUCH_BYTES or self._is_closed:
            return
        self._is_noted = True
        if self._timer is None and self._call is None:
            self._timer = asyncio.get_running_loop().call_later(WAIT_S, self._begin)

    def close(self) -> None:
        """Call no more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        self._timer, self._is_noted = None, False
        self._call = asyncio.get_running_loop().run_in_executor(self._threads, self._give_back)
        self._call.add_done_callback(self._end)

    def _end(self, call: "asyncio.Future[None]") -> None:
        self._call = None
        if self._is_noted:
            self.note(MUCH_BYTES)
