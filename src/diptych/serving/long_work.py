"""Work for one request that would hold the event loop up: it waits for its turn and runs in a thread.

Tenants take turns, and within a tenant the first comes first. Of NUM_THREADS threads at most one does work on a very
long input, so that a prompt of a page never waits behind one of a library. Work whose caller was cancelled before its
turn is dropped; what is running ends where it asks next whether it is still wanted (``check_wanted``), or else at its
end, and keeps its thread until then.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from diptych.base.byte_size import size_words
from diptych.control.errors import DrainingError, OverloadedError
from diptych.serving import edge_limits
from diptych.serving.freed_memory import FreedMemory

NUM_THREADS = 2
LONG = 4096  # characters, bytes or token ids: shorter work is done at once
VERY_LONG = 2**18  # some tenths of a second of encoding
Result = TypeVar("Result")
_current = threading.local()  # is_unwanted: of the work that this thread does


class UnwantedWorkError(BaseException):
    """The caller of the work is gone. No handler of ``Exception`` in a template or a parser sees it."""


def check_wanted() -> None:
    """Raise UnwantedWorkError where the caller of the work that this thread does is gone. Work that goes in steps asks
    between two of them."""
    is_unwanted: threading.Event | None = getattr(_current, "is_unwanted", None)
    if is_unwanted is not None and is_unwanted.is_set():
        raise UnwantedWorkError


@dataclass(frozen=True, slots=True)
class _Waiting:
    """work, whose result future gets. size: of its input. is_unwanted: set when its caller is gone."""

    work: Callable[[], Any]
    size: int
    future: "asyncio.Future[Any]"
    is_unwanted: threading.Event = field(default_factory=threading.Event)

    @property
    def is_very_long(self) -> bool:
        return self.size >= VERY_LONG


class LongWork:
    """The queue of one server, used by its event loop alone."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="long-work")
        self.freed = FreedMemory(self._threads)
        self._waiting: dict[str, deque[_Waiting]] = {}  # by tenant; the first one's turn comes next
        self._running: set[asyncio.Future[Any]] = set()
        self._num_very_long = 0  # that are running
        self._is_closed = False
        self.num_waiting = 0
        self.num_bytes = 0  # of those, and of what runs

    async def run(self, work: Callable[[], Result], size: int, tenant: str = "", *, is_reply: bool = False) -> Result:
        """The result of ``work``. size: of its input, in bytes, characters or token ids. Raises OverloadedError while
        too much waits, unless it is the reply to a request that was served, and DrainingError after ``close``."""
        if size < LONG:
            return work()
        if self._is_closed:
            raise DrainingError
        if not is_reply and not self._makes_room(tenant, size):
            raise self._refusal()
        item = _Waiting(work, size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(item)
        self.num_waiting += 1
        self.num_bytes += size
        self._start()
        try:
            result: Result = await item.future
        except asyncio.CancelledError:
            item.is_unwanted.set()
            self._drop(tenant, item)
            raise
        finally:
            del item  # its future holds what was raised, whose traceback holds this frame: see forget_frames
        return result

    def close(self) -> None:
        """Start nothing more: what waits ends with DrainingError, and so does what comes later."""
        self._is_closed = True
        for tenant, items in list(self._waiting.items()):
            for item in list(items):
                if not item.future.done():
                    item.future.set_exception(DrainingError())
                self._drop(tenant, item)
        self.freed.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _makes_room(self, tenant: str, size: int) -> bool:
        """Whether ``size`` more may wait for this tenant. Where too much does, the last work of a tenant that has more
        than this one is dropped: no tenant fills the queue for others."""
        while True:
            is_full = self.num_waiting >= edge_limits.LONG_WORK_WAITING
            if not is_full and not (self.num_bytes and self.num_bytes + size > edge_limits.LONG_WORK_BYTES):
                return True

            def held(items: Iterable[_Waiting], counts: bool = is_full) -> int:
                return sum(1 if counts else item.size for item in items)

            most = max(self._waiting, key=lambda name: held(self._waiting[name]), default=tenant)
            own = held(self._waiting.get(tenant, ())) + (1 if is_full else size)
            if most == tenant or held(self._waiting[most]) <= own:
                return False
            item = self._waiting[most][-1]
            if not item.future.done():
                item.future.set_exception(self._refusal())
            self._drop(most, item)

    def _refusal(self) -> OverloadedError:
        message = f"{self.num_waiting} long inputs ({size_words(self.num_bytes)}) are waiting to be read"
        return OverloadedError(message, code="too_much_to_read")

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
            running = loop.run_in_executor(self._threads, partial(_computed, item))
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
        try:
            self._tell(item, running)
        finally:  # whatever fails here, what waits goes on
            self._start()
        if item.is_very_long:
            self.freed.note(item.size)

    @staticmethod
    def _tell(item: _Waiting, running: "asyncio.Future[Any]") -> None:
        if not item.future.done():  # its caller is still there
            if running.cancelled():
                item.future.set_exception(DrainingError())
            elif (error := running.exception()) is not None:
                item.future.set_exception(error)
            else:
                item.future.set_result(running.result())
        elif not running.cancelled():
            running.exception()  # its caller has left, and asks for no result: neither is an error of its input one


def _computed(item: _Waiting) -> Any:
    _current.is_unwanted, work = item.is_unwanted, item.work
    del item  # as in LongWork.run
    try:
        check_wanted()  # it was handed over before its caller was gone
        return work()
    finally:
        del _current.is_unwanted
