"""HTTP/1.1 with streamed responses: the address of a server, and which connection a request goes to.

No redirection is followed and no proxy is used: what is measured is the server that was named.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from diptych.bench.clock import now_ns
from diptych.bench.http_connection import HttpConnection, SocketAddress
from diptych.bench.tls_layer import TlsLayer
from diptych.bench.token_stream import TokenStream
from diptych.control.slo import NS_PER_S
from diptych.http1.address import Address

MOST_OPENING = 64  # connections that wait for the server at once, ahead of requests
KEPT_NS = 2 * NS_PER_S  # an idle connection older than this may be closed by the server at any moment


class HttpClient:
    """Connections to a server. Idle connections are used again; as many are opened as are needed."""

    def __init__(self, address: Address, headers: Mapping[str, str] | None = None) -> None:
        self._address = address
        self._tls: Callable[[], TlsLayer] | None = None
        if address.is_tls:
            self._tls = partial(TlsLayer, ssl.create_default_context(), address.host)
        lines = [f"Host: {address.netloc}", "Accept: text/event-stream, application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._headers = "\r\n".join(lines)
        self._addresses: list[SocketAddress] = []  # of the host: looked up once; later only that which answered first
        self._connections: set[HttpConnection] = set()  # all that are not closed
        self._idle: deque[HttpConnection] = deque()  # at the left those that were opened ahead of a request
        self._opening: set[HttpConnection] = set()  # ahead of a request
        self._looked_ns = 0  # for idle connections that are too old
        self._lookups: set[asyncio.Task[None]] = set()
        self.num_retried = 0

    def head(self, method: str, path: str) -> bytes:
        """The constant part of a request; ``Content-Length`` and the body follow."""
        return f"{method} {self._address.base}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()

    def post(self, head: bytes, body: bytes, stream: TokenStream) -> None:
        """Send now; ``stream.done`` resolves when the response is over. A failing server is an error of the stream."""
        request = b"%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
        stream.sent_ns = now = now_ns()
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed and now - connection.idle_since_ns < KEPT_NS:
                connection.send(request, stream)
                return
            connection.abort()
        self._send_on_new(request, stream)

    async def fetch(self, method: str, path: str) -> TokenStream:
        """A request whose response is no stream: status and body."""
        stream = TokenStream(now_ns())
        self.post(self.head(method, path), b"", stream)
        await stream.done
        return stream

    def connect_ahead(self, number: int) -> bool:
        """Open a connection, if fewer than ``number`` are idle; returns whether it was needed. It does not matter if it
        fails: the request that would have used it opens another, and has the error."""
        if len(self._opening) >= MOST_OPENING or not self._addresses:
            return False
        if len(self._idle) >= number and (now := now_ns()) - self._looked_ns > KEPT_NS // 8:
            self._looked_ns = now
            for connection in list(self._idle):
                if connection.is_closed or now - connection.idle_since_ns > KEPT_NS:
                    self._idle.remove(connection)
                    connection.abort()
        if len(self._idle) >= number:
            return False
        connection = self._open()
        if connection.is_closed:
            return False
        connection.idle_since_ns = now_ns()
        if not connection.is_open:
            self._opening.add(connection)
        self._idle.appendleft(connection)
        return True

    def on_open(self, connection: HttpConnection) -> None:
        """The address that answered first is the only one from then on."""
        self._opening.discard(connection)
        if self._addresses[0] != connection.address:
            self._addresses = [connection.address]

    def on_idle(self, connection: HttpConnection) -> None:
        """Give the connection its next request, if there is one."""
        self._idle.append(connection)

    def on_closed(self, connection: HttpConnection) -> None:
        """Forget it; among the idle connections it is skipped later."""
        self._connections.discard(connection)
        self._opening.discard(connection)

    def on_unanswered(self, request: bytes, stream: TokenStream) -> None:
        """Send the request again, on a new connection."""
        self.num_retried += 1
        self._send_on_new(request, stream)

    async def close(self) -> None:
        """Close every connection."""
        for task in self._lookups:
            task.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)
        for connection in list(self._connections):
            connection.abort()
        self._idle.clear()

    def _send_on_new(self, request: bytes, stream: TokenStream) -> None:
        if self._addresses:
            self._open().send(request, stream)
            return
        task = asyncio.get_running_loop().create_task(self._look_up(request, stream))
        self._lookups.add(task)
        task.add_done_callback(self._lookups.discard)

    async def _look_up(self, request: bytes, stream: TokenStream) -> None:
        address = self._address
        try:
            found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            stream.finish(now_ns(), f"cannot connect to {address.netloc}: {error.strerror or error}")
            return
        self._addresses = self._addresses or [(family, place) for family, _, _, _, place in found]
        if not stream.done.done():
            self._send_on_new(request, stream)

    def _open(self) -> HttpConnection:
        """A connection that is opening."""
        loop = asyncio.get_running_loop()
        connection = HttpConnection(self, loop, self._addresses, self._address.netloc, self._tls)
        self._connections.add(connection)
        connection.open()
        return connection
