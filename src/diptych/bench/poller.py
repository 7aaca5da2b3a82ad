"""Which sockets can be read or written, asked of the kernel for all of them at once.

Owns the watching of sockets: on Linux one epoll of its own, which the event loop watches as a single file; elsewhere
the event loop's own readers. Must never read from a socket.

While many sockets have something every millisecond, they are asked every few milliseconds instead of at each arrival: a
wake-up of the process costs more than the reading of a token. This is done only when sockets ``may_linger``: when those
who need it learn from the kernel when something came. What one socket got between two askings has one time, so they are
several to the mean interval of the fastest socket.
"""

import asyncio
import select
import sys
import time
from typing import Protocol

from diptych.control.slo import NS_PER_MS, NS_PER_S

READABLE = getattr(select, "EPOLLIN", 1)
WRITABLE = getattr(select, "EPOLLOUT", 4)
AT_ONCE = 64  # sockets between two turns of the event loop, which has requests to send
LEAST_S, MOST_S = 0.001, 0.032  # between two askings when busy; the least is the grain of the event loop's timers
ASKINGS = 4  # in the mean interval of the fastest socket
# Sockets per second: above the first they are asked at intervals, below the second no more.
BUSY, QUIET = 2000.0, 1000.0
WINDOW_NS = 100 * NS_PER_MS  # over which rates are taken


class Watched(Protocol):
    """A socket's owner."""

    def on_event(self, events: int) -> None:
        """It is READABLE or WRITABLE (a mask), or has ended."""
        ...


class Poller(Protocol):
    """Watches sockets, named by their file numbers. may_linger: see above."""

    may_linger: bool

    def watch(self, file: int, owner: Watched, events: int) -> None:
        """From now on."""
        ...

    def change(self, file: int, events: int) -> None:
        """Other events of a file that is watched."""
        ...

    def forget(self, file: int) -> None:
        """No longer; before the file is closed."""
        ...

    def close(self) -> None:
        """Watch nothing any more."""
        ...


def poller() -> Poller:
    """The best that this system has; in a running event loop."""
    return EpollPoller() if sys.platform == "linux" else LoopPoller()


class EpollPoller:
    """One epoll; the event loop watches it, or (busy) asks it at intervals."""

    def __init__(self) -> None:
        self.may_linger = True
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._owners: dict[int, Watched] = {}
        self._next: asyncio.Handle | None = None  # when busy
        self._interval_s = LEAST_S
        self._counts: dict[int, int] = {}  # events of each file in this window
        self._window_start_ns = time.perf_counter_ns()
        self._loop.add_reader(self._epoll.fileno(), self._ask)

    def watch(self, file: int, owner: Watched, events: int) -> None:
        """From now on."""
        self._owners[file] = owner
        self._epoll.register(file, events)

    def change(self, file: int, events: int) -> None:
        """Other events of a file that is watched."""
        self._epoll.modify(file, events)

    def forget(self, file: int) -> None:
        """No longer."""
        del self._owners[file]
        self._epoll.unregister(file)

    def close(self) -> None:
        """Watch nothing any more."""
        if self._next is None:
            self._loop.remove_reader(self._epoll.fileno())
        else:
            self._next.cancel()
        self._epoll.close()

    def _ask(self) -> bool:
        """Whether there is more."""
        owners, counts = self._owners, self._counts
        events = self._epoll.poll(0, AT_ONCE)
        for file, mask in events:
            owner = owners.get(file)
            if owner is not None:  # else it was forgotten in this turn
                counts[file] = counts.get(file, 0) + 1
                owner.on_event(mask)
        now = time.perf_counter_ns()
        if (elapsed := now - self._window_start_ns) >= WINDOW_NS:
            self._choose(elapsed / NS_PER_S)
            counts.clear()
            self._window_start_ns = now
        return len(events) == AT_ONCE

    def _tick(self) -> None:
        has_more = self._ask()
        if self._next is None:  # no longer busy
            return
        self._next = (
            self._loop.call_soon(self._tick) if has_more else self._loop.call_later(self._interval_s, self._tick)
        )

    def _choose(self, elapsed_s: float) -> None:
        """Whether to wake up for each event or at intervals, and at which, by the events of the window."""
        rate, most = sum(self._counts.values()) / elapsed_s, max(self._counts.values(), default=1)
        self._interval_s = min(MOST_S, max(LEAST_S, elapsed_s / (ASKINGS * most)))
        if self._next is None and rate > BUSY and self.may_linger:
            self._loop.remove_reader(self._epoll.fileno())
            self._next = self._loop.call_later(self._interval_s, self._tick)
        elif self._next is not None and (rate < QUIET or not self.may_linger):
            self._next.cancel()
            self._next = None
            self._loop.add_reader(self._epoll.fileno(), self._ask)


class LoopPoller:
    """The event loop watches each socket."""

    def __init__(self) -> None:
        self.may_linger = False
        self._loop = asyncio.get_running_loop()
        self._owners: dict[int, Watched] = {}

    def watch(self, file: int, owner: Watched, events: int) -> None:
        """From now on."""
        self._owners[file] = owner
        self.change(file, events)

    def change(self, file: int, events: int) -> None:
        """Other events of a file that is watched."""
        owner = self._owners[file]
        if events & READABLE:
            self._loop.add_reader(file, owner.on_event, READABLE)
        else:
            self._loop.remove_reader(file)
        if events & WRITABLE:
            self._loop.add_writer(file, owner.on_event, WRITABLE)
        else:
            self._loop.remove_writer(file)

    def forget(self, file: int) -> None:
        """No longer."""
        del self._owners[file]
        self._loop.remove_reader(file)
        self._loop.remove_writer(file)

    def close(self) -> None:
        """Watch nothing any more."""
        for file in list(self._owners):
            self.forget(file)
