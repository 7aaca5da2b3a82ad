"""One connection to a server, on a socket of its own: opening, sending, and when bytes came.

Owns the socket. Must never read a token or the framing of an answer (framing.py), and never choose between connections.

The time of what is received is the kernel's where it tells (Linux, without TLS): a client that is busy with others, or
asks its sockets at intervals, stamps a token no later for that.
"""

import errno
import os
import socket
import ssl
import struct
import sys
import time
from typing import Any, Protocol

from diptych.bench.client_stream import TokenStream
from diptych.bench.framing import AnswerReader
from diptych.bench.poller import READABLE, WRITABLE, Poller
from diptych.control.slo import NS_PER_S

now_ns = time.perf_counter_ns  # the clock of every time stamp in this package
# (address family, address): where a server may be reached.
Place = tuple[int, Any]

_SO_TIMESTAMPNS = 35  # Linux: a time of arrival with everything received (socket(7)); Python has no name for it
_TIME = struct.Struct("qq")  # seconds and nanoseconds of the wall clock
_MOST_AGE_NS = 10 * NS_PER_S  # an older time of arrival is none: somebody has set the clock
_READ_BYTES = 1 << 14
RETRY_NS = NS_PER_S  # a kept connection that ends so soon after a request had ended before it


class Owner(Protocol):
    """Who is told what becomes of a connection."""

    def on_open(self, connection: "Connection") -> None:
        """It is connected."""
        ...

    def on_over(self, connection: "Connection", *, keeps: bool) -> None:
        """An answer is over; keeps: another request may be sent."""
        ...

    def on_closed(self, connection: "Connection") -> None:
        """It is gone."""
        ...

    def on_unanswered(self, request: bytes, stream: TokenStream) -> None:
        """The server had closed a kept connection before this was sent on it: nobody has seen the request."""
        ...


class Connection:
    """One socket; one answer at a time. places: to be tried in this order. Opens at once; ``send`` may come before."""

    def __init__(self, owner: Owner, poller: Poller, places: list[Place], name: str) -> None:
        self._owner = owner
        self._poller = poller
        self._places = places
        self._name = name
        self._socket: socket.socket | None = None
        self._reader: AnswerReader | None = None
        self._request = b""
        self._problem: OSError | None = None  # with the place that was tried last
        self._sent_ns = 0
        self._unsent: memoryview | None = None
        self._tried = self._watched = 0
        self._has_waited = False  # it was idle before the request that is on its way
        self.is_open = False
        self.idle_since_ns = 0  # 0: it never was

    @property
    def place(self) -> Place:
        """Where it is connected, or tries to be."""
        return self._places[max(0, self._tried - 1)]

    @property
    def is_gone(self) -> bool:
        """Nothing can be sent any more."""
        return self._socket is None

    def open(self) -> None:
        """Try the next place, until one does not refuse at once."""
        while self._tried < len(self._places):
            family, address = self._places[self._tried]
            self._tried += 1
            try:
                opened = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                self._problem = error
                continue
            try:
                opened.setblocking(False)
                self._prepare(opened)
                opened.connect(address)
            except BlockingIOError:
                pass
            except OSError as error:
                self._problem = error
                opened.close()
                continue
            self._socket = opened
            self.is_open = self._is_connected(opened)
            self._watched = READABLE if self.is_open else READABLE | WRITABLE
            self._poller.watch(opened.fileno(), self, self._watched)
            if self.is_open:
                self._owner.on_open(self)
            return
        self._lost(self._problem)

    def send(self, request: bytes, stream: TokenStream) -> None:
        """Ask; the stream gets what comes back."""
        assert self._reader is None
        if self._socket is None:
            stream.finish(now_ns(), f"cannot connect to {self._name}: {_words(self._problem)}")
            return
        self._reader, self._request = AnswerReader(stream), request
        self._unsent = memoryview(request)
        self._has_waited = self.idle_since_ns > 0
        self._sent_ns = now_ns()
        stream.connection = self
        if self.is_open:
            try:
                self._flush()
            except OSError as error:
                self._lost(error)

    def abort(self) -> None:
        """Close at once; nobody is told but the owner."""
        self._reader = None
        self._close()

    def on_event(self, events: int) -> None:
        """The kernel says that something can be done."""
        try:
            if not self.is_open:
                self._go_on_opening()
                return
            if events & WRITABLE and self._unsent is not None:
                self._flush()
            if events & ~WRITABLE and self._socket is not None:
                self._receive(self._socket)
        except OSError as error:
            self._lost(error)

    def _prepare(self, opened: socket.socket) -> None:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            opened.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)

    def _is_connected(self, opened: socket.socket) -> bool:
        """At once, as to this machine."""
        try:
            opened.getpeername()
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            return False
        return True

    def _go_on_opening(self) -> None:
        assert self._socket is not None
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, "")
        self._has_opened()

    def _has_opened(self) -> None:
        assert self._socket is not None
        self.is_open = True
        self._owner.on_open(self)
        self._flush()

    def _write(self, data: memoryview) -> int:
        """Bytes that the kernel took."""
        assert self._socket is not None
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def _flush(self) -> None:
        assert self._socket is not None
        unsent, self._unsent = self._unsent, None
        while unsent:
            count = self._write(unsent)
            unsent = unsent[count:]
            if not count:
                self._unsent = unsent
                break
        wanted = READABLE if self._unsent is None else READABLE | WRITABLE
        if wanted != self._watched:
            self._watched = wanted
            self._poller.change(self._socket.fileno(), wanted)

    def _receive(self, opened: socket.socket) -> None:
        reader = self._reader
        try:
            data, extra, _, _ = opened.recvmsg(_READ_BYTES, 64)
            now = now_ns() - (_age_ns(extra[0][2]) if extra else 0)
        except BlockingIOError:
            return
        if data and reader is not None and not reader.feed(data, now):
            return  # nearly always
        self._on_change(data, now)

    def _on_change(self, data: bytes, now: int) -> None:
        """The connection has ended, somebody sends what nobody has asked for, or an answer is over."""
        reader = self._reader
        if not data:
            self._lost(None)
        elif reader is None:
            self._close()
        else:
            self._reader = None
            self._owner.on_over(self, keeps=reader.keeps and self._unsent is None)

    def _lost(self, error: OSError | None) -> None:
        """It ended, by the other side or by an error; or it could not be opened."""
        if not self.is_open and self._tried < len(self._places):
            self._drop_socket()
            self.open()
            return
        was_open, reader = self.is_open, self._reader
        self._reader = None
        self._close()
        if reader is None:
            return
        now = now_ns()
        if not was_open:
            reader.stream.finish(now, f"cannot connect to {self._name}: {_words(error)}")
        elif self._has_waited and not reader.has_begun and now - self._sent_ns < RETRY_NS:
            self._owner.on_unanswered(self._request, reader.stream)
        elif error is not None:
            reader.stream.finish(now, f"connection lost: {_words(error)}")
        else:
            reader.end(now)

    def _close(self) -> None:
        if self._socket is not None:
            self._drop_socket()
        self.is_open = False
        self._owner.on_closed(self)

    def _drop_socket(self) -> None:
        assert self._socket is not None
        self._poller.forget(self._socket.fileno())
        self._socket.close()
        self._socket = None


class TlsConnection(Connection):
    """The same, encrypted. The times of what is received are those of its reading."""

    def __init__(
        self, owner: Owner, poller: Poller, places: list[Place], name: str, tls: tuple[ssl.SSLContext, str]
    ) -> None:
        super().__init__(owner, poller, places, name)
        self._context, self._server_name = tls
        self._tls: ssl.SSLSocket | None = None
        poller.may_linger = False

    def _prepare(self, opened: socket.socket) -> None:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _is_connected(self, opened: socket.socket) -> bool:
        return False  # there is a handshake to make

    def _go_on_opening(self) -> None:
        assert self._socket is not None
        if self._tls is None:
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, "")
            self._tls = self._context.wrap_socket(
                self._socket, server_hostname=self._server_name, do_handshake_on_connect=False
            )
            self._socket = self._tls
        try:
            self._tls.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wish:
            self._watched = READABLE if isinstance(wish, ssl.SSLWantReadError) else READABLE | WRITABLE
            self._poller.change(self._tls.fileno(), self._watched)
        else:
            self._has_opened()

    def _write(self, data: memoryview) -> int:
        assert self._tls is not None
        try:
            return self._tls.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def _receive(self, opened: socket.socket) -> None:
        """All of it: what was decrypted already makes no file readable."""
        while self._socket is opened:
            try:
                data = opened.recv(_READ_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            now = now_ns()
            if not data or self._reader is None or self._reader.feed(data, now):
                self._on_change(data, now)

    def _drop_socket(self) -> None:
        super()._drop_socket()
        self._tls = None


def _age_ns(time_of_arrival: bytes) -> int:
    """How long ago that was; 0 when somebody has set the clock since."""
    seconds, nanoseconds = _TIME.unpack(time_of_arrival)
    age: int = time.time_ns() - seconds * NS_PER_S - nanoseconds
    return age if 0 < age < _MOST_AGE_NS else 0


def _words(error: OSError | None) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if error is None:
        return "closed by the server"
    if isinstance(error, ssl.SSLError):
        return f"no TLS: {error.reason or error}"
    if error.errno:
        return os.strerror(error.errno)
    return str(error)
