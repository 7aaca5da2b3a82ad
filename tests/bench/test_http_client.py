"""The client's connections against servers of every temper: kept, closed, old, encrypted, slow, gone."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from diptych.bench.clock import now_ns
from diptych.bench.http_client import HttpClient
from diptych.bench.token_stream import TokenStream
from diptych.control.errors import ConfigError
from diptych.http1.address import Address

from .conftest import Certificate
from .events import ANSWER, BODY, HEAD, event, text

Reply = Callable[[int, int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]


class Server:
    """Asks ``reply`` (number of the connection, number of the request on it, streams) what to do with each request; if
    it returns False, the connection is closed."""

    def __init__(self, reply: Reply, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self.reply, self.host, self.tls = reply, host, tls
        self.num_connections = self.num_open = 0
        self.requests: list[bytes] = []

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, count = self.num_connections, 0
        self.num_connections += 1
        self.num_open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                if not await self.reply(number, count, reader, writer):
                    break
                count += 1
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass  # the client has gone
        finally:
            writer.close()
            self.num_open -= 1


def talk(server: Server, use: Callable[[HttpClient, Server], Awaitable[Any]]) -> Any:
    """What ``use`` does with a client of a running server."""

    async def run() -> Any:
        listening = await asyncio.start_server(server.on_connection, server.host, 0, ssl=server.tls)
        port = listening.sockets[0].getsockname()[1]
        host = "[::1]" if server.host == "::1" else "localhost" if server.tls else server.host
        client = HttpClient(Address.parse(f"{'https' if server.tls else 'http'}://{host}:{port}"))
        try:
            return await asyncio.wait_for(use(client, server), 20)
        finally:
            await client.close()
            listening.close()
            while server.num_open:
                await asyncio.sleep(0.001)

    return uvloop.run(run())


async def ask(client: HttpClient, body: bytes = b"{}") -> TokenStream:
    """One request."""
    stream = TokenStream(now_ns())
    client.post(client.head("POST", "/v1/completions"), body, stream)
    await stream.done
    return stream


async def well(_: int, __: int, ___: Any, writer: asyncio.StreamWriter) -> bool:
    """A whole answer, again and again."""
    writer.write(ANSWER)
    return True


async def three_times(client: HttpClient, _: Server) -> list[TokenStream]:
    """One after another."""
    return [await ask(client) for _ in range(3)]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_is_used_again(host: str) -> None:
    server = Server(well, host)
    streams = talk(server, three_times)
    assert all(stream.is_complete and len(stream.stamps) == 2 for stream in streams), streams[0].error
    assert server.num_connections == 1 and len(server.requests) == 3
    assert all(stream.sent_ns <= stream.stamps[0] <= stream.end_ns for stream in streams)


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER.replace(b"\r\nC", b"\r\nConnection: close\r\nC", 1),
        ANSWER.replace(b"HTTP/1.1", b"HTTP/1.0"),
        HEAD.replace(b"1.1", b"1.0") + b"\r\n" + BODY,
        HEAD + b"\r\n" + BODY,
    ],
    ids=["close", "1.0", "1.0 until the end", "1.1 until the end"],
)
def test_a_connection_that_the_server_does_not_keep_is_not_used_again(answer: bytes) -> None:
    async def reply(_: int, __: int, ___: Any, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer)
        return False

    server = Server(reply)
    streams = talk(server, three_times)
    assert all(stream.is_complete and len(stream.stamps) == 2 for stream in streams), streams[0].error
    assert server.num_connections == 3 and len(server.requests) == 3


def test_a_kept_connection_that_the_server_has_closed_costs_no_request() -> None:
    async def use(client: HttpClient, server: Server) -> None:
        first = await ask(client)
        second = await ask(client)  # the server closes instead of answering: it had no time left for this connection
        assert first.is_complete and second.is_complete and len(second.stamps) == 2
        assert (client.num_retried, server.num_connections) == (1, 2)

    async def reply(connection: int, count: int, _: Any, writer: asyncio.StreamWriter) -> bool:
        if connection == 0 and count == 1:
            return False
        return await well(connection, count, _, writer)

    talk(Server(reply), use)


@pytest.mark.parametrize("begins", [False, True])
def test_a_request_that_the_server_has_seen_is_never_sent_twice(begins: bool) -> None:
    """It fails: on a new connection, and on a kept connection whose answer had begun."""

    async def reply(connection: int, count: int, _: Any, writer: asyncio.StreamWriter) -> bool:
        if begins and count == 0:
            return await well(connection, count, _, writer)
        if begins:
            writer.write(ANSWER[:30])
        return False

    async def use(client: HttpClient, server: Server) -> None:
        if begins:
            await ask(client)
        failed = await ask(client)
        assert not failed.is_complete and "the connection ended without an answer" in (failed.error or "")
        assert client.num_retried == 0 and len(server.requests) == 1 + begins

    talk(Server(reply), use)


def test_connections_opened_ahead_are_those_that_requests_go_to() -> None:
    async def use(client: HttpClient, server: Server) -> None:
        await ask(client)
        while client.connect_ahead(8):
            await asyncio.sleep(0)
        await asyncio.gather(*(ask(client) for _ in range(8)))
        assert server.num_connections == 8 and len(server.requests) == 9

    talk(Server(well), use)


def test_hanging_up_closes_the_connection_and_says_why() -> None:
    gone = asyncio.Event()

    async def reply(_: int, __: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD + b"Content-Length: 10000\r\n\r\n" + event(text("a")))
        assert await reader.read(1) == b""
        gone.set()
        return False

    async def use(client: HttpClient, _: Server) -> None:
        stream = TokenStream(now_ns())
        client.post(client.head("POST", "/v1/completions"), b"{}", stream)
        while not stream.stamps:
            await asyncio.sleep(0.001)
        stream.cancel(now_ns(), "enough")
        await stream.done
        await asyncio.wait_for(gone.wait(), 5)
        assert stream.error == "enough" and not stream.is_complete and len(stream.stamps) == 1

    talk(Server(reply), use)


LONG = b"x" * 5_000_000


async def long_answer(_: int, __: int, ___: Any, writer: asyncio.StreamWriter) -> bool:
    """A token of three million bytes, then two short ones, in a single chunk."""
    body = event(text("a" * 3_000_000)) + BODY
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    return True


def test_long_questions_and_long_answers_go_through() -> None:
    server = Server(long_answer)
    stream = talk(server, lambda client, _: ask(client, LONG))
    assert stream.is_complete and len(stream.stamps) == 3, stream.error
    assert server.requests[0].endswith(LONG)


def test_a_certificate_is_believed_only_when_it_is_trusted(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = talk(Server(well, tls=certificate.server), lambda client, _: ask(client))
    assert "its certificate is not trusted" in (refused.error or ""), refused.error
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    server = Server(well, tls=certificate.server)
    streams = talk(server, three_times)
    assert all(stream.is_complete and len(stream.stamps) == 2 for stream in streams), streams[0].error
    assert server.num_connections == 1


def test_long_questions_and_answers_go_through_encrypted_too(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    server = Server(long_answer, tls=certificate.server)
    stream = talk(server, lambda client, _: ask(client, LONG))
    assert stream.is_complete and len(stream.stamps) == 3, stream.error
    assert server.requests[0].endswith(LONG)


def test_a_name_or_port_where_nobody_listens_is_said() -> None:
    async def use(url: str) -> str:
        client = HttpClient(Address.parse(url))
        try:
            return (await ask(client)).error or ""
        finally:
            await client.close()

    assert "cannot connect to 127.0.0.1:9: Connection refused" in uvloop.run(use("http://127.0.0.1:9"))
    assert "cannot connect to nowhere.invalid:80" in uvloop.run(use("http://nowhere.invalid"))


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x/?q=1", "http://me:key@x"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url "):
        Address.parse(url)


def test_an_address_may_have_a_path_and_end_in_v1() -> None:
    assert Address.parse("https://h/api/v1/") == Address("h", 443, True, "/api")
    assert Address.parse("127.0.0.1:8000").netloc == "127.0.0.1:8000"
    assert Address.parse("http://[::1]:80/v1") == Address("::1", 80, False, "")
    assert Address.parse("http://[::1]:80").netloc == "[::1]:80"
