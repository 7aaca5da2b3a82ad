"""Work for one request that would hold the event loop up: it waits for its turn and runs in a thread.

Tenants take turns, and within a tenant the first comes first. Of NUM_THREADS threads at most one does work on a very
long input, so that a prompt of a page never waits behind one of a library. Work whose caller was cancelled before its
turn is dropped; what is running runs to its end, and keeps its thread until then.
"""

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from diptych.byte_size import size_words
from diptych.control.errors import OverloadedError
from diptych.serving import edge_limits

NUM_THREADS = 2
LONG = 4096  # characters, bytes or token ids: shorter work is done at once
VERY_LONG = 2**18  # some tenths of a second of encoding
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Waiting:
    """work, whose result future gets. size: of its input."""

    work: Callable[[], Any]
    size: int
    future: "asyncio.Future[Any]"

    @property
    def is_very_long(self) -> bool:
        return self.size >= VERY_LONG


class LongWork:
    """The queue of one server, used by its event loop alone."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="long-work")
        self._waiting: dict[str, deque[_Waiting]] = {}  # by tenant; the first one's turn comes next
        self._running: set[asyncio.Future[Any]] = set()
        self._num_very_long = 0  # that are running
        self.num_waiting = 0
        self.num_bytes = 0  # of those, and of what runs

    async def run(self, work: Callable[[], Result], size: int, tenant: str = "") -> Result:
        """The result of ``work``. size: of its input, in bytes, characters or token ids. Raises OverloadedError while
        too much waits."""
        if size < LONG:
            return work()
        if self.num_waiting >= edge_limits.LONG_WORK_WAITING or (
            self.num_bytes and self.num_bytes + size > edge_limits.LONG_WORK_BYTES
        ):
            message = f"{self.num_waiting} long inputs ({size_words(self.num_bytes)}) are waiting to be read"
            raise OverloadedError(message, code="too_much_to_read")
        item = _Waiting(work, size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(item)
        self.num_waiting += 1
        self.num_bytes += size
        self._start()
        try:
            result: Result = await item.future
        except asyncio.CancelledError:
            self._drop(tenant, item)
            raise
        return result

    def close(self) -> None:
        """Start nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _drop(self, tenant: str, item: _Waiting) -> None:
        if (items := self._waiting.get(tenant)) is not None and item in items:
            self._remove(tenant, item)
            self.num_bytes -= item.size

    def _remove(self, tenant: str, item: _Waiting) -> None:
        items = self._waiting[tenant]
        items.remove(item)
        self.num_waiting -= 1
        if not items:
            del self._waiting[tenant]

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._running) < NUM_THREADS and (item := self._next()) is not None:
            self._num_very_long += item.is_very_long
            running = loop.run_in_executor(self._threads, partial(_computed, item.work, item.size))
            self._running.add(running)
            running.add_done_callback(partial(self._on_done, item))

    def _next(self) -> _Waiting | None:
        """What may start now, of the tenant whose turn it is."""
        for tenant, items in self._waiting.items():
            for item in items:
                if not (item.is_very_long and self._num_very_long):
                    self._remove(tenant, item)
                    if (rest := self._waiting.pop(tenant, None)) is not None:
                        self._waiting[tenant] = rest  # behind the others
                    return item
        return None

    def _on_done(self, item: _Waiting, running: "asyncio.Future[Any]") -> None:
        self._running.discard(running)
        self._num_very_long -= item.is_very_long
        self.num_bytes -= item.size
        if not item.future.done():  # its caller is still there
            if running.cancelled():
                item.future.cancel()
            elif (error := running.exception()) is not None:
                item.future.set_exception(error)
            else:
                item.future.set_result(running.result())
        elif not running.cancelled():
            running.exception()  # nobody asks for it
        self._start()


def _computed(work: Callable[[], Result], size: int) -> Result:
    try:
        return work()
    finally:
        if size >= VERY_LONG:
            give_memory_back()


def give_memory_back() -> None:
    """Return what the allocator of the C library keeps for this process to the system: a text of ten megabytes takes
    a gigabyte to encode. Does nothing where the library has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
