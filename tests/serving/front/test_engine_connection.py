"""One connection to an engine, byte by byte: what its listener is told, and whether it is kept. No socket."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from diptych.serving import edge_limits
from diptych.serving.front import engine_connection
from diptych.serving.front.engine_connection import ConnectionPool, EngineCall, _Connection

pytestmark = pytest.mark.asyncio
HEAD = b"HTTP/1.1 200 OK\r\nA: b\r\n"


class Listener:
    """Notes what it is told. fails: raised by ``on_data``."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.heads: list[tuple[int, Mapping[bytes, bytes]]] = []
        self.data = b""
        self.ends: list[Any] = []
        self.fails = fails

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.heads.append((status, headers))

    def on_data(self, data: bytes) -> None:
        if self.fails is not None:
            raise self.fails
        self.data += data

    def on_end(self) -> None:
        self.ends.append("end")

    def on_failure(self, words: str) -> None:
        self.ends.append(words)

    def on_defect(self, error: Exception) -> None:
        self.ends.append(error)


class Transport(asyncio.Transport):
    """Notes what is done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_over = self.is_paused = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_over

    def abort(self) -> None:
        self.is_over = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Line:
    """A connection and its pool."""

    def __init__(self) -> None:
        self.pool = ConnectionPool("h", 1, {"User-Agent": "x"})
        self.connection, self.transport = _Connection(self.pool), Transport()
        self.connection.connection_made(self.transport)

    def ask(self, *, is_fresh: bool = True, request: bytes = b"POST", fails: Exception | None = None) -> Listener:
        self.call, listener = EngineCall(), Listener(fails)
        self.connection.begin(self.call, listener, request, is_fresh=is_fresh)
        return listener

    def hear(self, data: bytes, step: int = 1000) -> None:
        for at in range(0, len(data), step):
            self.connection.data_received(data[at : at + step])

    @property
    def is_kept(self) -> bool:
        assert (self.connection in self.pool._idle) is not self.transport.is_over
        return not self.transport.is_over


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_a_trailer_is_no_header_of_its_reply_nor_of_the_next_one(step: int) -> None:
    line = Line()
    body = b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nContent-Type: x\r\nretry-after: 9\r\n\r\n"
    for _ in range(2):
        listener = line.ask()
        line.hear(HEAD + body, step)
        assert listener.heads == [(200, {b"a": b"b", b"transfer-encoding": b"chunked"})]
        assert (listener.data, listener.ends) == (b"abc", ["end"]) and line.call.is_over and line.is_kept
        line.pool._idle.clear()
    assert line.transport.written == b"POSTPOST"


@pytest.mark.parametrize(("more", "is_kept"), [
    (b"content-length: 2\r\n\r\nab", True), (b"content-length: 2\r\nconnection: close\r\n\r\nab", False),
    (b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", True),
])  # fmt: skip
async def test_a_connection_is_kept_where_the_reply_ends_by_itself(more: bytes, is_kept: bool) -> None:
    line = Line()
    listener = line.ask()
    line.hear(HEAD + more)
    assert (listener.data, listener.ends, line.is_kept) == (b"ab", ["end"], is_kept)
    line.connection.connection_lost(None)
    assert listener.ends == ["end"] and not line.pool._idle


async def test_a_reply_without_a_length_ends_with_its_connection_unless_that_failed() -> None:
    for error, end in ((None, "end"), (OSError(), "the connection ended in the middle of the reply")):
        line = Line()
        listener = line.ask()
        line.hear(HEAD + b"\r\nab")
        assert listener.ends == []
        line.connection.connection_lost(error)
        assert listener.ends == [end] and line.call.is_over


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 2", HEAD + b"content-length: 3\r\n\r\nab"])
async def test_a_reply_that_breaks_off_is_a_failure(data: bytes) -> None:
    line = Line()
    listener = line.ask()
    line.hear(data)
    line.connection.connection_lost(None)
    where = "in the middle of the reply" if data else "without a reply"
    assert listener.ends == [f"the connection ended {where}"] and line.transport.is_over


@pytest.mark.parametrize(("is_fresh", "request_", "data", "is_asked_again"), [
    (False, b"GET /", b"", True), (True, b"GET /", b"", False), (False, b"POST /", b"", False),
    (False, b"GET /", b"HTTP", False),
])  # fmt: skip
async def test_a_question_is_asked_again_where_a_kept_connection_had_ended_before(
    is_fresh: bool, request_: bytes, data: bytes, is_asked_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, asked = Line(), list[bytes]()
    monkeypatch.setattr(line.pool, "resend", lambda call, listener, request: asked.append(request))
    listener = line.ask(is_fresh=is_fresh, request=request_)
    line.hear(data)
    line.connection.connection_lost(OSError())
    assert asked == [request_] * is_asked_again and bool(listener.ends) is not is_asked_again


async def test_interim_replies_are_passed_over() -> None:
    line = Line()
    listener = line.ask()
    line.hear(b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + HEAD)
    line.hear(b"content-length: 0\r\n\r\n")
    assert listener.heads == [(200, {b"a": b"b", b"content-length": b"0"})] and listener.ends == ["end"]


async def test_a_head_has_as_many_bytes_as_the_limit() -> None:
    most = edge_limits.ENGINE_HEAD_BYTES
    for more in (0, 1):
        line = Line()
        listener = line.ask()
        line.hear(HEAD + b"B: " + b"x" * (most - len(HEAD) - 3 + more), 4096)
        assert bool(listener.ends) is bool(more)
        if more:
            assert listener.ends == [f"the head of the reply is longer than {most} bytes"]
            assert line.transport.is_over


async def test_what_is_no_http_and_what_nobody_asked_for_end_the_connection() -> None:
    line = Line()
    listener = line.ask()
    line.hear(b"SSH-2.0\r\n")
    [words] = listener.ends
    assert "no HTTP/1.1" in words and line.transport.is_over
    line = Line()
    line.hear(b"HTTP/1.1 200 OK\r\n")
    assert line.transport.is_over


async def test_a_defect_of_the_listener_is_told_and_ends_the_connection() -> None:
    line, error = Line(), ZeroDivisionError()
    listener = line.ask(fails=error)
    line.hear(HEAD + b"content-length: 2\r\n\r\nab")
    assert listener.ends == [error] and line.transport.is_over and line.call.is_over


async def test_a_call_that_is_given_up_is_told_nothing_more() -> None:
    line = Line()
    listener = line.ask()
    line.hear(HEAD + b"content-length: 2\r\n\r\na")
    for _ in range(2):
        line.call.abort()
        assert line.transport.is_over and line.call.is_over
    line.connection.connection_lost(None)
    assert listener.data == b"a" and listener.ends == []


async def test_a_call_that_is_released_keeps_its_connection_when_the_reply_ends() -> None:
    line = Line()
    listener = line.ask()
    line.call.pause()
    assert line.transport.is_paused
    line.hear(HEAD + b"content-length: 2\r\n\r\na")
    line.call.release()
    assert not line.transport.is_paused
    line.hear(b"b")
    assert (listener.data, listener.ends) == (b"a", []) and line.is_kept
    line.call.pause()
    assert not line.transport.is_paused  # it is over


async def test_a_pause_ends_with_the_call_or_when_it_says_so() -> None:
    line = Line()
    line.ask()
    line.call.pause()
    line.call.pause()
    line.call.resume()
    assert not line.transport.is_paused
    line.call.pause()
    line.hear(HEAD + b"content-length: 0\r\n\r\n")
    assert not line.transport.is_paused and line.is_kept


async def test_chunks_are_offered_to_who_takes_them_between_chunks_alone() -> None:
    line, offered = Line(), list[bytes]()
    listener = line.ask()
    chunks = [b"3\r\nabc\r\n", b"3\r\ndef\r\n", b"1\r\ng\r\n"]

    def take(data: bytes) -> bool:
        offered.append(data)
        return data == chunks[1]

    line.call.take_chunks(take)
    line.hear(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    for chunk in chunks:
        line.hear(chunk)
    line.hear(b"2\r\nh")
    line.hear(b"i\r\n")
    line.hear(b"0\r\n\r\n")
    assert offered == [*chunks[1:], b"2\r\nh", b"0\r\n\r\n"]  # not the first: nothing has ended before it
    assert (listener.data, listener.ends) == (b"abcghi", ["end"])
    listener = line.ask()
    line.hear(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks[0])
    line.hear(chunks[1])
    assert listener.data == b"abcdef" and len(offered) == 4  # the next call has not asked for it


async def test_256_connections_are_kept_for_four_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ConnectionPool("h", 1, {})
    made = []
    for _ in range(engine_connection.MAX_IDLE + 1):
        connection = _Connection(pool)
        connection.connection_made(Transport())
        made.append(connection)
        pool.keep(connection)
    assert len(pool._idle) == 256 and [c.is_usable for c in made] == [True] * 256 + [False]
    now = asyncio.get_running_loop().time()
    made[255].idle_since_s, made[254].idle_since_s = now - 4.5, now - 3.0
    listener = Listener()
    call = pool.send("GET", "/x", None, listener, headers=b"B: c\r\n")
    assert call._connection is made[254] and not made[255].is_usable and len(pool._idle) == 254
    assert made[254]._transport.written == b"GET /x HTTP/1.1\r\nHost: h:1\r\nB: c\r\n\r\n"
    pool.send("POST", "/y", b"{}", listener)
    assert made[253]._transport.written.endswith(
        b"Host: h:1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    )
    pool.close()
    assert pool._idle == [] and not made[0].is_usable
    late = _Connection(pool)
    late.connection_made(Transport())
    pool.keep(late)
    assert not late.is_usable


async def test_an_address_of_version_6_stands_in_brackets() -> None:
    assert ConnectionPool("::1", 8, {"A": "b"})._head == b"Host: [::1]:8\r\nA: b\r\n"
