"""A way to write to a streamed reply at once, outside of the task that sends it: the ASGI extension DIRECT_BODY.

It does not write more than the client reads: its user then waits in ``send``.
"""

import array
import fcntl
import termios
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

DIRECT_BODY = "diptych.direct_body"  # in scope["extensions"]: {"body": DirectBody}


class DirectBody:
    """The body of one reply. To write is only for a reply that ``send`` has started, and will end."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def writes(self, take: Callable[[], bytes]) -> Callable[[], bool]:
        """A function that sends what ``take`` gives. It returns False, and takes nothing, while the client is not
        there, does not read what it gets, or takes no chunks."""
        cycle = self._cycle

        def write() -> bool:
            if not self._takes_chunks:
                return False
            if body := take():  # an empty chunk would end the body
                cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            return True

        return write

    def write_chunk(self, chunk: bytes) -> bool:
        """Send a whole chunk of HTTP, unless the client is not there, does not read, or takes no chunks."""
        if not self._takes_chunks:
            return False
        self._cycle.transport.write(chunk)
        return True

    def wake_receive(self) -> None:
        """End the present or the next wait in ``receive`` of this request, with an empty piece of its body."""
        self._cycle.message_event.set()

    def abort(self) -> None:
        """End the connection at once: what its client has not taken is thrown away, and its task is told."""
        self._cycle.disconnected = True
        self._cycle.transport.abort()

    @property
    def _takes_chunks(self) -> bool:
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected) and cycle.chunked_encoding is True

    def count_unsent(self) -> int:
        """Bytes of this connection that its client has not taken: those that wait here, and those in the kernel that
        are not acknowledged (0 where the kernel does not say)."""
        transport = self._cycle.transport
        waiting, unacknowledged = transport.get_write_buffer_size(), array.array("i", [0])
        try:
            fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, unacknowledged)
        except (OSError, ValueError, AttributeError):  # closed meanwhile, or no socket
            return waiting
        return waiting + unacknowledged[0]
