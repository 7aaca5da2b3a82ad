"""A way to write to a streamed reply at once, outside of the task that sends it: the ASGI extension DIRECT_BODY.

It must not write more than the client reads: its user asks ``takes_more`` first, and otherwise waits in ``send``.
"""

import array
import fcntl
import termios

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

DIRECT_BODY = "diptych.direct_body"  # in scope["extensions"]: {"body": DirectBody}


class DirectBody:
    """The body of one reply. Only for a reply that ``send`` has started, and will end."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def takes_more(self) -> bool:
        """Whether ``write`` may be called now: the client is there, reads what it gets, and takes chunks."""
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

    def write(self, body: bytes) -> None:
        """Send a part of the body (not empty)."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
