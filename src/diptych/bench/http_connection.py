"""One connection to a server, on a socket of its own: opening, sending, receiving, and what its end means.

The socket is read here and not by the event loop's transports because they do not say when bytes came (clock.py).
"""

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from diptych.bench.clock import ANCILLARY_BYTES, arrival_ns, ask_for_arrival_times, now_ns
from diptych.bench.http_response import HttpResponse
from diptych.bench.tls_layer import TlsLayer
from diptych.bench.token_stream import TokenStream
from diptych.control.slo import NS_PER_S

SocketAddress = tuple[int, Any]  # (address family, address)

READ_BYTES = 1 << 14
RETRY_NS = NS_PER_S  # a kept connection that ends so soon after a request had ended before it


class ConnectionOwner(Protocol):
    """Is called when the state of a connection changes."""

    def on_open(self, connection: "HttpConnection") -> None:
        """Take in that the connection is open."""
        ...

    def on_idle(self, connection: "HttpConnection") -> None:
        """A response is over, and another request may be sent."""
        ...

    def on_closed(self, connection: "HttpConnection") -> None:
        """Take in that the connection was closed, by either side."""
        ...

    def on_unanswered(self, request: bytes, stream: TokenStream) -> None:
        """The server had closed a kept connection before this was sent on it: the request was never read."""
        ...


def tcp_socket(family: int) -> socket.socket:
    """A new socket that does not block and says when bytes came."""
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ask_for_arrival_times(opened)
    except OSError:
        opened.close()
        raise
    return opened


class HttpConnection:
    """One socket; one request at a time. ``open`` it first; ``send`` may follow before it is connected.

    addresses: of the server, tried in this order. name: of the server, for error messages. tls: makes the encryption.
    address: connected, or tried last. is_open: a request can leave at once. idle_since_ns: when it
    had last nothing to do; 0: never.
    """

    def __init__(
        self,
        owner: ConnectionOwner,
        loop: asyncio.AbstractEventLoop,
        addresses: Sequence[SocketAddress],
        name: str,
        tls: Callable[[], TlsLayer] | None = None,
        new_socket: Callable[[int], socket.socket] = tcp_socket,
    ) -> None:
        self._owner = owner
        self._loop = loop
        self._untried = list(addresses)
        self._name = name
        self._new_tls = tls
        self._new_socket = new_socket
        self._socket: socket.socket | None = None
        self._tls: TlsLayer | None = None
        self._is_connected = self._is_watching_writes = False
        self._unsent = memoryview(b"")
        self._response: HttpResponse | None = None
        self._request = b""
        self._sent_ns = 0
        self._was_idle = False  # before the request that is on its way
        self._problem: OSError | None = None
        self.address: SocketAddress = addresses[0]
        self.is_open = False
        self.idle_since_ns = 0

    @property
    def is_closed(self) -> bool:
        """Nothing can be sent any more."""
        return self._socket is None

    def open(self) -> None:
        """Connect to the next address, until one does not refuse at once."""
        while self._untried:
            self.address = self._untried.pop(0)
            try:
                self._socket = self._new_socket(self.address[0])
                code = self._socket.connect_ex(self.address[1])
            except OSError as error:
                code, self._problem = -1, error
            if code == errno.EINPROGRESS:
                self._watch_writes(True)
                return
            if code == 0:
                self._on_writable()
                return
            if code > 0:
                self._problem = OSError(code, os.strerror(code))
            self._drop_socket()
        self._lost(self._problem)

    def send(self, request: bytes, stream: TokenStream) -> None:
        """Send a request; the stream gets the response."""
        assert self._response is None
        if self._socket is None:
            stream.finish(now_ns(), f"cannot connect to {self._name}: {_words(self._problem)}")
            return
        self._response, self._request = HttpResponse(stream), request
        self._was_idle = self.idle_since_ns > 0
        self._sent_ns = now_ns()
        stream.hang_up = self.abort
        if self.is_open:
            try:
                self._send_request()
            except OSError as error:
                self._lost(error)

    def abort(self) -> None:
        """Close at once; a request that is on its way is given up without a word to its stream."""
        if self._response is not None:
            self._response.close()
            self._response = None
        self._drop_socket()
        self.is_open = False
        self._owner.on_closed(self)

    def _on_writable(self) -> None:
        assert self._socket is not None
        try:
            if self._is_connected:
                self._flush()
            elif code := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            else:
                self._on_connected(self._socket)
        except OSError as error:
            self._lost(error)

    def _on_readable(self) -> None:
        assert self._socket is not None
        try:
            data, ancillary, _, _ = self._socket.recvmsg(READ_BYTES, ANCILLARY_BYTES)
            now = arrival_ns(ancillary)
            if not data:
                self._lost(None)
            elif self._tls is None:
                self._on_data(data, now)
            else:
                self._on_encrypted(self._tls, data, now)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(error)

    def _on_connected(self, connected: socket.socket) -> None:
        self._is_connected = True
        self._watch_writes(False)
        self._loop.add_reader(connected.fileno(), self._on_readable)
        if self._new_tls is None:
            self._on_open()
        else:
            self._tls = self._new_tls()
            self._write(self._tls.start())

    def _on_open(self) -> None:
        self.is_open = True
        self._owner.on_open(self)
        if self._response is not None:
            self._send_request()

    def _on_encrypted(self, tls: TlsLayer, data: bytes, now: int) -> None:
        plain, reply = tls.receive(data)
        if reply:
            self._write(reply)
        if tls.is_ready and not self.is_open:
            self._on_open()
        if plain:
            self._on_data(plain, now)
        if tls.has_ended and self._socket is not None:
            self._lost(None)

    def _on_data(self, data: bytes, now: int) -> None:
        response = self._response
        if response is None:  # no request asked for it
            self.abort()
        elif response.feed(data, now):
            self._response = None
            if response.keeps and not self._unsent:
                self.idle_since_ns = now_ns()
                self._owner.on_idle(self)
            else:
                self.abort()

    def _send_request(self) -> None:
        self._write(self._request if self._tls is None else self._tls.encrypt(self._request))

    def _write(self, data: bytes) -> None:
        """Send what the kernel takes now, and the rest when it takes more."""
        self._unsent = memoryview(bytes(self._unsent) + data if self._unsent else data)
        self._flush()

    def _flush(self) -> None:
        assert self._socket is not None
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        self._watch_writes(len(self._unsent) > 0)

    def _watch_writes(self, wanted: bool) -> None:
        assert self._socket is not None
        if wanted and not self._is_watching_writes:
            self._loop.add_writer(self._socket.fileno(), self._on_writable)
        elif self._is_watching_writes and not wanted:
            self._loop.remove_writer(self._socket.fileno())
        self._is_watching_writes = wanted

    def _lost(self, error: OSError | None) -> None:
        """The connection was ended, by the server (None) or by an error; or it could not be opened."""
        self._problem = error
        if not self.is_open and self._untried:
            self._drop_socket()
            self.open()
            return
        was_open, response = self.is_open, self._response
        self._response = None
        self.abort()
        if response is None:
            return
        now = now_ns()
        if not was_open:
            response.stream.finish(now, f"cannot connect to {self._name}: {_words(error)}")
        elif self._was_idle and not response.has_begun and now - self._sent_ns < RETRY_NS:
            self._owner.on_unanswered(self._request, response.stream)
        elif error is not None:
            response.stream.finish(now, f"connection lost: {_words(error)}")
        else:
            response.end(now)
        response.close()

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
        self._socket = self._tls = None
        self._unsent = memoryview(b"")
        self._is_connected = self._is_watching_writes = False


def _words(error: OSError | None) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if error is None:
        return "closed by the server"
    if isinstance(error, ssl.SSLError):
        return f"no TLS: {error.reason or error}"
    return os.strerror(error.errno) if error.errno else str(error)
