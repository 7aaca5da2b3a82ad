"""The listening socket, and which connections are accepted: as many as there are file descriptors for.

The kernel holds connections until they are accepted, and drops or resets those that find its queue full. So they are
accepted many at a time, at little cost, and become HTTP connections a few in each turn of the event loop; one whose
client has left again by then never does.

A connection whose descriptor is among the reserve (serving/descriptors.py) is refused with a reason. A flood of
connections costs the server no more than these replies, and the log one line a minute.
"""

import asyncio
import errno
import logging
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import cast

from diptych.base.limited_log import LimitedLog
from diptych.control.errors import ConfigError, UnavailableError
from diptych.serving import edge_limits
from diptych.serving.api.error_format import error_bytes
from diptych.serving.descriptors import (
    SHORTAGE_PAUSE_S,
    is_out_of_descriptors,
    num_refusals,
    spare_descriptors,
)

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 512  # connections taken from the kernel in one turn of the event loop: some 5 ms
OPENED_AT_ONCE = 32  # of these, made HTTP connections in one turn
USUAL_BACKLOG = 4096  # net.core.somaxconn of Linux since 5.4
SOMAXCONN = Path("/proc/sys/net/core/somaxconn")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the port is taken or the host is not an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(edge_limits.LISTEN_BACKLOG)
    except OSError as error:
        listening.close()
        cure = "choose another one with --port"
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            cure = "--host must be an address of this machine (127.0.0.1: only programs here reach it, 0.0.0.0: all)"
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; {cure}", param="port") from None
    except OverflowError:
        listening.close()
        raise ConfigError(f"port is {port}; it must be in [0, 65535]", param="port") from None
    _report_backlog()
    return listening


def _report_backlog() -> None:
    """Say when the kernel holds fewer connections than were asked for: as a warning where it is fewer than usual."""
    try:
        most = int(SOMAXCONN.read_text())
    except (OSError, ValueError):  # a system without it
        return
    if most < edge_limits.LISTEN_BACKLOG:
        logger.log(
            logging.WARNING if most < USUAL_BACKLOG else logging.INFO,
            "net.core.somaxconn is %d: of connections that come all at once, those beyond wait for a second or are "
            "reset by the kernel (sysctl -w net.core.somaxconn=%d)",
            most,
            edge_limits.LISTEN_BACKLOG,
        )


class Listener:
    """Takes connections for ``connect``, a factory of protocols. limit: of the process's file descriptors."""

    def __init__(self, listening: socket.socket, limit: int) -> None:
        self._socket = listening
        self._limit = limit
        self._connect: Callable[[], asyncio.Protocol] | None = None
        self._accepted: deque[socket.socket] = deque()  # that are no HTTP connections yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_refusals = 0  # that are open
        self._is_full = False  # of refusals: the clients wait in the kernel's queue
        self._log = LimitedLog(logger)
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
        self._listen()

    def stop(self) -> None:
        """Take no more; those that are accepted become connections, and end as the others do."""
        if self._connect is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            while self._accepted:
                self._open_next(self._connect)
            self._connect = None

    def _listen(self) -> None:
        if self._connect is not None and not self._is_full:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        was_empty = not self._accepted
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                client, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if is_out_of_descriptors(error):
                    self._pause(error)
                    break
                continue  # this client is gone already
            client.setblocking(False)
            if client.fileno() < self._limit - spare_descriptors(self._limit):
                self._accepted.append(client)
            elif self._refuse(client):
                break
        if was_empty and self._accepted:
            self._open_some()

    def _open_some(self) -> None:
        """Make the oldest connections that were accepted HTTP connections, and the others later."""
        for _ in range(min(OPENED_AT_ONCE, len(self._accepted))):
            assert self._connect is not None  # stop() leaves none
            self._open_next(self._connect)
        if self._accepted:
            asyncio.get_running_loop().call_soon(self._open_some)

    def _open_next(self, connect: Callable[[], asyncio.Protocol]) -> None:
        client = self._accepted.popleft()
        if _has_left(client):
            client.close()
        else:
            self._open(client, connect, lambda: None)

    def _open(
        self, client: socket.socket, connect: Callable[[], asyncio.Protocol], on_failure: Callable[[], None]
    ) -> None:
        task = asyncio.get_running_loop().create_task(_hand_over(client, connect, on_failure))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, client: socket.socket) -> bool:
        """Refuse a connection with a reason. Returns whether no more can be refused now. A connection that is closed
        at once while its client still sends is reset by the kernel, and the client never reads the reason."""
        self._warn("are refused: all file descriptors but a reserve are in use")
        self._num_refusals += 1
        self._open(client, lambda: _Refusal(self._reply, self._on_refused), self._on_refused)
        self._is_full = self._num_refusals >= num_refusals(self._limit)
        if self._is_full:
            asyncio.get_running_loop().remove_reader(self._socket)
        return self._is_full

    def _on_refused(self) -> None:
        self._num_refusals -= 1
        if self._is_full:
            self._is_full = False
            self._listen()

    def _warn(self, words: str) -> None:
        """One line a minute, of either kind."""
        self._log.warning("connections", "connections %s (the limit, ulimit -n, is %d)", words, self._limit)

    def _pause(self, error: OSError) -> None:
        """Leave the clients in the kernel's queue for a moment: there is no descriptor even for a refusal."""
        self._warn(f"wait: {error.strerror}")
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.call_later(SHORTAGE_PAUSE_S, self._listen)


def _has_left(client: socket.socket) -> bool:
    """Whether a client has closed its connection, or reset it, without a byte."""
    try:
        return not client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


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
    except Exception:  # a defect, which the loop's own handler counts; nothing is left of the connection
        client.close()
        on_failure()
        raise


class _Refusal(asyncio.Protocol):
    """Replies to the first bytes of a client, and closes when the client does, or after REFUSAL_LINGER_S."""

    def __init__(self, reply: bytes, on_end: Callable[[], None]) -> None:
        self._reply = reply
        self._on_end = on_end
        self._has_replied = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(edge_limits.REFUSAL_LINGER_S, self._hang_up)

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
