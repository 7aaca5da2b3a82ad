"""The states of a connection: what a socket does is scripted, no bytes leave the process."""

import errno
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from diptych.bench.clock import now_ns
from diptych.bench.http_connection import RETRY_NS, HttpConnection, SocketAddress
from diptych.bench.token_stream import TokenStream
from diptych.control.slo import NS_PER_S

from .events import ANSWER, HEAD

pytestmark = pytest.mark.asyncio
FIRST, SECOND = (socket.AF_INET6, ("::1", 80)), (socket.AF_INET, ("127.0.0.1", 80))


class ScriptedSocket:
    """connect: what connect_ex returns. room: bytes that each send takes; after these everything."""

    def __init__(self, number: int, connect: int = 0) -> None:
        self.number, self.connect, self.error = number, connect, 0
        self.room: deque[int | OSError] = deque()
        self.incoming: deque[bytes | OSError] = deque()
        self.ancillary: list[tuple[int, int, bytes]] = []
        self.sent = b""
        self.is_closed = False

    def fileno(self) -> int:
        return self.number

    def connect_ex(self, _: Any) -> int:
        return self.connect

    def getsockopt(self, _: int, __: int) -> int:
        return self.error

    def send(self, data: memoryview) -> int:
        room = self.room.popleft() if self.room else len(data)
        if isinstance(room, OSError):
            raise room
        if not room:
            raise BlockingIOError
        self.sent += data[:room]
        return min(room, len(data))

    def recvmsg(self, _: int, __: int) -> tuple[bytes, Any, int, None]:
        data = self.incoming.popleft() if self.incoming else BlockingIOError()
        if isinstance(data, OSError):
            raise data
        return data, self.ancillary, 0, None

    def close(self) -> None:
        self.is_closed = True


class WatchedFiles:
    """The part of an event loop that a connection uses."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}
        self.writers: dict[int, Callable[[], None]] = {}

    def add_reader(self, file: int, callback: Callable[[], None]) -> None:
        self.readers[file] = callback

    def add_writer(self, file: int, callback: Callable[[], None]) -> None:
        self.writers[file] = callback

    def remove_reader(self, file: int) -> None:
        self.readers.pop(file, None)

    def remove_writer(self, file: int) -> None:
        self.writers.pop(file, None)


class Scene:
    """A connection, its sockets in the order in which they were made, and what its owner was called for."""

    def __init__(self, *connects: int, addresses: tuple[SocketAddress, ...] = (SECOND,)) -> None:
        self.connects = deque(connects)
        self.sockets: list[ScriptedSocket] = []
        self.files = WatchedFiles()
        self.calls: list[str] = []
        self.unanswered: list[bytes] = []
        self.connection = HttpConnection(self, self.files, addresses, "server", None, self.new_socket)  # type: ignore[arg-type]

    def new_socket(self, family: int) -> Any:
        code = self.connects.popleft()
        if code < 0:  # there is no socket of this family
            raise OSError(errno.EAFNOSUPPORT, "no such family")
        self.sockets.append(ScriptedSocket(len(self.sockets), code))
        return self.sockets[-1]

    def on_open(self, connection: HttpConnection) -> None:
        self.calls.append("open")

    def on_idle(self, connection: HttpConnection) -> None:
        self.calls.append("idle")

    def on_closed(self, connection: HttpConnection) -> None:
        self.calls.append("closed")

    def on_unanswered(self, request: bytes, stream: TokenStream) -> None:
        self.calls.append("unanswered")
        self.unanswered.append(request)

    def receive(self, *pieces: bytes | OSError) -> None:
        """These come, and the event loop says so."""
        for piece in pieces:
            self.sockets[-1].incoming.append(piece)
            self.files.readers[self.sockets[-1].number]()

    def become_writable(self, error: int = 0) -> None:
        """The event loop says that the last socket can be written, or has failed."""
        self.sockets[-1].error = error
        self.files.writers[self.sockets[-1].number]()

    @property
    def is_clean(self) -> bool:
        """Every socket is closed and unwatched."""
        return all(made.is_closed for made in self.sockets) and not self.files.readers and not self.files.writers


def opened(*connects: int, addresses: tuple[SocketAddress, ...] = (SECOND,)) -> Scene:
    """A scene whose connection was opened."""
    scene = Scene(*(connects or (0,)), addresses=addresses)
    scene.connection.open()
    return scene


async def test_a_connection_that_opens_at_once_sends_and_is_idle_after_the_answer() -> None:
    scene = opened()
    stream = TokenStream(0)
    scene.connection.send(b"request", stream)
    assert scene.sockets[0].sent == b"request" and not scene.files.writers
    scene.receive(ANSWER[:50], ANSWER[50:])
    assert stream.is_complete and len(stream.stamps) == 2
    assert scene.calls == ["open", "idle"] and scene.connection.idle_since_ns > 0
    scene.connection.abort()
    assert scene.is_clean


async def test_tokens_have_the_time_of_their_arrival() -> None:
    scene = opened()
    stream = TokenStream(0)
    scene.connection.send(b"request", stream)
    came = time.time_ns() - 5 * NS_PER_S
    scene.sockets[0].ancillary = [(socket.SOL_SOCKET, 35, struct.pack("qq", *divmod(came, NS_PER_S)))]
    before = now_ns()
    scene.receive(ANSWER)
    assert all(before - 6 * NS_PER_S < stamp < before - 4 * NS_PER_S for stamp in stream.stamps)


async def test_a_request_that_comes_before_the_connection_is_open_waits_for_it() -> None:
    scene = opened(errno.EINPROGRESS)
    stream = TokenStream(0)
    scene.connection.send(b"request", stream)
    assert not scene.connection.is_open and not scene.files.readers and scene.sockets[0].sent == b""
    scene.become_writable()
    assert scene.calls == ["open"] and scene.sockets[0].sent == b"request" and not scene.files.writers
    scene.receive(ANSWER)
    assert stream.is_complete


@pytest.mark.parametrize("code", [errno.ENETUNREACH, errno.EINPROGRESS, -1], ids=["at once", "later", "no socket"])
async def test_the_next_address_is_tried_when_the_first_refuses(code: int) -> None:
    scene = opened(code, 0, addresses=(FIRST, SECOND))
    stream = TokenStream(0)
    scene.connection.send(b"request", stream)
    if code == errno.EINPROGRESS:
        scene.become_writable(errno.ECONNREFUSED)
        assert scene.sockets[0].is_closed and 0 not in scene.files.writers
    assert scene.connection.address == SECOND and scene.connection.is_open and scene.sockets[-1].sent == b"request"
    scene.receive(ANSWER)
    assert stream.is_complete


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_server_that_refuses_at_every_address_is_an_error_of_the_request(at_once: bool) -> None:
    code = errno.ECONNREFUSED if at_once else errno.EINPROGRESS
    scene = opened(code, code, addresses=(FIRST, SECOND))
    stream = TokenStream(0)
    scene.connection.send(b"request", stream)
    if not at_once:
        scene.become_writable(errno.ECONNREFUSED)
        scene.become_writable(errno.ECONNREFUSED)
    assert stream.error == "cannot connect to server: Connection refused"
    assert scene.calls == ["closed"] and scene.connection.is_closed and scene.is_clean


async def test_what_the_kernel_does_not_take_is_sent_when_it_does() -> None:
    scene = opened()
    scene.sockets[0].room.extend([3, 0, 2, 0])
    scene.connection.send(b"long request", TokenStream(0))
    assert scene.sockets[0].sent == b"lon" and scene.files.writers
    scene.become_writable()
    assert scene.sockets[0].sent == b"long " and scene.files.writers
    scene.become_writable()
    assert scene.sockets[0].sent == b"long request" and not scene.files.writers


async def test_an_answer_to_half_a_request_ends_the_connection() -> None:
    scene = opened()
    scene.sockets[0].room.extend([3, 0])
    stream = TokenStream(0)
    scene.connection.send(b"request", stream)
    scene.receive(ANSWER)
    assert stream.is_complete and scene.calls == ["open", "closed"] and scene.is_clean


@pytest.mark.parametrize("answer", [ANSWER + b"more", ANSWER.replace(b"\r\nC", b"\r\nConnection: close\r\nC", 1)])
async def test_a_connection_that_cannot_be_used_again_is_closed_after_the_answer(answer: bytes) -> None:
    scene = opened()
    stream = TokenStream(0)
    scene.connection.send(b"request", stream)
    scene.receive(answer)
    assert stream.is_complete and scene.calls == ["open", "closed"] and scene.is_clean


@pytest.mark.parametrize("end", [b"", ConnectionResetError(errno.ECONNRESET, "")], ids=["end", "reset"])
async def test_an_idle_connection_that_ends_is_closed(end: bytes | OSError) -> None:
    scene = opened()
    scene.receive(end)
    assert scene.calls == ["open", "closed"] and scene.is_clean


async def test_bytes_that_no_request_asked_for_end_the_connection() -> None:
    scene = opened()
    scene.receive(ANSWER)
    assert scene.calls == ["open", "closed"] and scene.is_clean


@pytest.mark.parametrize(
    ("end", "words"),
    [(b"", "in the middle of the answer"), (ConnectionResetError(errno.ECONNRESET, ""), "connection lost: Conn")],
    ids=["end", "reset"],
)  # fmt: skip
async def test_a_connection_that_ends_in_an_answer_is_an_error_of_the_request(end: bytes | OSError, words: str) -> None:
    scene = opened()
    stream = TokenStream(0)
    scene.connection.send(b"request", stream)
    scene.receive(ANSWER[:-10], end)
    assert not stream.is_complete and words in (stream.error or "")
    assert scene.calls == ["open", "closed"] and scene.is_clean


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    scene = opened()
    stream = TokenStream(0)
    scene.connection.send(b"request", stream)
    scene.receive(HEAD + b"\r\n" + ANSWER[ANSWER.index(b"data") :], b"")
    assert stream.is_complete and scene.is_clean


@pytest.mark.parametrize("end", [b"", ConnectionResetError(errno.ECONNRESET, ""), "send"], ids=["end", "reset", "send"])
async def test_a_kept_connection_that_had_ended_costs_no_request(end: Any) -> None:
    scene = opened()
    scene.connection.idle_since_ns = now_ns()
    stream = TokenStream(0)
    if end == "send":
        scene.sockets[0].room.append(BrokenPipeError(errno.EPIPE, ""))
    scene.connection.send(b"request", stream)
    if end != "send":
        scene.receive(end)
    assert scene.unanswered == [b"request"] and not stream.done.done()
    assert scene.calls == ["open", "closed", "unanswered"] and scene.is_clean


@pytest.mark.parametrize("why", ["new connection", "answer has begun", "after a second"])
async def test_a_request_that_the_server_may_have_seen_is_never_sent_again(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = opened()
    if why != "new connection":
        scene.connection.idle_since_ns = now_ns()
    stream = TokenStream(0)
    scene.connection.send(b"request", stream)
    if why == "answer has begun":
        scene.receive(b"H")
    if why == "after a second":
        monkeypatch.setattr("diptych.bench.http_connection.now_ns", lambda: now_ns() + 2 * RETRY_NS)
    scene.receive(b"")
    assert not scene.unanswered and stream.error == "the connection ended without an answer" and scene.is_clean


async def test_giving_up_closes_the_connection_whatever_its_state() -> None:
    opening, sending, receiving = opened(errno.EINPROGRESS), opened(), opened()
    sending.sockets[0].room.append(0)
    for scene in (opening, sending, receiving):
        stream = TokenStream(0)
        scene.connection.send(b"request", stream)
        if scene is receiving:
            scene.receive(ANSWER[:-10])
        stream.cancel(7, "enough")
        assert stream.error == "enough" and scene.calls[-1] == "closed" and scene.is_clean


async def test_a_closed_connection_says_why_it_could_not_be_opened() -> None:
    scene = opened(errno.EHOSTUNREACH)
    stream = TokenStream(0)
    scene.connection.send(b"request", stream)
    assert stream.error == "cannot connect to server: No route to host"
