"""Connections to the workers' port before they have proved the key."""

import asyncio
import secrets

import pytest
import uvloop

from diptych.serving import edge_limits
from diptych.serving.fleet.handshake_port import HandshakePort
from diptych.tls.shared_key import SharedKey


class _Greeter(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"shaken")
        transport.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_connections_that_never_shake_hands_are_bounded_and_keep_no_worker_out(monkeypatch, new_loop):
    monkeypatch.setattr(edge_limits, "UNSHAKEN_WORKERS", 3)

    async def scenario():
        key = SharedKey(secrets.token_bytes(32))
        port = HandshakePort("127.0.0.1", 0, key.server_tls("front end", "worker"), _Greeter)
        port.start()
        silent = []
        for _ in range(4):
            silent.append(await asyncio.open_connection("127.0.0.1", port.port))
        assert await silent[0][0].read() == b""  # the limit and one more: the oldest has made room
        assert port.num_shaking == 3
        tls = key.client_tls("worker", "front end")
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port, ssl=tls, server_hostname="")
        assert await reader.read() == b"shaken"
        writer.close()
        port.close()
        assert port.num_shaking == 0
        for reader, writer in silent:
            assert await reader.read() == b""
            writer.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 30))
