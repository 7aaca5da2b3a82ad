"""The listening socket, and which connections are accepted: as many as there are file descriptors for.

A new connection gets the lowest free descriptor. A connection whose descriptor is among the last SPARE_DESCRIPTORS of
the process's limit is refused with a reason, so that files, pipes and restarted workers always find some. A flood of
connections costs the server no more than these replies, and the log one line a minute.
"""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import cast

from diptych.control.errors import ConfigError, UnavailableError
from diptych.serving.api.error_format import error_bytes
from diptych.serving.fleet.worker_process import WORKER_DESCRIPTORS

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 2048
MAX_ACCEPTED = 64  # connections taken in one turn of the event loop
MAX_REFUSALS = 8  # connections that are open only to be refused
SPARE_DESCRIPTORS = MAX_REFUSALS + 8
SERVER_DESCRIPTORS = 16  # of the event loop, the signals, the listening socket and the shared memory
MOST_DESCRIPTORS = 2**20
LINGER_S = 1.0  # for a refused client to send its request and read the reply
SHORTAGE_PAUSE_S = 0.1
LOG_INTERVAL_S = 60.0


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the port is taken or the host is not an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(LISTEN_BACKLOG)
    except OSError as error:
        listening.close()
        cure = "choose another one with --port"
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            cure = "--host must be an address of this machine (127.0.0.1: only programs here reach it, 0.0.0.0: all)"
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; {cure}", param="port") from None
    except OverflowError:
        listening.close()
        raise ConfigError(f"port is {port}; it must be in [0, 65535]", param="port") from None
    return listening


def raise_descriptor_limit(num_workers: int) -> int:
    """Raise the limit of open files of this process and its workers as far as allowed, up to a million. Returns the
    limit. Raises ConfigError when the server could take no connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    num_open = len(os.listdir("/proc/self/fd"))
    least = num_open + SERVER_DESCRIPTORS + num_workers * WORKER_DESCRIPTORS + SPARE_DESCRIPTORS + 1
    if limit < least:
        raise ConfigError(f"this process may open {limit} files (ulimit -n); this server needs at least {least}")
    return limit


class Listener:
    """Takes connections for ``connect``, a factory of protocols. limit: of the process's file descriptors."""

    def __init__(self, listening: socket.socket, limit: int) -> None:
        self._socket = listening
        self._limit = limit
        self._connect: Callable[[], asyncio.Protocol] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_refusals = 0  # that are open
        self._logged_s = -LOG_INTERVAL_S
        reason = f"too many connections: this server may open {limit} files, and all but a reserve are in use"
        self._reply = error_bytes(UnavailableError(reason, code="too_many_connections"))

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self, connect: Callable[[], asyncio.Protocol]) -> None:
        """Take connections from now on."""
        self._connect = connect
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def stop(self) -> None:
        """Take no more."""
        if self._connect is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._connect = None

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                client, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause(error)
                    return
                continue  # this client is gone already
            client.setblocking(False)
            if client.fileno() < self._limit - SPARE_DESCRIPTORS:
                assert self._connect is not None
                self._open(client, self._connect, lambda: None)
            else:
                self._refuse(client)

    def _open(
        self, client: socket.socket, connect: Callable[[], asyncio.Protocol], on_failure: Callable[[], None]
    ) -> None:
        task = asyncio.get_running_loop().create_task(_hand_over(client, connect, on_failure))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, client: socket.socket) -> None:
        self._log("connections are refused: all file descriptors but a reserve are in use")
        if self._num_refusals < MAX_REFUSALS:
            self._num_refusals += 1
            self._open(client, lambda: _Refusal(self._reply, self._on_refused), self._on_refused)
            return
        with contextlib.suppress(OSError):
            client.send(self._reply)
        client.close()

    def _on_refused(self) -> None:
        self._num_refusals -= 1

    def _pause(self, error: OSError) -> None:
        """Leave the clients in the kernel's queue for a moment: there is no descriptor even for a refusal."""
        self._log(f"connections wait: {error.strerror}")
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.call_later(SHORTAGE_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._connect is not None:
            self.start(self._connect)

    def _log(self, words: str) -> None:
        now = time.monotonic()
        if now - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now
            logger.warning("%s (the limit, ulimit -n, is %d)", words, self._limit)


async def _hand_over(
    client: socket.socket, connect: Callable[[], asyncio.Protocol], on_failure: Callable[[], None]
) -> None:
    """Give an accepted connection to the event loop."""
    try:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().connect_accepted_socket(connect, client)
    except OSError as error:  # the client is gone already
        logger.debug("a connection could not be opened: %s", error)
        client.close()
        on_failure()


class _Refusal(asyncio.Protocol):
    """Replies to the first bytes of a client, and closes when the client does, or after LINGER_S."""

    def __init__(self, reply: bytes, on_end: Callable[[], None]) -> None:
        self._reply = reply
        self._on_end = on_end
        self._has_replied = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._hang_up)

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if not self._has_replied:
            self._has_replied = True
            self._transport.write(self._reply)
            self._transport.write_eof()

    def _hang_up(self) -> None:
        self.data_received(b"")
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._timer.cancel()
        self._on_end()
