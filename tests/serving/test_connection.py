"""One HTTP connection, driven byte by byte: whatever a stranger sends gets a reply in our format or an end, and nothing
is logged."""

import asyncio
import gc
import itertools
import json
import logging
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from diptych.serving.api.connection import Connection
from diptych.serving.api.direct_body import DirectBody
from diptych.serving.edge_limits import (
    BODY_BYTES_PER_S,
    HEAD_BYTES,
    HEAD_S,
    REFUSAL_LINGER_S,
    REQUEST_SILENCE_S,
    UNANSWERED_REQUESTS,
)

GET = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nabcde"
CHUNKED = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


class Clock:
    """An event loop whose timers run only in ``pass_s``."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Callable[[], None], asyncio.TimerHandle]] = []

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        return asyncio.get_running_loop().create_task(coroutine)

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.now + delay, callback, (), asyncio.get_running_loop())
        self._timers.append((self.now + delay, callback, handle))
        return handle

    async def pass_s(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self.now += seconds
        due = [timer for timer in self._timers if timer[0] <= self.now]
        self._timers = [timer for timer in self._timers if timer[0] > self.now]
        for _, callback, handle in due:
            if not handle.cancelled():
                callback()
        await settle()


class Wire(asyncio.Transport):
    """What the client gets."""

    def __init__(self) -> None:
        super().__init__()
        self.said = b""
        self.is_over = self.is_paused = False
        self.protocol: Connection | None = None

    def write(self, data: Any) -> None:
        assert not self.is_over
        self.said += bytes(data)

    def write_eof(self) -> None:
        assert not self.is_over

    def is_closing(self) -> bool:
        return self.is_over

    def close(self) -> None:
        if not self.is_over:
            self.is_over = True
            assert self.protocol is not None
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False

    @property
    def statuses(self) -> list[int]:
        """The statuses of the replies, in their order."""
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", self.said)]

    @property
    def error(self) -> dict[str, Any]:
        """The last reply's."""
        return dict(json.loads(self.said.rpartition(b"\r\n\r\n")[2])["error"])


class App:
    """Replies with what it was asked. ``gate``: each reply waits in its middle until it is set."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self.num_disconnected = 0
        self.waits_for_disconnect = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_disconnected += 1
                return
            body, more = body + message["body"], message["more_body"]
        self.seen.append((scope["method"], scope["path"], body))
        if self.waits_for_disconnect:
            assert (await receive())["type"] == "http.disconnect"
            self.num_disconnected += 1
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await self.gate.wait()
        await send({"type": "http.response.body", "body": b"last", "more_body": False})


class Client:
    """A connection, its clock and its application. Make it inside a running loop."""

    def __init__(self) -> None:
        self.app, self.clock, self.wire = App(), Clock(), Wire()
        config = uvicorn.Config(self.app, lifespan="off", ws="none", access_log=False, log_config=None)
        config.load()
        self._connection = Connection(config, ServerState(), {}, self.clock)  # type: ignore[arg-type]
        self.wire.protocol = self._connection
        self._connection.connection_made(self.wire)

    async def say(self, *pieces: bytes) -> None:
        """Send these, one read of the server each."""
        for piece in pieces:
            if piece and not self.wire.is_over:
                self._connection.data_received(piece)
            await settle()

    async def leave(self) -> None:
        """Close the connection."""
        self._connection.connection_lost(None)
        self.wire.is_over = True
        await settle()


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Strangers cannot write into the log."""
    with caplog.at_level(logging.INFO):
        yield
    assert not [record for record in caplog.records if record.name != "asyncio"]


async def replies(*pieces: bytes) -> Client:
    client = Client()
    await client.say(*pieces)
    return client


@pytest.mark.asyncio
async def test_requests_on_one_connection_get_their_replies_in_order() -> None:
    client = await replies(GET + POST + GET)
    assert client.app.seen == [("GET", "/x", b""), ("POST", "/x", b"abcde"), ("GET", "/x", b"")]
    assert client.wire.statuses == [200, 200, 200]
    assert not client.wire.is_over


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 300), max_size=8))
def test_it_does_not_matter_how_the_bytes_arrive(cuts: list[int]) -> None:
    upgraded = POST.replace(b"Host: x\r\n", b"Host: x\r\n" + UPGRADE)
    data = GET + CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: t\r\n\r\n" + GET + upgraded

    async def run(pieces: Sequence[bytes]) -> tuple[Any, bytes]:
        client = await replies(*pieces)
        return client.app.seen, client.wire.said

    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(places) if start < end]
    seen, said = asyncio.run(run(pieces))
    assert seen == [("GET", "/x", b""), ("POST", "/x", b"abcde"), ("GET", "/x", b""), ("POST", "/x", b"abcde")]
    assert said == asyncio.run(run([data]))[1]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /x HTTP/9.9\r\nHost: x\r\n\r\n",
        b"BREW /x HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET ?x HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost x\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"ZZ\r\n",
        CHUNKED + b"3\r\nabcdef\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"fffffffffffffffffffff\r\n",
    ],
)
async def test_what_is_no_http_is_a_400_in_our_format_and_the_end(data: bytes) -> None:
    client = await replies(data)
    assert client.wire.statuses == [400]
    assert client.wire.error["code"] == "invalid_http"
    assert set(client.wire.error) == {"message", "type", "param", "code"}
    assert not client.app.seen
    await client.say(GET)  # is not heard
    await client.clock.pass_s(REFUSAL_LINGER_S)
    assert client.wire.is_over
    assert client.wire.statuses == [400]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from([GET, POST, CHUNKED, b"0\r\n\r\n", b"5\r\nabcde\r\n", b"\r\n", UPGRADE, b"CONNECT x:1 "]),
        ),
        max_size=6,
    )
)
def test_no_bytes_make_it_stumble(pieces: list[bytes]) -> None:
    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: pytest.fail(str(context)))
        client = await replies(*pieces)
        assert set(client.wire.statuses) <= {200, 400, 405}
        await client.clock.pass_s(2 * REQUEST_SILENCE_S)
        await client.clock.pass_s(REFUSAL_LINGER_S)
        assert client.wire.is_over

    asyncio.run(run())


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /x HTTP/1.1\r\nX: " + b"a" * HEAD_BYTES + b"\r\n\r\n"],
        [b"GET /x HTTP/1.1\r\nX: ", *[b"a" * 1000] * 70],
        [b"GET /x HTTP/1.1\r\n" + b"X: a\r\n" * 12_000 + b"\r\n"],
        [b"GET /x HTTP/1.1\r\n", *[b"X: a\r\n" * 1000] * 12],
        [b"GET /" + b"a" * HEAD_BYTES + b" HTTP/1.1\r\n\r\n"],
        [b"GET /", *[b"a" * 1000] * 70],
        [b"\r\n" * 20_000] * 2,
        [CHUNKED, b"5\r\nabcde\r\n0\r\n", *[b"X: a\r\n" * 1000] * 12],
        [CHUNKED, b"5\r\nabcde\r\n5;", *[b"x" * 1000] * 70],
    ],
    ids=["header", "slow header", "headers", "slow headers", "url", "slow url", "lines", "trailers", "chunk extension"],
)
async def test_what_is_no_body_has_a_limit(pieces: list[bytes]) -> None:
    client = await replies(*pieces)
    assert client.wire.statuses == [431]
    assert client.wire.error["code"] == "head_too_long"
    assert not client.app.seen
    await client.clock.pass_s(REFUSAL_LINGER_S)
    assert client.wire.is_over


@pytest.mark.asyncio
async def test_a_body_of_many_small_chunks_is_no_long_head() -> None:
    client = await replies(CHUNKED, *[b"1\r\na\r\n" * 1000] * 30, b"0\r\n\r\n")
    assert client.app.seen == [("POST", "/x", b"a" * 30_000)]


@pytest.mark.asyncio
async def test_trailers_are_read_and_mean_nothing() -> None:
    client = await replies(CHUNKED + b"5\r\nabcde\r\n0\r\nX-Sum: 3\r\nX: y\r\n\r\n" + GET)
    assert client.wire.statuses == [200, 200]


@pytest.mark.asyncio
@pytest.mark.parametrize("body_first", [True, False], ids=["body in the same read", "body later"])
async def test_a_request_to_upgrade_is_served_without_that_and_ends_the_connection(body_first: bool) -> None:
    head, body = POST.replace(b"Host: x\r\n", b"Host: x\r\n" + UPGRADE).split(b"\r\n\r\n")
    pieces = [head + b"\r\n\r\n" + body] if body_first else [head + b"\r\n\r\n", body[:2], body[2:]]
    client = await replies(*pieces)
    assert client.app.seen == [("POST", "/x", b"abcde")]
    assert b"connection: close" in client.wire.said
    assert client.wire.is_over


@pytest.mark.asyncio
async def test_a_thousand_upgrades_at_once_are_one() -> None:
    client = await replies(GET.replace(b"Host: x\r\n", b"Host: x\r\n" + UPGRADE) * 1000)
    assert client.wire.statuses == [200]
    assert client.wire.is_over


@pytest.mark.asyncio
async def test_a_tunnel_is_refused() -> None:
    client = await replies(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert client.wire.statuses == [405]


@pytest.mark.asyncio
async def test_what_is_no_http_behind_a_request_lets_its_reply_end() -> None:
    client = Client()
    client.app.gate.clear()
    await client.say(POST, b"garbage\r\n\r\n", b"more garbage")
    assert not client.wire.is_over
    client.app.gate.set()
    await settle()
    assert client.wire.statuses == [200]
    assert client.wire.said.endswith(b"4\r\nlast\r\n0\r\n\r\n")
    assert client.wire.is_over


@pytest.mark.asyncio
async def test_a_broken_body_ends_the_task_that_waits_for_it() -> None:
    client = await replies(CHUNKED + b"5\r\nabcde\r\n", b"ZZ\r\n")
    assert client.app.num_disconnected == 1


@pytest.mark.asyncio
async def test_a_client_that_leaves_within_its_body_ends_the_task() -> None:
    client = await replies(POST[:-2])
    await client.leave()
    assert client.app.num_disconnected == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("rest", [GET, POST[:-1], GET * 5])
async def test_a_client_that_leaves_ends_every_request_that_it_has_sent(rest: bytes) -> None:
    client = Client()
    client.app.waits_for_disconnect = True
    await client.say(GET + rest)
    assert client.app.num_disconnected == 0
    await client.leave()
    assert client.app.num_disconnected == 1  # of the one that runs: the others never began


@pytest.mark.asyncio
async def test_a_client_that_says_nothing_is_cut_off() -> None:
    client = Client()
    await client.clock.pass_s(REQUEST_SILENCE_S - 0.001)
    assert not client.wire.is_over
    await client.clock.pass_s(0.001)
    assert client.wire.is_over
    assert client.wire.said == b""


@pytest.mark.asyncio
@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 431)])
async def test_a_head_has_its_limit_and_no_byte_more(more: int, status: int) -> None:
    """Target, names and values count, and four bytes for each header."""
    left = HEAD_BYTES + more - len(b"/x") - len(b"host: x\r\n") - len(b"y: \r\n")
    client = await replies(b"GET /x HTTP/1.1\r\nhost: x\r\ny: %b\r\n\r\n" % (b"y" * left))
    assert client.wire.statuses == [status]


@pytest.mark.asyncio
async def test_a_client_that_was_refused_may_linger_until_its_time_is_over() -> None:
    client = await replies(b"no HTTP\r\n\r\n")
    await client.clock.pass_s(REFUSAL_LINGER_S - 0.001)
    assert client.wire.statuses == [400] and not client.wire.is_over
    await client.clock.pass_s(0.001)
    assert client.wire.is_over


@pytest.mark.asyncio
async def test_empty_lines_behind_a_request_do_not_keep_a_connection_open() -> None:
    client = await replies(GET, b"\r\n")
    await client.clock.pass_s(REQUEST_SILENCE_S)
    assert client.wire.statuses == [200]
    assert client.wire.is_over


@pytest.mark.asyncio
@pytest.mark.parametrize("data", [POST[:-1], CHUNKED], ids=["half a body", "no chunk"])
async def test_a_client_that_stops_within_its_request_is_told_so(data: bytes) -> None:
    client = await replies(data[:10])
    await client.clock.pass_s(HEAD_S - 1)
    await client.say(data[10:])
    await client.clock.pass_s(REQUEST_SILENCE_S - 1)
    assert not client.wire.said
    await client.clock.pass_s(1)
    assert client.wire.statuses == [408]
    await client.clock.pass_s(REFUSAL_LINGER_S)
    assert client.wire.is_over


@pytest.mark.asyncio
@pytest.mark.parametrize("behind", [b"", GET], ids=["first", "second"])
async def test_a_head_has_its_time_however_often_a_byte_of_it_comes(behind: bytes) -> None:
    client = await replies(behind)
    for second in range(int(HEAD_S) - 1):
        await client.say(b"GET /"[second : second + 1] or b"x")
        await client.clock.pass_s(1)
    assert client.wire.statuses == [200] * bool(behind)
    await client.clock.pass_s(1)
    assert client.wire.statuses[-1] == 408


@pytest.mark.asyncio
async def test_a_body_has_a_least_pace() -> None:
    enough = int(BODY_BYTES_PER_S * REQUEST_SILENCE_S)
    client = await replies(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (10 * enough))
    for _ in range(5):
        await client.say(b"x" * (enough - 1), b"x")
        await client.clock.pass_s(REQUEST_SILENCE_S)
    assert not client.wire.said
    await client.say(b"x" * (enough - 1))
    await client.clock.pass_s(REQUEST_SILENCE_S)
    assert client.wire.statuses == [408]
    assert client.app.num_disconnected == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("head", "body"),
    [
        (CHUNKED, b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n"),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n", b"x" * 20_000),
    ],
    ids=["chunks of one byte", "one piece"],
)
async def test_what_comes_of_a_body_at_once_is_handed_over_in_one_piece(
    head: bytes, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request copies all that it has of its body for each piece that it is given."""
    num_pieces, take = 0, HttpToolsProtocol.on_body

    def counted(self: Connection, piece: bytes) -> None:
        nonlocal num_pieces
        num_pieces += 1
        take(self, piece)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", counted)
    client = Client()
    await client.say(head + body)
    assert client.wire.statuses == [200] and num_pieces == 1
    assert client.app.seen[-1][-1] == b"x" * 20_000


# -- requests before replies ------------------------------------------------------------------------------------------


class Watched(Connection):
    """Counts what the parser gets, and what waits."""

    num_parsed = most_unanswered = 0

    def _feed(self, data: bytes) -> None:
        self.num_parsed += len(data)
        super()._feed(data)
        self.most_unanswered = max(self.most_unanswered, len(self._cycles))


async def watched(*pieces: bytes, is_open: bool = True) -> tuple[Client, Watched]:
    client = Client()
    client._connection.__class__ = Watched
    if not is_open:
        client.app.gate.clear()
    await client.say(*pieces)
    return client, client._connection  # type: ignore[return-value]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "request_", [GET, POST, CHUNKED + b"5\r\nabcde\r\n0\r\n\r\n"], ids=["no body", "body", "chunks"]
)
async def test_many_requests_at_once_are_read_as_they_are_answered_and_each_byte_once(request_: bytes) -> None:
    client, connection = await watched(request_ * 3000)
    while client.wire.said.count(b"last") != 3000:
        await settle()
    assert len(client.app.seen) == 3000
    assert connection.num_parsed == 3000 * len(request_)
    assert connection.most_unanswered <= UNANSWERED_REQUESTS
    assert not client.wire.is_paused


@pytest.mark.asyncio
@pytest.mark.parametrize("cut", [0, 1, len(GET) - 2, len(GET)])
async def test_a_client_is_not_read_while_so_many_of_its_requests_wait(cut: int) -> None:
    client, connection = await watched(GET * (UNANSWERED_REQUESTS - 1), GET[:cut], GET[cut:], is_open=False)
    assert len(connection._cycles) == UNANSWERED_REQUESTS and client.wire.is_paused
    await client.say(GET)  # that was under way
    assert len(connection._cycles) == UNANSWERED_REQUESTS
    client.app.gate.set()
    while client.wire.said.count(b"last") != UNANSWERED_REQUESTS + 1:
        await settle()
    assert not client.wire.is_paused


@pytest.mark.asyncio
async def test_a_client_that_leaves_with_requests_unread_leaves_nothing() -> None:
    client, connection = await watched(GET * 1000, is_open=False)
    await client.leave()
    client.app.gate.set()
    await settle()
    assert not connection._unparsed and len(client.app.seen) == 1


@pytest.mark.asyncio
async def test_what_is_no_http_behind_many_requests_ends_the_connection_behind_their_replies() -> None:
    client, _ = await watched(GET * 40 + b"garbage\r\n\r\n")
    while not client.wire.is_over:
        await settle()
    assert client.wire.said.count(b"last") == 40


# -- framing ----------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /x HTTP/1.1\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: x\r\nHost: x\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: x\r\nhost: y\r\n", 400),
        (b"GET /x HTTP/1.0\r\nHost: x\r\nHost: y\r\n", 400),
        (b"GET http://u@y/x HTTP/1.1\r\nHost: x\r\n", 400),
        (b"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n", 501),
        (b"GET /x HTTP/1.1\r\nHost:\r\n", 200),
        (b"GET /x HTTP/1.0\r\n", 200),
        (b"GET http://y:1/x HTTP/1.1\r\nHost: x\r\n", 200),
    ],
)
async def test_a_head_that_can_be_read_in_two_ways_is_refused(head: bytes, status: int) -> None:
    client = await replies(head + b"\r\n")
    assert client.wire.statuses == [status]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("target", "host"),
    [(b"/x", b"x"), (b"http://y/x", b"y"), (b"http://y:81/x", b"y:81"), (b"http://[::1]:8/x", b"[::1]:8")],
)
async def test_the_server_that_a_target_names_counts(target: bytes, host: bytes) -> None:
    found: list[list[bytes]] = []
    client = Client()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append([value for name, value in scope["headers"] if name == b"host"])
        await client.app(scope, receive, send)

    client._connection.app = app
    await client.say(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % target)
    assert found == [[host]] and client.app.seen == [("GET", "/x", b"")]


@pytest.mark.asyncio
async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    client = await replies(b"POST /x HTTP/1.0\r\nContent-Length: 5\r\n\r\nabcde")
    head, _, body = client.wire.said.partition(b"\r\n\r\n")
    assert body == b"firstlast" and client.wire.is_over
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert client.app.seen == [("POST", "/x", b"abcde")]


@pytest.mark.asyncio
@pytest.mark.parametrize("rest", [b"", GET[:10], POST[:-1]], ids=["nothing", "half a head", "half a body"])
async def test_a_long_reply_is_not_silence(rest: bytes) -> None:
    client = Client()
    client.app.gate.clear()
    await client.say(GET + rest)
    for _ in range(5):
        await client.clock.pass_s(REQUEST_SILENCE_S)
    assert not client.wire.is_over
    client.app.gate.set()
    await settle()
    assert client.wire.statuses == [200]
    await client.leave()


@pytest.mark.asyncio
async def test_what_a_reply_wrote_to_directly_is_freed_at_once() -> None:
    """A cycle of HTTP holds its scope, and this the DirectBody that holds the cycle."""

    def alive() -> int:
        return sum(isinstance(found, DirectBody) for found in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before, client = alive(), await replies(POST + GET)
        assert client.wire.statuses == [200, 200]
        client.app.waits_for_disconnect = True
        await client.say(POST)
        assert alive() > before  # of the one that waits
        await client.leave()
        assert alive() == before
    finally:
        gc.enable()
