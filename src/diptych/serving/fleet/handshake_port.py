"""The listening socket of the workers' door: bounds the connections that have not proved the key yet.

Anybody who reaches the port may open connections and send nothing. So those in their TLS handshake are counted: beyond
the limit the oldest makes room, for a worker that knows the key needs milliseconds and gets them. No connection takes
a descriptor of the reserve that files, pipes and restarted workers need.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from diptych.base.limited_log import LimitedLog
from diptych.serving import edge_limits
from diptych.serving.descriptors import (
    SHORTAGE_PAUSE_S,
    descriptor_limit,
    is_out_of_descriptors,
    spare_descriptors,
)

logger = logging.getLogger(__name__)


class HandshakePort:
    """Makes connections that prove the key into protocols of ``connect``. Raises OSError when the address cannot be
    had."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext, connect: Callable[[], asyncio.Protocol]) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._socket = socket.create_server(address[:2], family=family, backlog=edge_limits.WORKER_BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._tls = tls
        self._connect = connect
        self._shaking: dict[socket.socket, None] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()  # of these, and of those that were dropped and end
        self._retry: asyncio.TimerHandle | None = None
        self._log = LimitedLog(logger)

    @property
    def num_shaking(self) -> int:
        """Connections that have not proved the key."""
        return len(self._shaking)

    def start(self) -> None:
        """Take connections from now on."""
        self._retry = None
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    async def close(self) -> None:
        """Take no more, and end those that have not proved the key. Once it is closed, nothing happens."""
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
        if self._retry is not None:
            self._retry.cancel()
        self._socket.close()
        while self._shaking:
            self._drop_oldest()
        await asyncio.gather(*self._tasks)

    def _accept(self) -> None:
        limit = descriptor_limit()
        for _ in range(edge_limits.UNSHAKEN_WORKERS):  # in one turn of the event loop
            try:
                client, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if is_out_of_descriptors(error):
                    self._pause(error)
                    return
                continue  # this client is gone already
            if client.fileno() >= limit - spare_descriptors(limit):
                self._log.warning(
                    "refused", "connections of workers are refused: all file descriptors but a reserve are in use"
                )
                client.close()
                continue
            if len(self._shaking) >= edge_limits.UNSHAKEN_WORKERS:
                self._log.warning(
                    "unshaken", "too many connections have not proved the workers' key; the oldest are closed"
                )
                self._drop_oldest()
            client.setblocking(False)
            self._shaking[client] = None
            task = asyncio.get_running_loop().create_task(self._shake(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _shake(self, client: socket.socket) -> None:
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connect, client, ssl=self._tls, ssl_handshake_timeout=edge_limits.WORKER_HANDSHAKE_S
            )
        except OSError as error:  # no key, another key, no word in time, or dropped
            logger.debug("a connection to the workers' port ended in its handshake: %s", error)
        finally:
            self._shaking.pop(client, None)

    def _drop_oldest(self) -> None:
        """End a handshake by the end of its bytes: the event loop owns the descriptor."""
        client = next(iter(self._shaking))
        del self._shaking[client]
        with suppress(OSError):  # it is gone already
            client.shutdown(socket.SHUT_RDWR)

    def _pause(self, error: OSError) -> None:
        self._log.warning("wait", "connections of workers wait: %s", error.strerror)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        self._retry = loop.call_later(SHORTAGE_PAUSE_S, self.start)
