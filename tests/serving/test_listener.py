"""Which connections are taken, with a limit of file descriptors that is close."""

import asyncio
import errno
import json
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.serving.backlogs import check_backlog, on_linux

from diptych.control.errors import ConfigError
from diptych.serving import edge_limits
from diptych.serving.api.listener import Listener, bind
from diptych.serving.descriptors import LEAST_REFUSALS, SHORTAGE_PAUSE_S, raise_descriptor_limit, spare_descriptors

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo(asyncio.Protocol):
    """Sends back what it receives."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def lowest_free() -> int:
    """The descriptor that the next file gets."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


async def serve(listening: socket.socket, limit: int) -> Listener:
    listener = Listener(listening, limit)
    listener.start(Echo)
    return listener


async def connect(listening: socket.socket, say: bytes = b"hello") -> tuple[Streams, bytes]:
    """A connection, and the first bytes that it receives."""
    reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
    writer.write(say)
    return (reader, writer), await asyncio.wait_for(reader.read(10_000), 10)


def close(connections: list[Streams]) -> None:
    for _, writer in connections:
        writer.transport.abort()


@pytest.mark.asyncio
async def test_connections_beyond_the_limit_get_a_reason_and_the_rest_is_undisturbed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with bind("127.0.0.1", 0) as listening, caplog.at_level(logging.WARNING):
        # a connection takes two descriptors here: the client is in this process, too
        listener = await serve(listening, lowest_free() + 10 + spare_descriptors(0))
        taken, refused = [], []
        for _ in range(12):
            streams, said = await connect(listening)
            (taken if said == b"hello" else refused).append((streams, said))
        assert 1 <= len(taken) <= 5  # fewer where other tests of this process have descriptors in use between these
        for (reader, _), said in refused:
            head, _, body = said.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1" in head
            assert b"\r\nconnection: close" in head
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("service_unavailable_error", "too_many_connections")
            assert await asyncio.wait_for(reader.read(), 10) == b""
        (reader, writer), _ = taken[0]
        writer.write(b"again")
        assert await asyncio.wait_for(reader.read(100), 10) == b"again"
        close([streams for streams, _ in (*taken, *refused)])
        for _ in range(200):  # the listener sees the ends a little later
            await asyncio.sleep(0.05)
            streams, said = await connect(listening)
            close([streams])
            if said == b"hello":
                break
        assert said == b"hello"
        listener.stop()
    assert len([record for record in caplog.records if "refused" in record.message]) == 1


@pytest.mark.asyncio
async def test_a_flood_is_refused_to_the_last_connection() -> None:
    with bind("127.0.0.1", 0) as listening:
        listener = await serve(listening, 0)
        silent = [await asyncio.open_connection(*listening.getsockname()[:2]) for _ in range(3 * LEAST_REFUSALS)]
        for reader, _ in silent:  # a client that sends nothing gets the reason, too
            said = await asyncio.wait_for(reader.read(), 10)
            assert said.startswith(b"HTTP/1.1 503 ")
        close(silent)
        listener.stop()


@pytest.mark.asyncio
async def test_without_a_free_descriptor_clients_wait_and_are_taken_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Short:
        """A listening socket in a process that is out of descriptors for a while."""

        def __init__(self, listening: socket.socket) -> None:
            self._listening = listening
            self.num_failures = 0
            self.is_short = True

        def __getattr__(self, name: str) -> Any:
            return getattr(self._listening, name)

        def accept(self) -> Any:
            if self.is_short:
                self.num_failures += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self._listening.accept()

    with bind("127.0.0.1", 0) as listening, caplog.at_level(logging.WARNING):
        short = Short(listening)
        listener = await serve(short, 10_000)  # type: ignore[arg-type]
        waiting = asyncio.create_task(connect(listening))
        await asyncio.sleep(3.5 * SHORTAGE_PAUSE_S)
        assert not waiting.done()
        assert short.num_failures < 10  # it does not try all the time
        short.is_short = False
        streams, said = await waiting
        assert said == b"hello"
        close([streams])
        listener.stop()
    assert len(caplog.records) == 1


@pytest.mark.asyncio
async def test_a_stopped_listener_takes_no_connection() -> None:
    with bind("127.0.0.1", 0) as listening:
        listener = await serve(listening, 10_000)
        listener.stop()
        listener.stop()
        reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        close([(reader, writer)])


def test_the_address_is_one_to_paste() -> None:
    with bind("127.0.0.1", 0) as listening:
        assert Listener(listening, 100).url == f"http://127.0.0.1:{listening.getsockname()[1]}"
    with bind("::1", 0) as listening:
        assert Listener(listening, 100).url == f"http://[::1]:{listening.getsockname()[1]}"


@contextmanager
def soft_limit(limit: int) -> Iterator[int]:
    """Let this process open ``limit`` files at first. Gives how many it may allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_is_raised_as_far_as_it_goes() -> None:
    with soft_limit(200) as hard:
        limit = raise_descriptor_limit(1)
        assert limit == min(hard, 2**20)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit


def test_a_limit_that_is_too_low_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (30, 30))
    with pytest.raises(ConfigError, match=r"may open 30 files \(ulimit -n\); this server needs at least \d+"):
        raise_descriptor_limit(1)


@on_linux
def test_as_many_connections_wait_as_the_backlog_and_those_beyond_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "LISTEN_BACKLOG", 3)
    check_backlog(bind("127.0.0.1", 0), 3)
