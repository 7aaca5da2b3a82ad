"""What the threads that move blocks between tiers report to the thread that decides: a queue that can be polled."""

import os
import select
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from diptych.control.engine.kvcache.tier_records import TierEvent
from diptych.control.errors import WorkerError


class TierEvents:
    """Any thread emits, one takes."""

    def __init__(self) -> None:
        self._events: deque[TierEvent] = deque()
        self._defect: Exception | None = None  # that has ended a thread
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable when there are events."""
        return self._fd

    def emit(self, event: TierEvent) -> None:
        """Something happened."""
        self._events.append(event)
        os.eventfd_write(self._fd, 1)

    @contextmanager
    def defects(self) -> Iterator[None]:
        """Around all that a thread does: an exception that ends it goes to who polls."""
        try:
            yield
        except Exception as error:
            self._defect = error
            os.eventfd_write(self._fd, 1)

    def poll(self) -> list[TierEvent]:
        """What has happened since the last call, in order. Raises WorkerError when a thread has ended by a defect: what
        waits for it would wait for ever."""
        if self._defect is not None:
            raise WorkerError(f"a thread of the KV tiers has failed: {self._defect}") from self._defect
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return []
        return [self._events.popleft() for _ in range(len(self._events))]

    def wait(self, timeout_s: float) -> None:
        """Until there are events, or for so long."""
        select.select([self._fd], [], [], timeout_s)

    def close(self) -> None:
        """Nobody emits any more."""
        os.close(self._fd)
