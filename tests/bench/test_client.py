"""The client's connections against servers of every temper: kept, closed, old, encrypted, slow, gone."""

import asyncio
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from diptych.bench.client_stream import TokenStream
from diptych.bench.health import Health, worst_problems
from diptych.bench.http import Address, Client, now_ns
from diptych.bench.poller import LoopPoller
from diptych.bench.session import BenchConfig, drive, open_session
from diptych.bench.target import Target, TargetConfig
from diptych.control.errors import ConfigError
from diptych.workload.build import ArrivalConfig, WorkloadConfig

EVENT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":%b}]}\n\n'
BODY = EVENT % b"null" + EVENT % b'"stop"' + b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
ANSWER = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
Reply = Callable[[int, int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]


class Server:
    """Asks ``reply`` (number of the connection, number of the request on it, streams) what to do with each request; one
    that says False gets its connection closed."""

    def __init__(self, reply: Reply, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self.reply, self.host, self.tls = reply, host, tls
        self.num_connections = 0
        self.requests: list[bytes] = []

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, count = self.num_connections, 0
        self.num_connections += 1
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


def talk(server: Server, use: Callable[[Client, Server], Awaitable[Any]]) -> Any:
    """What ``use`` does with a client of a running server."""

    async def run() -> Any:
        listening = await asyncio.start_server(server.on_connection, server.host, 0, ssl=server.tls)
        port = listening.sockets[0].getsockname()[1]
        host = "[::1]" if server.host == "::1" else "localhost" if server.tls else server.host
        client = Client(Address.parse(f"{'https' if server.tls else 'http'}://{host}:{port}"))
        try:
            return await asyncio.wait_for(use(client, server), 20)
        finally:
            await client.close()
            listening.close()

    return uvloop.run(run())


async def ask(client: Client, body: bytes = b"{}") -> TokenStream:
    """One request."""
    stream = TokenStream(now_ns())
    client.post(client.head("POST", "/v1/completions"), body, stream)
    await stream.done
    return stream


async def well(_: int, __: int, ___: Any, writer: asyncio.StreamWriter) -> bool:
    """A whole answer, again and again."""
    writer.write(ANSWER)
    return True


async def three_times(client: Client, _: Server) -> list[TokenStream]:
    """One after another."""
    return [await ask(client) for _ in range(3)]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_is_used_again(host: str) -> None:
    server = Server(well, host)
    streams = talk(server, three_times)
    assert all(stream.is_complete and len(stream.stamps) == 2 for stream in streams), streams[0].error
    assert server.num_connections == 1 and len(server.requests) == 3
    assert all(stream.sent_ns <= stream.stamps[0] <= stream.end_ns for stream in streams)


def test_the_context_of_a_llama_cpp_server_is_what_a_request_may_have() -> None:
    models = b'{"data":[{"id":"m","object":"model","meta":{"n_ctx":8448,"n_ctx_train":16384}}]}'

    async def reply(_: int, __: int, ___: Any, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(models), models))
        return True

    target = talk(Server(reply), lambda client, _: Target.find(TargetConfig(url="http://127.0.0.1"), client))
    assert target.facts.max_model_len == 8448


def test_without_an_epoll_the_event_loop_watches_the_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.bench.http.new_poller", LoopPoller)
    server = Server(well)
    streams = talk(server, three_times)
    assert all(stream.is_complete and len(stream.stamps) == 2 for stream in streams), streams[0].error
    assert server.num_connections == 1


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
    async def use(client: Client, server: Server) -> None:
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
    """It fails: on a connection that was new, and on a kept one whose answer had begun."""

    async def reply(connection: int, count: int, _: Any, writer: asyncio.StreamWriter) -> bool:
        if begins and count == 0:
            return await well(connection, count, _, writer)
        if begins:
            writer.write(ANSWER[:30])
        return False

    async def use(client: Client, server: Server) -> None:
        if begins:
            await ask(client)
        failed = await ask(client)
        assert not failed.is_complete and "the connection ended without an answer" in (failed.error or "")
        assert client.num_retried == 0 and len(server.requests) == 1 + begins

    talk(Server(reply), use)


def test_connections_opened_ahead_are_those_that_requests_go_to() -> None:
    async def use(client: Client, server: Server) -> None:
        await ask(client)
        while client.connect_ahead(8):
            await asyncio.sleep(0)
        await asyncio.gather(*(ask(client) for _ in range(8)))
        assert server.num_connections == 8 and len(server.requests) == 9

    talk(Server(well), use)


def test_hanging_up_closes_the_connection_and_says_why() -> None:
    gone = asyncio.Event()

    async def reply(_: int, __: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD + b"Content-Length: 10000\r\n\r\n" + EVENT % b"null")
        assert await reader.read(1) == b""
        gone.set()
        return False

    async def use(client: Client, _: Server) -> None:
        stream = TokenStream(now_ns())
        client.post(client.head("POST", "/v1/completions"), b"{}", stream)
        while not stream.stamps:
            await asyncio.sleep(0.001)
        stream.cancel(now_ns(), "enough")
        await stream.done
        await asyncio.wait_for(gone.wait(), 5)
        assert stream.error == "enough" and not stream.is_complete and len(stream.stamps) == 1

    talk(Server(reply), use)


def test_long_questions_and_long_answers_go_through() -> None:
    body = b"x" * 5_000_000
    reply_body = EVENT.replace(b'"a"', b'"' + b"a" * 3_000_000 + b'"') % b"null" + BODY

    async def reply(_: int, __: int, ___: Any, writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(reply_body), reply_body))
        return True

    server = Server(reply)
    stream = talk(server, lambda client, _: ask(client, body))
    assert stream.is_complete and len(stream.stamps) == 3, stream.error
    assert server.requests[0].endswith(body)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells when something came")
def test_a_client_that_had_no_time_stamps_a_token_no_later_for_that() -> None:
    """The token comes while the client does something else; its time is from before the client looks."""
    listening = socket.create_server(("127.0.0.1", 0))
    has_answered = threading.Event()

    def serve() -> None:
        with listening, listening.accept()[0] as connection:
            for _ in range(2):
                while not connection.recv(1 << 16).endswith(b"{}"):
                    continue
                connection.sendall(ANSWER)
                has_answered.set()
            connection.recv(1)

    async def use() -> None:
        client = Client(Address.parse(f"127.0.0.1:{listening.getsockname()[1]}"))
        await ask(client)
        has_answered.clear()
        stream = TokenStream(now_ns())
        client.post(client.head("POST", "/v1/completions"), b"{}", stream)
        has_answered.wait()
        looked_ns = now_ns()
        await stream.done
        assert stream.sent_ns < stream.stamps[0] < looked_ns
        await client.close()

    server = threading.Thread(target=serve)
    server.start()
    uvloop.run(use())
    server.join()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_is_believed_only_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    refused = talk(Server(well, tls=tls), lambda client, _: ask(client))
    assert "its certificate is not trusted" in (refused.error or ""), refused.error
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    server = Server(well, tls=tls)
    streams = talk(server, three_times)
    assert all(stream.is_complete and len(stream.stamps) == 2 for stream in streams), streams[0].error
    assert server.num_connections == 1


def test_a_name_or_port_where_nobody_listens_is_said() -> None:
    async def use(url: str) -> str:
        client = Client(Address.parse(url))
        try:
            return (await ask(client)).error or ""
        finally:
            await client.close()

    assert "cannot connect to 127.0.0.1:9: Connection refused" in uvloop.run(use("http://127.0.0.1:9"))
    assert "cannot connect to nowhere.invalid:80" in uvloop.run(use("http://nowhere.invalid"))


def test_a_client_in_the_way_is_a_problem_in_words() -> None:
    health = Health(cpu_share=0.3, lag_p50_ms=0.1, lag_p99_ms=1.0, lag_max_ms=30.0, late_p99_ms=0.2, wait_share=0.001)
    assert health.excesses == {} and worst_problems([health.excesses]) == []
    ill = Health(cpu_share=0.95, lag_p50_ms=1.0, lag_p99_ms=9.0, lag_max_ms=30.0, late_p99_ms=8.0, wait_share=0.2)
    assert set(ill.excesses) == {"cpu", "wait", "lag", "late"} and len(worst_problems([ill.excesses])) == 4


def test_more_clients_than_this_process_can_have_connections_are_refused_before_the_start(url: str) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    workload = WorkloadConfig(num_requests=most, arrivals=ArrivalConfig(kind="closed", concurrency=most))

    async def use() -> None:
        async with open_session(BenchConfig(target=TargetConfig(url=url), workload=workload, warm_up=0)) as session:
            await session.run()

    with pytest.raises(ConfigError, match=r"concurrency is .* open files"):
        drive(use())
