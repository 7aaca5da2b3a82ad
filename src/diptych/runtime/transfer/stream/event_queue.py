"""Events on their way from the connector's thread to the worker's."""

import os
from collections import deque

from diptych.runtime.transfer.connector import ConnectorEvent
from diptych.runtime.transfer.stream.transfer_state import KVTransfer


class EventQueue:
    """In order, each beside its transfer; an eventfd says when there are some."""

    def __init__(self) -> None:
        self._events: deque[tuple[KVTransfer, ConnectorEvent]] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable when there are events, and after ``wake``."""
        return self._fd

    def emit(self, transfer: KVTransfer, event: ConnectorEvent) -> None:
        """Connector's thread."""
        self._events.append((transfer, event))
        self.wake()

    def wake(self) -> None:
        """Connector's thread: make the worker look, also without an event."""
        os.eventfd_write(self._fd, 1)

    def drain(self) -> list[tuple[KVTransfer, ConnectorEvent]]:
        """Worker's thread: what there is, except events of transfers that it has ended itself."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return []
        happened = [self._events.popleft() for _ in range(len(self._events))]
        return [(transfer, event) for transfer, event in happened if not transfer.is_silent]

    def close(self) -> None:
        """No more events."""
        os.close(self._fd)
