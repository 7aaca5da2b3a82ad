"""One HTTP/1.1 response, from bytes that were cut anywhere: its head, its body piece by piece, and its end.

httptools reads the framing (chunks, length, trailers). No socket, no clock, and no memory but for the head.
"""

from collections.abc import Callable, Mapping

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

Headers = Mapping[bytes, bytes]


class NotHttpError(Exception):
    """The bytes are no HTTP/1.1; the text says what was expected."""


class HeadTooLongError(Exception):
    """The head has more bytes than are read."""


class ResponseReader:
    """The response to one request; ``feed`` until it is whole.

    on_head: called with the status and the headers (names in lower case) of the final response. on_body: with each
    piece of the body. What they raise, ``feed`` raises. head_limit: bytes of the head, interim responses included; it
    has to end within it, in however large pieces it comes. num_without_body: bytes of the head, and behind it those
    since the last piece of the body, if the callback that bounds them sets this to zero at each piece.
    has_begun: something was received, so the server has seen the request. is_framed: the end of the body is announced;
    else it ends with the connection. keeps: once the response is whole, whether the connection can carry another.
    """

    def __init__(
        self, on_head: Callable[[int, Headers], None], on_body: Callable[[bytes], None], head_limit: int
    ) -> None:
        self.has_begun = self.has_head = self.is_whole = self.is_framed = self.keeps = False
        self.on_body: Callable[[bytes], None] | None = on_body  # called by the parser itself: no call in between
        self._on_head: Callable[[int, Headers], None] | None = on_head
        self._headers: dict[bytes, bytes] = {}
        self._head_limit = head_limit
        self.num_without_body = 0
        self._parser: HttpResponseParser | None = HttpResponseParser(self)

    def feed(self, data: bytes) -> bool:
        """The next bytes. Returns whether the response is whole; what follows it is not read, and the connection is not
        kept then. Raises NotHttpError or HeadTooLongError, after which nothing can be read."""
        assert self._parser is not None
        self.has_begun = True
        if not self.has_head:
            room = self._head_limit - self.num_without_body
            if len(data) > room:
                self._parse(data[:room])
                if self._parser is None:  # a callback has closed it
                    return self.is_whole
                if not self.has_head:
                    raise HeadTooLongError
                data = data[room:]
        self.num_without_body += len(data)
        self._parse(data)
        return self.is_whole

    def _parse(self, data: bytes) -> None:
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.keeps = False
            if self.is_whole:
                return
            if (cause := error.__context__) is not None and not isinstance(cause, HttpParserError):
                raise cause from None  # of on_head or on_body, not of the bytes
            raise NotHttpError(str(error)) from None

    def close(self) -> None:
        """Let go of the parser, which refers back to this object, and of the callbacks: nothing waits for the garbage
        collector. A callback may call it, too."""
        self._parser = self.on_body = self._on_head = None

    def on_message_begin(self) -> None:
        """Called by the parser. No request asked for a message after the response."""
        self.keeps = self.keeps and not self.is_whole

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser, for trailers too, which are ignored."""
        if self.has_head:
            return
        name = name.lower()
        if name == b"transfer-encoding" and name in self._headers:
            value = b"%b, %b" % (self._headers[name], value)
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        """Called by the parser, for an interim response (1xx) too."""
        if self._parser is None or self.has_head:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = {}
            return
        self.has_head, self.num_without_body = True, 0
        self.keeps = self._parser.should_keep_alive()
        self.is_framed = b"content-length" in self._headers or b"transfer-encoding" in self._headers
        assert self._on_head is not None
        self._on_head(status, self._headers)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self.is_whole = self.has_head


class ChunkReader(ResponseReader):
    """A ResponseReader that says whether the bytes so far end between two chunks."""

    is_between_chunks = False

    def on_chunk_header(self) -> None:
        """Called by the parser: the size of a chunk is read."""
        self.is_between_chunks = False

    def on_chunk_complete(self) -> None:
        """Called by the parser: a chunk is read, with the end of its line."""
        self.is_between_chunks = True
