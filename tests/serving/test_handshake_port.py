"""Connections to the workers' port before they have proved the key."""

import asyncio
import secrets
from collections.abc import Callable
from typing import cast

import pytest
import uvloop
from tests.serving.backlogs import check_backlog, on_linux

from diptych.serving import edge_limits
from diptych.serving.fleet import handshake_port
from diptych.serving.fleet.handshake_port import HandshakePort
from diptych.tls.shared_key import SharedKey

KEY = SharedKey(secrets.token_bytes(32))
NewLoop = Callable[[], asyncio.AbstractEventLoop]


class _Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.WriteTransport, transport)  # uvloop's is none by its class
        stream.write(b"shaken")
        stream.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_connections_that_never_shake_hands_are_bounded_and_keep_no_worker_out(
    monkeypatch: pytest.MonkeyPatch, new_loop: NewLoop
) -> None:
    monkeypatch.setattr(edge_limits, "UNSHAKEN_WORKERS", 3)

    async def scenario() -> None:
        port = HandshakePort("127.0.0.1", 0, KEY.server_tls("front end", "worker"), _Greeter)
        port.start()
        silent = []
        for _ in range(4):
            silent.append(await asyncio.open_connection("127.0.0.1", port.port))
        assert await silent[0][0].read() == b""  # the limit and one more: the oldest has made room
        assert port.num_shaking == 3
        tls = KEY.client_tls("worker", "front end")
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port, ssl=tls, server_hostname="")
        assert await reader.read() == b"shaken"
        writer.close()
        await writer.wait_closed()
        await port.close()
        await port.close()  # whoever ends the front end may come twice
        assert port.num_shaking == 0
        for reader, writer in silent:
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_handshake_has_its_time(monkeypatch: pytest.MonkeyPatch, new_loop: NewLoop) -> None:
    monkeypatch.setattr(edge_limits, "WORKER_HANDSHAKE_S", 0.05)

    async def scenario() -> None:
        port = HandshakePort("localhost", 0, KEY.server_tls("front end", "worker"), _Greeter)
        port.start()
        reader, writer = await asyncio.open_connection("localhost", port.port)
        writer.write(b"\x16\x03\x01")  # half of a record, and no more
        assert await reader.read() == b""
        writer.close()
        while port.num_shaking:
            await asyncio.sleep(0.001)
        await port.close()
        for _ in range(20):  # the loop closes its handles
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 30))


def test_no_connection_takes_a_descriptor_of_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_port, "descriptor_limit", lambda: 16)  # fewer than the reserve

    async def scenario() -> None:
        port = HandshakePort("127.0.0.1", 0, KEY.server_tls("front end", "worker"), _Greeter)
        port.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        assert await reader.read() == b"" and port.num_shaking == 0
        writer.close()
        await port.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


@on_linux
def test_as_many_connections_wait_as_the_backlog_and_those_beyond_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "WORKER_BACKLOG", 3)
    port = HandshakePort("127.0.0.1", 0, KEY.server_tls("front end", "worker"), _Greeter)
    check_backlog(port._socket, 3)
