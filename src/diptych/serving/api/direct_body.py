"""A way to write to a streamed reply at once, outside of the task that sends it: the ASGI extension DIRECT_BODY.

It must not write more than the client reads: its user asks ``takes_more`` first, and otherwise waits in ``send``.
"""

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

    def write(self, body: bytes) -> None:
        """Send a part of the body (not empty)."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
