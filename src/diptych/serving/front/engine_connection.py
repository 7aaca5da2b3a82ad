"""HTTP/1.1 to one engine: kept connections, one request on each at a time, and callbacks instead of tasks.

    call = pool.send("POST", "/v1/completions", body, listener)     # returns at once
    listener.on_head(status, headers), on_data(bytes) ..., then exactly one of on_end() and on_failure(words)
    call.abort()                                                    # closes the connection; nothing follows

A closed connection is how every engine learns that an answer is not wanted any more. Knows nothing of what is asked.
Memory: ``pause`` stops reading; a head has at most ENGINE_HEAD_BYTES bytes.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from diptych.http1.address import host_header
from diptych.http1.response_reader import ChunkReader, HeadTooLongError, NotHttpError
from diptych.serving import edge_limits

CONNECT_TIMEOUT_S = 5.0
MAX_IDLE = 256  # connections that are kept
MAX_IDLE_S = 4.0  # servers close what is idle, uvicorn after 5 s: a request must not meet that
RELEASE_S = 1.0


class ReplyListener(Protocol):
    """Is told how a request went. After ``on_end``, ``on_failure`` or ``on_defect`` nothing follows."""

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """The head of the reply; names of headers in lower case."""
        ...

    def on_data(self, data: bytes) -> None:
        """A part of the body."""
        ...

    def on_end(self) -> None:
        """The body is whole."""
        ...

    def on_failure(self, words: str) -> None:
        """There is no whole reply."""
        ...

    def on_defect(self, error: Exception) -> None:
        """One of the others has raised this, or the connection's own code has: what it was told may be half done."""
        ...


class EngineCall:
    """A request that is under way."""

    __slots__ = ("_connection", "_task", "is_over")

    def __init__(self) -> None:
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_over = False

    def abort(self) -> None:
        """Give it up: the connection is closed, and the listener gets no more calls."""
        if self.is_over:
            return
        self.is_over = True
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.drop()

    def release(self) -> None:
        """The rest of the reply does not matter: its listener gets no more calls, and the connection is kept if the
        reply ends within RELEASE_S."""
        if self.is_over or self._connection is None:
            self.abort()
            return
        self._connection.ignore()
        asyncio.get_running_loop().call_later(RELEASE_S, self.abort)

    def take_chunks(self, on_chunk: Callable[[bytes], bool] | None) -> None:
        """Give bytes to ``on_chunk`` first, as they came, where a chunk of HTTP begins with them. It returns whether
        they were one whole chunk, which it has read; the listener gets all others."""
        if self._connection is not None and not self.is_over:
            self._connection.on_chunk = on_chunk

    def pause(self) -> None:
        """Read no more of the reply for now."""
        if self._connection is not None and not self.is_over:
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        if self._connection is not None and not self.is_over:
            self._connection.resume()


class ConnectionPool:
    """The connections to one server. headers: sent with every request. tls: None for plain HTTP."""

    def __init__(self, host: str, port: int, headers: Mapping[str, str], tls: ssl.SSLContext | None = None) -> None:
        self._host, self._port, self._tls = host, port, tls
        self.headers = headers
        lines = [f"Host: {host_header(host, port)}", *(f"{key}: {value}" for key, value in headers.items())]
        self._head = "".join(f"{line}\r\n" for line in lines).encode("latin-1")
        self._idle: list[_Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def send(
        self, method: str, path: str, body: bytes | None, listener: ReplyListener, *, headers: bytes = b""
    ) -> EngineCall:
        """Send a request; returns at once. headers: lines that end with CR LF."""
        call = EngineCall()
        length = b"" if body is None else b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
        request = b"%b %b HTTP/1.1\r\n%b%b%b\r\n" % (method.encode(), path.encode(), self._head, headers, length)
        if body is not None:
            request += body
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if loop.time() - connection.idle_since_s > MAX_IDLE_S:
                connection.drop()
            elif connection.is_usable:
                connection.begin(call, listener, request, is_fresh=False)
                return call
        task = loop.create_task(self._connect(call, listener, request))
        call._task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return call

    async def _connect(self, call: EngineCall, listener: ReplyListener, request: bytes) -> None:
        try:
            connection = await self._connected(call, listener)
            if connection is None:
                return
            call._task = None
            if call.is_over or self._is_closed:
                connection.drop()
            else:
                connection.begin(call, listener, request, is_fresh=True)
        except Exception as error:  # nobody waits for this task
            call.is_over = True
            listener.on_defect(error)

    async def _connected(self, call: EngineCall, listener: ReplyListener) -> "_Connection | None":
        """A new connection; None where there is none, which the listener is told."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            self._fail(call, listener, f"no connection within {CONNECT_TIMEOUT_S:g} s")
            return None
        except (OSError, ssl.SSLError) as error:
            self._fail(call, listener, f"no connection: {error.strerror or error}")
            return None
        return connection

    @staticmethod
    def _fail(call: EngineCall, listener: ReplyListener, words: str) -> None:
        if not call.is_over:
            call.is_over = True
            listener.on_failure(words)

    def keep(self, connection: "_Connection") -> None:
        """The connection can carry another request."""
        if len(self._idle) < MAX_IDLE and not self._is_closed:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.drop()

    def forget(self, connection: "_Connection") -> None:
        """The connection is closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def resend(self, call: EngineCall, listener: ReplyListener, request: bytes) -> None:
        """A kept connection had ended before there was a reply: ask the same question on a new one."""
        task = asyncio.get_running_loop().create_task(self._connect(call, listener, request))
        call._connection, call._task = None, task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Close what is idle, and keep nothing from now on."""
        self._is_closed = True
        for connection in self._idle:
            connection.drop()
        self._idle.clear()
        for task in self._tasks:
            task.cancel()


def pool_to(host: str, port: int, headers: Mapping[str, str], *, is_tls: bool) -> ConnectionPool:
    """A pool of connections to an engine's server."""
    return ConnectionPool(host, port, headers, ssl.create_default_context() if is_tls else None)


class _Connection(asyncio.Protocol):
    """One connection, for its EngineCall."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._transport: Any = None
        self._reader: ChunkReader | None = None
        self._call: EngineCall | None = None
        self._listener: ReplyListener | None = None
        self._request = b""
        self._is_fresh = self._is_paused = False
        self.on_chunk: Callable[[bytes], bool] | None = None  # see EngineCall.take_chunks
        self.idle_since_s = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, call: EngineCall, listener: ReplyListener, request: bytes, *, is_fresh: bool) -> None:
        """Send a request. is_fresh: the connection has carried none before."""
        self._call, self._listener, self._request, self._is_fresh = call, listener, request, is_fresh
        call._connection = self
        self._reader = ChunkReader(self._on_head, self._on_body, edge_limits.ENGINE_HEAD_BYTES)
        self.on_chunk = None
        self._transport.write(request)

    def ignore(self) -> None:
        self.resume()
        self._listener = _Ignored()
        self.on_chunk = None

    def pause(self) -> None:
        if not self._is_paused and self.is_usable:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and self.is_usable:
            self._is_paused = False
            self._transport.resume_reading()

    def drop(self) -> None:
        """Close at once."""
        self._let_go()
        if self._transport is not None:
            self._transport.abort()

    # -- what the loop calls ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take in that the connection is open."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """More bytes of the reply."""
        call, listener, reader = self._call, self._listener, self._reader
        try:
            if reader is None:  # nothing was asked for
                self.drop()
            elif not (reader.is_between_chunks and self.on_chunk is not None and self.on_chunk(data)):
                self._read(reader, data)
        except Exception as error:
            self._fail(call, listener, error)

    def _read(self, reader: ChunkReader, data: bytes) -> None:
        self._request = b""
        try:
            is_whole = reader.feed(data)
        except NotHttpError as error:
            self._end_with(f"the reply is no HTTP/1.1 ({error})")
            return
        except HeadTooLongError:
            self._end_with(f"the head of the reply is longer than {edge_limits.ENGINE_HEAD_BYTES} bytes")
            return
        if self._reader is not reader:  # aborted by its listener
            return
        if reader.is_between_chunks and not data.endswith(b"\r\n"):  # but for a part of a chunk's size
            reader.is_between_chunks = False
        if is_whole:
            self._finish(reader)
        elif reader.num_without_body > edge_limits.ENGINE_HEAD_BYTES:  # of a chunk, or of trailers
            self._end_with(f"the reply has more than {edge_limits.ENGINE_HEAD_BYTES} bytes in a row without content")

    def connection_lost(self, exc: Exception | None) -> None:
        """Take in that the connection was closed, by either side."""
        call, listener = self._call, self._listener
        try:
            self._on_closed(exc)
        except Exception as error:
            self._fail(call, listener, error)

    def _on_closed(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        call, listener, reader = self._call, self._listener, self._reader
        if call is None or listener is None or reader is None:
            return
        if reader.has_head and not reader.is_framed and exc is None:  # its length is where the connection ends
            self._finish(reader)
        elif not reader.has_begun and not self._is_fresh and self._request.startswith(b"GET "):
            self._let_go()
            self._pool.resend(call, listener, self._request)
        else:
            where = "in the middle of the reply" if reader.has_begun else "without a reply"
            self._end_with(f"the connection ended {where}")

    def _fail(self, call: EngineCall | None, listener: ReplyListener | None, error: Exception) -> None:
        """Code of this process has failed over the reply to this call. (The loop would log it, and the request would be
        asked again: tokens may be missing, or come twice.)"""
        if call is None or listener is None:
            raise error
        self.drop()
        call.is_over, call._connection = True, None
        listener.on_defect(error)

    def _on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        if self._listener is not None:
            self._listener.on_head(status, headers)

    def _on_body(self, data: bytes) -> None:
        if self._reader is not None:
            self._reader.num_without_body = 0
        if self._listener is not None:
            self._listener.on_data(data)

    def _let_go(self) -> None:
        """Nothing is under way here any more."""
        if self._reader is not None:
            self._reader.close()
        self._call = self._listener = self._reader = self.on_chunk = None

    def _finish(self, reader: ChunkReader) -> None:
        call, listener = self._call, self._listener
        self._let_go()
        assert call is not None and listener is not None
        call.is_over, call._connection = True, None
        if reader.keeps and reader.is_framed and self.is_usable:
            self.resume()
            self._pool.keep(self)
        elif self._transport is not None:
            self._transport.abort()
        listener.on_end()

    def _end_with(self, words: str) -> None:
        call, listener = self._call, self._listener
        self._let_go()
        if self._transport is not None:
            self._transport.abort()
        if call is not None and listener is not None:
            call.is_over, call._connection = True, None
            listener.on_failure(words)


class _Ignored:
    """A ReplyListener that drops what comes."""

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Nothing."""

    def on_data(self, data: bytes) -> None:
        """Nothing."""

    def on_end(self) -> None:
        """Nothing."""

    def on_failure(self, words: str) -> None:
        """Nothing."""

    def on_defect(self, error: Exception) -> None:
        raise error


class ReplyTooLongError(Exception):
    """A reply has more bytes than were asked for."""


class _Gathered:
    """A ReplyListener for small replies."""

    def __init__(self, limit: int) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.call: EngineCall | None = None
        self._limit = limit
        self._status = 0
        self._body = bytearray()

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._limit and not self.done.done():
            self.done.set_exception(ReplyTooLongError(f"the reply has more than {self._limit} bytes"))
            assert self.call is not None
            self.call.abort()

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result((self._status, bytes(self._body)))

    def on_failure(self, words: str) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(words))

    def on_defect(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


async def ask(
    pool: ConnectionPool,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    timeout_s: float,
    limit: int | None = None,
) -> tuple[int, bytes]:
    """Status and body of a small reply. limit: of the body (None: ENGINE_PAGE_BYTES). Raises ConnectionError,
    TimeoutError or ReplyTooLongError."""
    gathered = _Gathered(edge_limits.ENGINE_PAGE_BYTES if limit is None else limit)
    gathered.call = pool.send(method, path, body, gathered)
    try:
        async with asyncio.timeout(timeout_s):
            return await gathered.done
    finally:
        gathered.call.abort()
