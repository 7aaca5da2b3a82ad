"""One HTTP connection: uvicorn's, with limits, with errors in our format, and with a DirectBody for every request.

Input that is not HTTP, has too long a head, or stops in the middle is refused without a line in the log: any client can
send it. A request to change the protocol (WebSocket, HTTP/2) is served as a plain HTTP/1.1 request.
"""

import asyncio

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from diptych.control.errors import DiptychError
from diptych.serving import edge_limits
from diptych.serving.api.direct_body import DIRECT_BODY, DirectBody
from diptych.serving.api.error_format import error_bytes, http_error

PROTOCOL_HEADERS = (b"connection", b"upgrade", b"http2-settings")
HEAD_TOO_LONG = http_error(
    431, f"the head of the request is longer than {edge_limits.HEAD_BYTES} bytes", "head_too_long"
)


class _HeadTooLongError(Exception):
    """Raised inside of the parser, to stop it."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol for one client."""

    _silence: asyncio.TimerHandle | None = None
    _num_other_bytes = 0  # that arrived since the last byte of a body, or the end of a head
    _is_reading = False  # a request is half read ...
    _is_in_head = False  # ... and its head is
    _has_ignored = False  # a request for another protocol
    _is_refused = False
    _cycles: tuple[RequestResponseCycle, ...] = ()  # of requests without a whole reply

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._watch_silence()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: every request on it learns that (uvicorn itself informs only the last)."""
        self._is_refused = True
        self._watch_silence()
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
            _let_go(cycle)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """More bytes from the client."""
        if self._is_refused or self._num_other_bytes > edge_limits.HEAD_BYTES:
            return
        self._unset_keepalive_if_required()
        self._num_other_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except HttpParserError as error:
            if isinstance(error.__context__, _HeadTooLongError):
                self._refuse(HEAD_TOO_LONG)
            else:
                self._refuse(http_error(400, "this is not an HTTP/1.1 request", "invalid_http"))
        if self._num_other_bytes > edge_limits.HEAD_BYTES:
            self._refuse(HEAD_TOO_LONG)
        self._watch_silence()

    def on_response_complete(self) -> None:
        """A reply is sent."""
        for cycle in self._cycles:
            if cycle.response_complete:
                _let_go(cycle)
        super().on_response_complete()

    # What the parser calls.

    def on_message_begin(self) -> None:
        """A request begins."""
        self._is_reading = self._is_in_head = True
        self._num_other_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or behind the body a trailer, which has no meaning here."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is read: its task runs later, and finds the extension."""
        self._is_in_head = False
        self._num_other_bytes = 0
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > edge_limits.HEAD_BYTES:
            raise _HeadTooLongError
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self._cycles = (*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle)
            self.scope["extensions"] = {DIRECT_BODY: {"body": DirectBody(self.cycle)}}

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._num_other_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is read."""
        self._is_reading = False
        if not self.parser.should_upgrade():
            super().on_message_complete()

    # Requests that cannot be served.

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Serve a request for another protocol as HTTP/1.1. The parser takes the bytes after the head for the other
        protocol, so it gets the head again without these headers. ``rest``: what followed in the same read."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(http_error(405, "CONNECT is for proxies; this server is not one", "http_error"))
            return
        if self._has_ignored:  # the reply to the first one ends the connection
            self._refuse(http_error(400, "this connection ends with the request before", "invalid_http"))
            return
        self._has_ignored = True
        lines = [b"%b %b HTTP/1.1" % (method, self.url), b"connection: close"]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in PROTOCOL_HEADERS]
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    @property
    def _is_replying(self) -> bool:
        """Whether the reply to the last request that was read is due or under way."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body)

    def _refuse(self, error: DiptychError) -> None:
        """End the connection: behind the reply that is under way, else with this error."""
        if self._is_replying:
            self.cycle.keep_alive = False
            return
        self._is_refused = True
        if self.pipeline:  # replies to earlier requests are under way
            self.transport.close()
            return
        if self.cycle is not None and not self.cycle.response_complete:  # its task waits for the rest of its body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(error_bytes(error))
        self.transport.write_eof()
        self.loop.call_later(edge_limits.REFUSAL_LINGER_S, self.transport.close)

    def _watch_silence(self) -> None:
        """Start the timer again, if the client is expected to send something."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        is_idle = self.cycle is None or self.cycle.response_complete
        if not self._is_refused and (self._is_reading or is_idle):
            self._silence = self.loop.call_later(edge_limits.REQUEST_SILENCE_S, self._on_silence)

    def _on_silence(self) -> None:
        if self.transport.is_closing():
            return
        if self._is_replying or self.pipeline:
            self._watch_silence()
        elif self._is_reading:
            limit_s = edge_limits.REQUEST_SILENCE_S
            self._refuse(http_error(408, f"the rest of the request did not come within {limit_s:.0f} s", "timeout"))
        else:
            self.transport.close()


def _let_go(cycle: RequestResponseCycle) -> None:
    """It is over: what its scope holds need not wait for the garbage collector."""
    cycle.scope["extensions"].pop(DIRECT_BODY, None)
