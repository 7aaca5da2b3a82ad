"""An event loop on virtual time: nothing sleeps, and every run has exactly one order.

The clock stands still while there is something to do, and then jumps to the next timer. A test that waits for what
will never happen fails at once. Integer nanoseconds; actions of one nanosecond run by priority, then in the order in
which they were scheduled, as in diptych.simulation.environment.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial, wraps
from heapq import heappop, heappush
from typing import Any, ParamSpec

from diptych.simulation.environment import MESSAGE

Parameters = ParamSpec("Parameters")
MAX_ACTIONS = 200_000


class VirtualTime:
    """The clock, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0
        self._num_scheduled = 0
        self._heap: list[tuple[int, int, int, Callable[[], object]]] = []

    def clock(self) -> int:
        """Nanoseconds, as time.monotonic_ns gives them."""
        return self.now

    def at(self, time_ns: int, priority: int, action: Callable[[], object]) -> None:
        """Run ``action`` at ``time_ns``, not before now."""
        assert time_ns >= self.now, f"scheduled at {time_ns}, now is {self.now}"
        self._num_scheduled += 1
        assert self._num_scheduled < MAX_ACTIONS, "a livelock"
        heappush(self._heap, (time_ns, priority, self._num_scheduled, action))

    def step(self) -> None:
        """Jump to the next action and run it."""
        assert self._heap, "something waits, and nothing is left to happen"
        self.now, _, _, action = heappop(self._heap)
        action()

    async def until(self, time_ns: int) -> None:
        """Wait for a moment."""
        await asyncio.sleep((time_ns - self.now) / 1e9)


class _Selector(selectors.DefaultSelector):
    """Asked when the loop has nothing to do: it lets time pass instead of waiting for files."""

    def __init__(self, virtual: VirtualTime) -> None:
        super().__init__()
        self._virtual = virtual

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Run what is to happen next, unless the loop is busy (timeout 0)."""
        if timeout != 0:
            self._virtual.step()
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose timers are in ``virtual``. It reads no files."""

    def __init__(self) -> None:
        self.virtual = VirtualTime()
        super().__init__(_Selector(self.virtual))

    def time(self) -> float:
        """Virtual seconds."""
        return self.virtual.now / 1e9

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Keep a timer, as asyncio does; timers of one nanosecond keep their order."""
        handle = asyncio.TimerHandle(when, callback, list(args), self, context)
        due_ns = max(self.virtual.now, round(when * 1e9))
        self.virtual.at(due_ns, MESSAGE, partial(self._on_timer, handle, partial(callback, *args), context))
        return handle

    def _on_timer(self, handle: asyncio.TimerHandle, call: Callable[[], object], context: Context | None) -> None:
        if not handle.cancelled():
            self.call_soon(call, context=context)


def in_virtual_time(
    test: Callable[Parameters, Coroutine[Any, Any, None]],
) -> Callable[Parameters, None]:
    """Run an asynchronous test in a VirtualLoop."""

    @wraps(test)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def virtual_time() -> VirtualTime:
    """The time of the running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "the test is not in virtual time"
    return loop.virtual
