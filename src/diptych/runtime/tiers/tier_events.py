"""What the threads that move blocks between tiers report to the thread that decides: a queue that can be polled."""

import os
import select
from collections import deque

from diptych.control.engine.kvcache.tier_records import TierEvent


class TierEvents:
    """Any thread emits, one takes."""

    def __init__(self) -> None:
        self._events: deque[TierEvent] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable when there are events."""
        return self._fd

    def emit(self, event: TierEvent) -> None:
        """Something happened."""
        self._events.append(event)
        os.eventfd_write(self._fd, 1)

    def poll(self) -> list[TierEvent]:
        """What has happened since the last call, in order."""
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
