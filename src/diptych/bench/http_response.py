"""One HTTP/1.1 response, from bytes that were cut anywhere: its head, and a body that its request's TokenStream gets.

httptools reads the framing (chunks, length, trailers). Here is what a load generator makes of it: every piece of a body
with the time at which it was received, whether the connection can be used again, and an error in words for a response
that cannot be read. No socket, no clock.
"""

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from diptych.bench.token_stream import TokenStream

HEAD_LIMIT = 1 << 16  # bytes
BODY_LIMIT = 1 << 26  # bytes of a body that is no stream of events


class UnreadableResponseError(Exception):
    """Why a response cannot be read, though its framing is valid."""


class HttpResponse:
    """The response to one request; ``feed`` until it is over.

    has_begun: something was received, so the server has seen the request. keeps: once it is over, whether the
    connection can carry another request.
    """

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.keeps = False
        self._now_ns = 0
        self._num_bytes = 0  # until the head is whole
        self._has_head = self._has_length = self._is_events = self._is_over = False
        self._parser: HttpResponseParser | None = HttpResponseParser(self)

    @property
    def has_begun(self) -> bool:
        """Whether anything was received."""
        return self._num_bytes > 0

    def feed(self, data: bytes, now_ns: int) -> bool:
        """The next bytes, received at ``now_ns``. Returns whether the response is over: its stream is finished then."""
        assert self._parser is not None
        self._now_ns = now_ns
        try:
            if not self._has_head:
                self._check_head(data)
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade, UnreadableResponseError) as error:
            self._fail(error, data)
        if self._is_over:
            self.close()
        return self._is_over

    def end(self, now_ns: int) -> None:
        """The connection has ended, without an error: so does a response whose length was not announced."""
        if not self._has_head:
            error: str | None = "the connection ended without an answer"
        elif self._has_length:
            error = "the connection ended in the middle of the answer"
        else:
            is_whole = self.stream.has_ended or not self._is_events
            error = None if is_whole else "the connection ended before the answer did"
        self.stream.finish(now_ns, error)
        self.close()

    def close(self) -> None:
        """Let go of the parser, which refers back to this object: no garbage collection runs during a measurement."""
        self._parser = None

    def on_message_begin(self) -> None:
        """Called by the parser. No request asked for a message after the response."""
        self.keeps = self.keeps and not self._is_over

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser, for trailers too."""
        if self._has_head:
            return
        name = name.lower()
        if name == b"content-type":
            self._is_events = value.lower().startswith(b"text/event-stream")
        elif name == b"content-length":
            self._has_length = True
        elif name == b"transfer-encoding":
            self._has_length = True
            if value.lower() != b"chunked":
                coding = value.decode("latin-1")
                raise UnreadableResponseError(f"the answer's transfer coding is {coding}; only chunked is known")
        elif name == b"content-encoding" and value.lower() != b"identity":
            coding = value.decode("latin-1")
            raise UnreadableResponseError(f"the answer is compressed ({coding}), which the request did not allow")
        elif name == b"location":
            self.stream.location = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser, for an interim response (1xx) too."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status >= 200 and not self._has_head:
            self._has_head = True
            self.stream.status = status
            self.keeps = self._parser.should_keep_alive()

    def on_body(self, piece: bytes) -> None:
        """Called by the parser: as much of a chunk or body as has come."""
        if self._is_events:
            self.stream.feed(piece, self._now_ns)
            return
        self.stream.body += piece
        if len(self.stream.body) > BODY_LIMIT:
            raise UnreadableResponseError(f"the reply is no stream of events and longer than {BODY_LIMIT:,} bytes")

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._has_head and not self._is_over:
            self._is_over = True
            self.stream.finish(self._now_ns)

    def _check_head(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > HEAD_LIMIT and b"\r\n\r\n" not in data:
            raise UnreadableResponseError(f"the answer's head has more than {HEAD_LIMIT:,} bytes")

    def _fail(self, error: Exception, data: bytes) -> None:
        """Nothing that follows can be read."""
        self.keeps = False
        if self._is_over:
            return
        self._is_over = True
        cause = error if isinstance(error, UnreadableResponseError) else error.__context__
        if isinstance(cause, UnreadableResponseError):
            self.stream.finish(self._now_ns, str(cause))
        elif cause is not None:
            raise cause  # a defect in a callback
        else:
            where = "" if self._has_head else f": {data[:60]!r}"
            self.stream.finish(self._now_ns, f"the answer is no HTTP/1.1 ({error}){where}")
