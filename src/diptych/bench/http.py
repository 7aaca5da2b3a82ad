"""HTTP/1.1 with streamed answers on asyncio, with little between the socket and the token.

Owns connections: opening, keeping, framing (chunked, by length, until close). Must never read a token: it hands the
bytes of an answer to its TokenStream with the time at which they were received.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from diptych.bench.stream import TokenStream
from diptych.control.errors import ConfigError

now_ns = time.perf_counter_ns  # the clock of every time stamp in this package
KEPT_S = 2.0  # an idle connection older than this may be closed by the server at any moment


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens; ``base``: the path before /v1."""

    host: str
    port: int
    is_tls: bool
    base: str

    @classmethod
    def parse(cls, url: str) -> "Address":
        """``http://host:port``, with or without /v1. Raises ConfigError."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"url is {url!r}; its port is no number", param="url") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"url is {url!r}; expected http://host:port", param="url")
        is_tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, base)

    @property
    def netloc(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Connection(asyncio.Protocol):
    """One connection; one answer at a time."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._stream: TokenStream | None = None
        self._request = b""
        self._buffer = b""
        self._in_head = True
        self._is_chunked = False
        self._is_events = False
        self._left = -1  # bytes of a body with a length; -1: until the connection ends
        self._keeps = True
        self._is_steady = False  # in the middle of a chunked stream of events
        self._got_bytes = False
        self._was_used = False
        self.idle_since_ns = 0

    @property
    def is_open(self) -> bool:
        """Whether something can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, stream: TokenStream) -> None:
        """Ask; the stream gets what comes back."""
        assert self._transport is not None and self._stream is None
        self._stream, self._request = stream, request
        stream.connection = self
        self._in_head, self._got_bytes, self._is_chunked, self._is_events = True, False, False, False
        self._left, self._keeps, self._is_steady = -1, True, False
        self._transport.write(request)

    def abort(self) -> None:
        """Close at once; nobody is told."""
        self._stream = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open."""
        self._transport = cast(asyncio.Transport, transport)
        self._client.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by the other side, by an error, or by us."""
        self._transport = None
        self._client.connections.discard(self)
        stream, self._stream = self._stream, None
        if stream is None:
            return
        if self._was_used and not self._got_bytes:  # it was closed while it was idle, and nobody knew
            self._client.send_on_new(self._request, stream)
        elif exc is not None:
            stream.finish(now_ns(), f"connection lost: {exc}")
        elif self._in_head or self._is_chunked or self._left > 0:
            stream.finish(now_ns(), "the connection ended in the middle of the answer")
        else:
            stream.finish(now_ns())

    def data_received(self, data: bytes) -> None:
        """The next bytes of an answer."""
        now = now_ns()
        stream = self._stream
        if stream is None:
            return
        if self._is_steady and not self._buffer:  # nearly always: one whole chunk, read without further ado
            line_end = data.find(b"\r\n")
            size = len(data) - line_end - 4
            if size > 0 and data[:line_end].lower() == b"%x" % size:
                stream.feed(data[line_end + 2 : -2], now)
                return
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        if self._in_head:
            self._got_bytes = True
            head, mark, data = data.partition(b"\r\n\r\n")
            if not mark:
                self._buffer = head
                return
            self._on_head(head, now)
            if not data and self._left != 0:
                return
        if self._is_chunked:
            self._on_chunks(data, now)
        else:
            self._on_plain(data, now)

    def _on_head(self, head: bytes, now: int) -> None:
        assert self._stream is not None
        first, *lines = head.split(b"\r\n")
        status = first.split(b" ", 2)
        if len(status) < 2 or not first.startswith(b"HTTP/1.") or not status[1].isdigit():
            self._fail(f"no HTTP: {first[:60]!r}", now)
            return
        self._stream.status = int(status[1])
        self._keeps = first.startswith(b"HTTP/1.1")
        for line in lines:
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip().lower()
            if name == b"transfer-encoding":
                self._is_chunked = value == b"chunked"
            elif name == b"content-length" and value.isdigit():
                self._left = int(value)
            elif name == b"content-type":
                self._is_events = value.startswith(b"text/event-stream")
            elif name == b"connection" and value == b"close":
                self._keeps = False
            elif name == b"retry-after":
                try:
                    self._stream.retry_after_s = float(value)
                except ValueError:
                    self._stream.retry_after_s = None
        self._in_head = False
        self._is_steady = self._is_chunked and self._is_events

    def _on_chunks(self, data: bytes, now: int) -> None:
        """Whole chunks; a piece of one waits for its rest."""
        position = 0
        while True:
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                break
            try:
                size = int(data[position:line_end].partition(b";")[0], 16)
            except ValueError:
                self._fail(f"no chunk: {data[position : position + 40]!r}", now)
                return
            start = line_end + 2
            end = start + size
            if len(data) < end + 2:
                break
            if size == 0:
                self._finish(now)
                return
            self._on_payload(data[start:end], now)
            position = end + 2
        self._buffer = data[position:]

    def _on_plain(self, data: bytes, now: int) -> None:
        if data:
            self._on_payload(data, now)
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._finish(now)

    def _on_payload(self, payload: bytes, now: int) -> None:
        stream = self._stream
        if stream is None:
            return
        if self._is_events:
            stream.feed(payload, now)
        else:
            stream.body += payload

    def _fail(self, message: str, now: int) -> None:
        stream = self._stream
        self.abort()
        if stream is not None:
            stream.finish(now, message)

    def _finish(self, now: int) -> None:
        stream, self._stream, self._buffer = self._stream, None, b""
        self._was_used = True
        if stream is not None:
            stream.finish(now)
        if self._keeps:
            self.idle_since_ns = now
            self._client.keep(self)
        elif self._transport is not None:
            self._transport.close()


class Client:
    """Connections to one server. Idle ones are used again; as many are opened as are needed."""

    def __init__(self, address: Address, headers: Mapping[str, str] | None = None) -> None:
        self._address = address
        self._host = address.host
        self._tls = ssl.create_default_context() if address.is_tls else None
        lines = [f"Host: {address.netloc}", "Accept: text/event-stream, application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._headers = "\r\n".join(lines)
        self.connections: set[Connection] = set()  # that are open
        self._idle: list[Connection] = []
        self._opening: set[asyncio.Task[None]] = set()

    def head(self, method: str, path: str) -> bytes:
        """The constant part of a request; ``Content-Length`` and the body follow."""
        return f"{method} {self._address.base}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()

    def post(self, head: bytes, body: bytes, stream: TokenStream) -> None:
        """Send now; ``stream.done`` says when it is over. Never raises for what the server does."""
        request = b"%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
        stream.sent_ns = now = now_ns()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since_ns < KEPT_S * 1e9:
                connection.send(request, stream)
                return
            connection.abort()
        self.send_on_new(request, stream)

    async def fetch(self, method: str, path: str, body: bytes = b"") -> TokenStream:
        """One request whose reply is no stream: status and body."""
        stream = TokenStream(now_ns())
        self.post(self.head(method, path), body, stream)
        await stream.done
        return stream

    def send_on_new(self, request: bytes, stream: TokenStream) -> None:
        """Open a connection and send on it."""
        task = asyncio.get_running_loop().create_task(self._open(request, stream))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def keep(self, connection: Connection) -> None:
        """It has nothing to do."""
        self._idle.append(connection)

    async def close(self) -> None:
        """Close every connection, and forget those that are being opened."""
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in list(self.connections):
            connection.abort()
        self._idle.clear()
        while self.connections:
            await asyncio.sleep(0)

    async def _connect(self) -> Connection:
        """The address that answered first is asked from then on: names are looked up once."""
        name = self._address.host if self._tls else None
        transport, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self), self._host, self._address.port, ssl=self._tls, server_hostname=name
        )
        self._host = transport.get_extra_info("peername")[0]
        return connection

    async def _open(self, request: bytes, stream: TokenStream) -> None:
        try:
            connection = await self._connect()
        except OSError as error:
            stream.finish(now_ns(), f"cannot connect to {self._address.netloc}: {error.strerror or error}")
            return
        if stream.done.done():
            connection.abort()
        else:
            connection.send(request, stream)
