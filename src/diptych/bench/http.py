"""HTTP/1.1 with streamed answers: which connection a request goes to.

Owns the address and the pool of connections (connection.py); an answer's framing is framing.py's. Must never read a
token, and never follows a redirection: what is measured is the server that was named.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from diptych.bench.client_stream import TokenStream
from diptych.bench.http_connection import Connection, Place, TlsConnection
from diptych.bench.http_connection import now_ns as now_ns
from diptych.bench.poller import Poller
from diptych.bench.poller import poller as new_poller
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S

MOST_OPENING = 64  # connections that wait for the server at once, ahead of requests
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
        if parts.username is not None or parts.password is not None:
            raise ConfigError("url has a user or a password in it; give a key with --api-key", param="url")
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


class Client:
    """Connections to one server. Idle ones are used again; as many are opened as are needed. No proxy is ever used."""

    def __init__(self, address: Address, headers: Mapping[str, str] | None = None) -> None:
        self._address = address
        self._tls = ssl.create_default_context() if address.is_tls else None
        lines = [f"Host: {address.netloc}", "Accept: text/event-stream, application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._headers = "\r\n".join(lines)
        self._places: list[Place] = []  # that the name stands for: looked up once, with the one that answered first
        self._poller: Poller | None = None
        self._connections: set[Connection] = set()
        self._idle: deque[Connection] = deque()  # or opening, ahead of a request: these at the left
        self._opening: set[Connection] = set()  # ahead of a request
        self._looked_ns = 0  # for idle ones that are stale
        self._looking_up: set[asyncio.Task[None]] = set()
        self.num_retried = 0

    def head(self, method: str, path: str) -> bytes:
        """The constant part of a request; ``Content-Length`` and the body follow."""
        return f"{method} {self._address.base}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()

    def post(self, head: bytes, body: bytes, stream: TokenStream) -> None:
        """Send now; ``stream.done`` says when it is over. Never raises for what the server does."""
        request = b"%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
        stream.sent_ns = now = now_ns()
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_gone and now - connection.idle_since_ns < KEPT_S * NS_PER_S:
                connection.send(request, stream)
                return
            connection.abort()
        self._send_on_new(request, stream)

    async def fetch(self, method: str, path: str, body: bytes = b"") -> TokenStream:
        """One request whose reply is no stream: status and body."""
        stream = TokenStream(now_ns())
        self.post(self.head(method, path), body, stream)
        await stream.done
        return stream

    def connect_ahead(self, number: int) -> bool:
        """Open one more connection towards having so many that are idle; False when none is needed now. One that fails
        to open does not matter: the request that would have used it opens another, and says what is wrong."""
        if len(self._opening) >= MOST_OPENING or not self._places:
            return False
        if len(self._idle) >= number and (now := now_ns()) - self._looked_ns > KEPT_S / 8 * NS_PER_S:
            self._looked_ns = now
            for stale in [one for one in self._idle if one.is_gone or now - one.idle_since_ns > KEPT_S * NS_PER_S]:
                self._idle.remove(stale)
                stale.abort()
        if len(self._idle) >= number:
            return False
        connection = self._open()
        if connection.is_gone:
            return False
        connection.idle_since_ns = now_ns()
        if not connection.is_open:
            self._opening.add(connection)
        self._idle.appendleft(connection)
        return True

    def linger(self, may: bool) -> None:
        """Whether what has come may be read some milliseconds later, which is cheaper when much comes (poller.py)."""
        if self._poller is not None:
            self._poller.may_linger = may and self._tls is None

    def on_open(self, connection: Connection) -> None:
        """The address that answered first is asked from then on."""
        self._opening.discard(connection)
        if self._places[0] != connection.place:
            self._places = [connection.place]

    def on_over(self, connection: Connection, *, keeps: bool) -> None:
        """It has nothing to do."""
        if keeps:
            connection.idle_since_ns = now_ns()
            self._idle.append(connection)
        else:
            connection.abort()

    def on_closed(self, connection: Connection) -> None:
        """It is gone; among the idle ones it is found to be so when one is needed."""
        self._connections.discard(connection)
        self._opening.discard(connection)

    def on_unanswered(self, request: bytes, stream: TokenStream) -> None:
        """Send it again, on a connection that nobody has closed."""
        self.num_retried += 1
        self._send_on_new(request, stream)

    async def close(self) -> None:
        """Close every connection."""
        for task in self._looking_up:
            task.cancel()
        await asyncio.gather(*self._looking_up, return_exceptions=True)
        for connection in list(self._connections):
            connection.abort()
        self._idle.clear()
        if self._poller is not None:
            self._poller.close()
            self._poller = None

    def _send_on_new(self, request: bytes, stream: TokenStream) -> None:
        if self._places:
            connection = self._open()
            connection.send(request, stream)
            return
        task = asyncio.get_running_loop().create_task(self._look_up(request, stream))
        self._looking_up.add(task)
        task.add_done_callback(self._looking_up.discard)

    async def _look_up(self, request: bytes, stream: TokenStream) -> None:
        address = self._address
        try:
            found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            stream.finish(now_ns(), f"cannot connect to {address.netloc}: {error.strerror or error}")
            return
        self._places = self._places or [(family, place) for family, _, _, _, place in found]
        if not stream.done.done():
            self._send_on_new(request, stream)

    def _open(self) -> Connection:
        """A connection that is opening."""
        poller = self._poller = self._poller or new_poller()
        name = self._address.netloc
        if self._tls is None:
            connection = Connection(self, poller, self._places, name)
        else:
            connection = TlsConnection(self, poller, self._places, name, (self._tls, self._address.host))
        self._connections.add(connection)
        connection.open()
        return connection
