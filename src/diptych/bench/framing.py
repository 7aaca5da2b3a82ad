"""The framing of an HTTP/1.x answer, from bytes that were cut anywhere: head, chunks, length, or the connection's end.

Owns the reading of one answer. Must never touch a socket or read a clock, and never reads a token: it hands the bytes
of a body to the answer's TokenStream with the time at which they were received.

Most of what comes is a whole chunk with whole events. Such chunks are put aside with their times and read several at a
stretch: one by one, between two waits for the network, each costs two or three microseconds more
(benchmarks/client_overhead.py). Nobody can tell: the stream has them read before it shows anything of what it knows.
"""

import re
from collections.abc import Callable

from diptych.bench.client_stream import TokenStream

HEAD_LIMIT = 1 << 16  # bytes of a head, of a chunk's first line, or of a trailer's line
BODY_LIMIT = 1 << 26  # bytes of a reply that is no stream
MOST_ASIDE = 32  # chunks that wait to be read
_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}\Z")


class AnswerReader:
    """One answer. ``feed`` it what comes; afterwards ``keeps`` says whether the connection can be used again.

    has_begun: something was received, so the server knows of the request.
    """

    __slots__ = (
        "_aside",
        "_aside_ns",
        "_buffer",
        "_feed_stream",
        "_is_events",
        "_is_steady",
        "_left",
        "_step",
        "has_begun",
        "keeps",
        "stream",
    )

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.has_begun = False
        self.keeps = True
        self._feed_stream = stream.feed
        self._aside: list[bytes] = []
        self._aside_ns: list[int] = []
        stream.catch_up = self.catch_up
        self._buffer = b""
        self._left = 0  # bytes of the chunk, or of the body with a length, that are still to come
        self._is_events = False
        self._is_steady = False  # a chunk of a stream of events begins
        # Reads from a position and gives the next one, or -1: more bytes are needed.
        self._step: Callable[[AnswerReader, bytes, int, int], int] | None = AnswerReader._head

    def feed(self, data: bytes, now_ns: int) -> bool:
        """The next bytes. Whether the answer is over; its stream has been told."""
        # Nearly always; an answer does not end so: its last chunk is an empty one.
        if self._is_steady and data.endswith(b"}\n\n\r\n"):
            aside = self._aside
            aside.append(data)
            self._aside_ns.append(now_ns)
            if len(aside) < MOST_ASIDE:
                return False
            self.catch_up()
            return self._step is None
        self.catch_up()
        return self._read(data, now_ns)

    def catch_up(self) -> None:
        """Read what was put aside."""
        if self._aside:
            pieces, times = self._aside, self._aside_ns
            self._aside, self._aside_ns = [], []
            for data, now_ns in zip(pieces, times, strict=True):
                if self._read(data, now_ns):
                    break

    def _read(self, data: bytes, now_ns: int) -> bool:
        """Whether the answer is over."""
        if self._is_steady and not self._buffer:  # nearly always: one whole chunk, read without further ado
            line_end = data.find(b"\r\n")
            size = len(data) - line_end - 4
            if size > 0 and data[:line_end].lower() == b"%x" % size and data.endswith(b"\r\n"):
                self._feed_stream(data[line_end + 2 : -2], now_ns)
                return False
        self.has_begun = True
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        position = 0
        while self._step is not None:
            following = self._step(self, data, position, now_ns)
            if following < 0:
                self._is_steady = self._is_events and self._step is AnswerReader._chunk_line
                return False
            position = following
        if position < len(data):  # more than was asked for
            self.keeps = False
        self._is_steady = False
        return True

    def end(self, now_ns: int) -> None:
        """The connection has ended, without an error."""
        self.catch_up()
        if self._step is AnswerReader._until_end:
            is_told = self.stream.has_ended or not self._is_events
            self.stream.finish(now_ns, None if is_told else "the connection ended before the answer did")
        elif self._step is AnswerReader._head:
            self.stream.finish(now_ns, "the connection ended without an answer")
        elif self._step is not None:
            self.stream.finish(now_ns, "the connection ended in the middle of the answer")
        self._step = None

    def _head(self, data: bytes, position: int, now_ns: int) -> int:
        end = data.find(b"\r\n\r\n", position)
        if end < 0:
            if not b"HTTP/1.".startswith(data[position : position + 7]):
                return self._fail(f"no HTTP: {data[position : position + 60]!r}", now_ns)
            return self._wait(data, position, now_ns)
        first, *lines = data[position:end].split(b"\r\n")
        status = first.split(b" ", 2)
        if len(status) < 2 or not first.startswith(b"HTTP/1.") or not re.match(rb"[1-9]\d\d\Z", status[1]):
            return self._fail(f"no HTTP: {first[:60]!r}", now_ns)
        code = int(status[1])
        if code >= 200:  # else something that comes before the answer
            problem = self._on_headers(code, first.startswith(b"HTTP/1.0"), lines)
            if problem:
                return self._fail(problem, now_ns)
            if self._step is None:
                self.stream.finish(now_ns)
        return end + 4

    def _on_headers(self, code: int, is_old: bool, lines: list[bytes]) -> str:
        """What follows the head; or what is wrong with it."""
        stream = self.stream
        stream.status = code
        options = b""
        coding, lengths = b"", set()
        for line in lines:
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip()
            if name == b"transfer-encoding":
                coding = value.lower()
            elif name == b"content-length":
                lengths.add(value)
            elif name == b"content-type":
                self._is_events = value.lower().startswith(b"text/event-stream")
            elif name == b"content-encoding" and value.lower() != b"identity":
                return f"the answer is compressed ({value.decode('latin-1')}), which nobody asked for"
            elif name == b"connection":
                options = value.lower()
            elif name == b"location":
                stream.location = value.decode("latin-1")
            elif name == b"retry-after" and re.match(rb"\d+(\.\d+)?\Z", value):
                stream.retry_after_s = float(value)
        tokens = {option.strip() for option in options.split(b",")}
        self.keeps = b"keep-alive" in tokens if is_old else b"close" not in tokens
        if code in (204, 304):
            self._step = None
        elif coding:
            if coding != b"chunked":
                return f"the answer's transfer coding is {coding.decode('latin-1')}; only chunked is known"
            self._step = AnswerReader._chunk_line
        elif lengths:
            if len(lengths) > 1 or not re.match(rb"\d{1,15}\Z", length := lengths.pop()):
                return "the answer has no proper Content-Length"
            self._left = int(length)
            self._step = AnswerReader._body if self._left else None
        else:
            self.keeps = False
            self._step = AnswerReader._until_end
        return ""

    def _chunk_line(self, data: bytes, position: int, now_ns: int) -> int:
        end = data.find(b"\r\n", position)
        if end < 0:
            return self._wait(data, position, now_ns)
        size = data[position:end].partition(b";")[0].strip()
        if not _SIZE.match(size):
            return self._fail(f"no chunk: {data[position : position + 40]!r}", now_ns)
        self._left = int(size, 16)
        self._step = AnswerReader._chunk if self._left else AnswerReader._trailer
        return end + 2

    def _chunk(self, data: bytes, position: int, now_ns: int) -> int:
        position = self._payload(data, position, now_ns)
        if position >= 0 and not self._left and self._step is not None:
            self._step = AnswerReader._chunk_end
        return position

    def _chunk_end(self, data: bytes, position: int, now_ns: int) -> int:
        if len(data) < position + 2:
            return self._wait(data, position, now_ns)
        if data[position : position + 2] != b"\r\n":
            return self._fail(f"no end of a chunk: {data[position : position + 40]!r}", now_ns)
        self._step = AnswerReader._chunk_line
        return position + 2

    def _trailer(self, data: bytes, position: int, now_ns: int) -> int:
        end = data.find(b"\r\n", position)
        if end < 0:
            return self._wait(data, position, now_ns)
        if end == position:
            self._step = None
            self.stream.finish(now_ns)
        return end + 2

    def _body(self, data: bytes, position: int, now_ns: int) -> int:
        position = self._payload(data, position, now_ns)
        if position >= 0 and not self._left and self._step is not None:
            self._step = None
            self.stream.finish(now_ns)
        return position

    def _until_end(self, data: bytes, position: int, now_ns: int) -> int:
        self._left = len(data) - position
        self._payload(data, position, now_ns)
        return -1

    def _payload(self, data: bytes, position: int, now_ns: int) -> int:
        """As much of a chunk or body as there is: nothing of it waits here."""
        piece = data[position : position + self._left] if position or len(data) > self._left else data
        if not piece:
            return -1
        self._left -= len(piece)
        if self._is_events:
            self._feed_stream(piece, now_ns)
        else:
            self.stream.body += piece
            if len(self.stream.body) > BODY_LIMIT:
                return self._fail(f"the reply is no stream of events and longer than {BODY_LIMIT:,} bytes", now_ns)
        return position + len(piece)

    def _wait(self, data: bytes, position: int, now_ns: int) -> int:
        if len(data) - position > HEAD_LIMIT:
            return self._fail(f"a line or head of more than {HEAD_LIMIT:,} bytes", now_ns)
        self._buffer = data[position:]
        return -1

    def _fail(self, message: str, now_ns: int) -> int:
        """Nothing that follows can be read."""
        self._step = None
        self.keeps = False
        self.stream.finish(now_ns, message)
        return 0
