"""What a load generator makes of a response: every piece of a body with the time at which it was received, for the
TokenStream of its request, whether the connection can be used again, and an error in words for what cannot be read.

http1/response_reader.py reads the bytes. No socket, no clock.
"""

from diptych.bench.token_stream import TokenStream
from diptych.http1.response_reader import Headers, HeadTooLongError, NotHttpError, ResponseReader

HEAD_LIMIT = 1 << 16  # bytes
BODY_LIMIT = 1 << 26  # bytes of a body that is no stream of events


class UnreadableResponseError(Exception):
    """Why a response cannot be read, though its framing is valid."""


class HttpResponse:
    """The response to one request; ``feed`` until it is over.

    keeps: once it is over, whether the connection can carry another request.
    """

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.keeps = False
        self._now_ns = 0
        self._is_events = False
        self._reader = ResponseReader(self._on_head, self._on_body, HEAD_LIMIT)

    @property
    def has_begun(self) -> bool:
        """Whether anything was received, so that the server has seen the request."""
        return self._reader.has_begun

    def feed(self, data: bytes, now_ns: int) -> bool:
        """The next bytes, received at ``now_ns``. Returns whether the response is over: its stream is finished then."""
        self._now_ns = now_ns
        error = None
        try:
            if not self._reader.feed(data):
                return False
        except NotHttpError as found:
            where = "" if self._reader.has_head else f": {data[:60]!r}"
            error = f"the answer is no HTTP/1.1 ({found}){where}"
        except HeadTooLongError:
            error = f"the answer's head has more than {HEAD_LIMIT:,} bytes"
        except UnreadableResponseError as found:
            error = str(found)
        self.keeps = error is None and self._reader.keeps
        self.stream.finish(now_ns, error)
        self.close()
        return True

    def end(self, now_ns: int) -> None:
        """The connection has ended, without an error: so does a response whose length was not announced."""
        if not self._reader.has_head:
            error: str | None = "the connection ended without an answer"
        elif self._reader.is_framed:
            error = "the connection ended in the middle of the answer"
        else:
            is_whole = self.stream.has_ended or not self._is_events
            error = None if is_whole else "the connection ended before the answer did"
        self.stream.finish(now_ns, error)
        self.close()

    def close(self) -> None:
        """Nothing more is read. No garbage collection runs during a measurement."""
        self._reader.close()

    def _on_head(self, status: int, headers: Headers) -> None:
        coding = headers.get(b"transfer-encoding", b"chunked")
        if coding.lower() != b"chunked":
            raise UnreadableResponseError(
                f"the answer's transfer coding is {coding.decode('latin-1')}; only chunked is known"
            )
        coding = headers.get(b"content-encoding", b"identity")
        if coding.lower() != b"identity":
            raise UnreadableResponseError(
                f"the answer is compressed ({coding.decode('latin-1')}), which the request did not allow"
            )
        self._is_events = headers.get(b"content-type", b"").lower().startswith(b"text/event-stream")
        if b"location" in headers:
            self.stream.location = headers[b"location"].decode("latin-1")
        self.stream.status = status

    def _on_body(self, piece: bytes) -> None:
        if self._is_events:
            self.stream.feed(piece, self._now_ns)
            return
        self.stream.body += piece
        if len(self.stream.body) > BODY_LIMIT:
            raise UnreadableResponseError(f"the reply is no stream of events and longer than {BODY_LIMIT:,} bytes")
