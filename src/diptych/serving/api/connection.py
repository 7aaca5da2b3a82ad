"""One HTTP connection: uvicorn's, with limits, with errors in our format, and with a DirectBody for every request.

Input that is not HTTP, has too long a head, or stops in the middle is refused without a line in the log: any client can
send it. A request to change the protocol (WebSocket, HTTP/2) is served as a plain HTTP/1.1 request.

Requests may come before the replies to those before them. Their number is limited: the rest of what has arrived waits
unparsed, the client is not read meanwhile, and each byte is looked at once.
"""

import asyncio
from collections import deque
from typing import Any

import httptools
from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from diptych.control.errors import DiptychError
from diptych.serving import edge_limits
from diptych.serving.api.direct_body import DIRECT_BODY, DirectBody
from diptych.serving.api.error_format import error_bytes, http_error

PROTOCOL_HEADERS = (b"connection", b"upgrade", b"http2-settings")
HEAD_TOO_LONG = http_error(
    431, f"the head of the request is longer than {edge_limits.HEAD_BYTES} bytes", "head_too_long"
)
SLICE_BYTES = 4096  # of heads and chunks, that the parser gets at once
END_OF_HEAD = b"\r\n\r\n"


class _RefusedError(Exception):
    """Raised inside of the parser, to stop it."""

    def __init__(self, error: DiptychError) -> None:
        super().__init__(str(error))
        self.error = error


class _Flow(FlowControl):
    """uvicorn's, which reads nothing while it is held."""

    is_held = False

    def resume_reading(self) -> None:
        """Read again, unless it is held."""
        if not self.is_held:
            super().resume_reading()


class _UnchunkedCycle(RequestResponseCycle):
    """A reply to a client of HTTP/1.0, which knows no chunks: without a length, it ends with the connection."""

    _has_length = True

    async def send(self, message: Any) -> None:
        """Send a part of the reply."""
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self.chunked_encoding = False
        elif not self._has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol for one client."""

    _timer: asyncio.TimerHandle | None = None
    _watched: str | None = None  # what the timer is for: "head", "body" or "idle"
    _num_body_bytes = 0  # that arrived since the timer was started
    _num_body_left = 0  # of a body whose length is known
    _unparsed = b""  # what has arrived, from ...
    _offset = 0  # ... here on
    _is_parsing = False
    _num_other_bytes = 0  # that were parsed since the last byte of a body, or the end of a head
    _is_reading = False  # a request is half read ...
    _is_in_head = False  # ... and its head is
    _has_ignored = False  # a request for another protocol
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        self._cycles: deque[RequestResponseCycle] = deque()  # of requests without a whole reply
        self._body_parts: list[bytes] = []  # that the parser has found in a slice
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: every request on it learns that (uvicorn itself informs only the last)."""
        self._is_refused = True
        self._unparsed = b""
        self._watch()
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
        rest = self._unparsed[self._offset :]
        self._unparsed, self._offset = rest + data if rest else data, 0
        self._parse()

    def _parse(self) -> None:
        """Go on with what has arrived, as long as there are not too many requests without a reply."""
        if self._is_parsing:
            return
        self._is_parsing = True
        try:
            while self._offset < len(self._unparsed) and not self._is_refused and not self._has_enough:
                self._feed(self._next_slice())
            self._hand_over_body()
        finally:
            self._is_parsing = False
        self.flow.is_held = self._offset < len(self._unparsed) and not self._is_refused
        if self.flow.is_held:
            self.flow.pause_reading()
        else:
            self._unparsed, self._offset = b"", 0
        self._watch()

    @property
    def _has_enough(self) -> bool:
        """Whether no request may begin before another is answered."""
        return not self._is_reading and len(self._cycles) >= edge_limits.UNANSWERED_REQUESTS

    def _next_slice(self) -> bytes:
        """What ends with a request, where one ends in it: chunks and trailers end as a head does."""
        start, end = self._offset, self._offset + (self._num_body_left or SLICE_BYTES)
        if not self._num_body_left and (end_of_head := self._unparsed.find(END_OF_HEAD, start, end)) >= 0:
            end = end_of_head + len(END_OF_HEAD)
        data = self._unparsed[start:end]
        self._offset += len(data)
        return data

    def _feed(self, data: bytes) -> None:
        self._num_other_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._offset += upgrade.args[0] - len(data)
            self._ignore_upgrade()
        except HttpParserError as error:
            reason = error.__context__
            invalid = http_error(400, "this is not an HTTP/1.1 request", "invalid_http")
            self._end_input(reason.error if isinstance(reason, _RefusedError) else invalid)
        if self._num_other_bytes > edge_limits.HEAD_BYTES:
            self._end_input(HEAD_TOO_LONG)

    def on_response_complete(self) -> None:
        """A reply is sent."""
        while self._cycles and self._cycles[0].response_complete:
            _let_go(self._cycles.popleft())
        super().on_response_complete()
        if self._unparsed and not self.transport.is_closing():
            self._parse()
            self.flow.resume_reading()

    # What the parser calls.

    def on_message_begin(self) -> None:
        """A request begins."""
        self._is_reading = self._is_in_head = True
        self._num_other_bytes = 0
        self._watched = None
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or behind the body a trailer, which has no meaning here."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is read: its task runs later, and finds the extension."""
        self._is_in_head = False
        self._num_other_bytes = self._num_body_bytes = 0
        self._watched = None
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > edge_limits.HEAD_BYTES:
            raise _RefusedError(HEAD_TOO_LONG)
        version = self.parser.get_http_version()
        self._check_framing(version)
        self._num_body_left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            if version == "1.0":
                self.cycle.__class__ = _UnchunkedCycle
            self._cycles.append(self.cycle)
            self.scope["extensions"] = {DIRECT_BODY: {"body": DirectBody(self.cycle)}}

    def _check_framing(self, version: str) -> None:
        """Raise _RefusedError for a head that others may read differently (RFC 9112, sections 3.2 and 6.1)."""
        hosts = [value for name, value in self.headers if name == b"host"]
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if len(hosts) > 1 or (not hosts and version != "1.0"):
            raise _RefusedError(
                http_error(400, f"a request has one Host header; this one has {len(hosts)}", "invalid_http")
            )
        if codings and version == "1.0":
            raise _RefusedError(http_error(400, "HTTP/1.0 has no Transfer-Encoding", "invalid_http"))
        if codings not in ([], [b"chunked"]):
            raise _RefusedError(http_error(501, "Transfer-Encoding must be chunked", "unsupported_encoding"))
        if not self.url.startswith((b"/", b"*")) and self.parser.get_method() != b"CONNECT":
            self._take_authority()

    def _take_authority(self) -> None:
        """The server that a target in absolute form names counts, not the Host header (RFC 9112, section 3.2.2)."""
        target = httptools.parse_url(self.url)
        if target.userinfo or not target.host:
            raise _RefusedError(http_error(400, "the target of the request is no path", "invalid_http"))
        authority = target.host if b":" not in target.host else b"[%b]" % target.host
        if target.port:
            authority += b":%d" % target.port
        self.headers[:] = [field for field in self.headers if field[0] != b"host"]
        self.headers.append((b"host", authority))

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._num_other_bytes = 0
        self._num_body_bytes += len(body)
        self._num_body_left = max(0, self._num_body_left - len(body))
        self._body_parts.append(body)

    def _hand_over_body(self) -> None:
        """Give the request what has come of its body in one piece: it copies all that it has for each piece."""
        if self._body_parts:
            body, self._body_parts = b"".join(self._body_parts), []
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is read."""
        self._hand_over_body()
        self._is_reading = False
        self._num_body_left = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    # Requests that cannot be served.

    def _ignore_upgrade(self) -> None:
        """Serve a request for another protocol as HTTP/1.1. The parser takes the bytes after the head for the other
        protocol, so it gets the head again without these headers."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._end_input(http_error(405, "CONNECT is for proxies; this server is not one", "http_error"))
            return
        if self._has_ignored:  # the reply to the first one ends the connection
            self._end_input(http_error(400, "this connection ends with the request before", "invalid_http"))
            return
        self._has_ignored = True
        lines = [b"%b %b HTTP/1.1" % (method, self.url), b"connection: close"]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in PROTOCOL_HEADERS]
        self._unparsed = b"\r\n".join(lines) + END_OF_HEAD + self._unparsed[self._offset :]
        self._offset = 0

    def _end_input(self, error: DiptychError) -> None:
        """Nothing more of this client can be read."""
        self._unparsed, self._offset = b"", 0
        self._refuse(error)

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

    def _watch(self) -> None:
        """Start the timer of what the client is expected to send, if that is another thing now."""
        is_idle = self.cycle is None or self.cycle.response_complete
        awaited = "head" if self._is_in_head else "body" if self._is_reading else "idle" if is_idle else None
        if self._is_refused:
            awaited = None
        if self._timer is not None:
            if awaited is not None and awaited == self._watched:
                return
            self._timer.cancel()
        self._watched, self._timer = awaited, None
        if awaited is not None:
            seconds = edge_limits.HEAD_S if awaited == "head" else edge_limits.REQUEST_SILENCE_S
            self._timer = self.loop.call_later(seconds, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._is_replying or self.pipeline:
            self._watch()
        elif self._is_in_head:
            self._refuse(_late(f"the head of the request did not come within {edge_limits.HEAD_S:.0f} s"))
        elif not self._is_reading:
            self.transport.close()
        elif self.flow.read_paused or self._is_body_fast_enough:
            self._num_body_bytes = 0
            self._watch()
        else:
            rate, seconds = edge_limits.BODY_BYTES_PER_S, edge_limits.REQUEST_SILENCE_S
            self._refuse(_late(f"the body of the request came at less than {rate} bytes/s for {seconds:.0f} s"))

    @property
    def _is_body_fast_enough(self) -> bool:
        return self._num_body_bytes >= edge_limits.BODY_BYTES_PER_S * edge_limits.REQUEST_SILENCE_S


def _late(words: str) -> DiptychError:
    return http_error(408, words, "timeout")


def _let_go(cycle: RequestResponseCycle) -> None:
    """Drop what the scope of a finished cycle holds, so that it need not wait for the garbage collector."""
    cycle.scope["extensions"].pop(DIRECT_BODY, None)
