"""Messages between the two processes of a unix socket, without ever blocking.

Owns the bytes that the kernel has not taken yet and the part of the next message that has arrived; length_prefix.py
separates messages.
"""

import contextlib
import socket
from pathlib import Path

from diptych.base.length_prefix import Unpacker, pack

_RECEIVE_BYTES = 65_536  # of one system call
_BACKLOG = 1


class Channel:
    """One end. Everything returns at once: watch ``fileno`` to know when to ``receive`` and, while ``has_unsent``, when
    to ``flush``. When the other end is gone, ``is_closed`` is true as soon as everything that it sent was received,
    and what is sent is dropped."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.is_closed = False
        self._socket = connected
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._unpacker = Unpacker()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether the kernel did not take everything so far."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message after those before it, as soon as the kernel takes it. At most 4 GiB."""
        self._unsent += pack(message)
        self.flush()

    def flush(self) -> None:
        """Hand over as much as the kernel takes now."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                try:
                    del self._unsent[: self._socket.send(self._unsent)]
                except (BrokenPipeError, ConnectionResetError):  # no process will read it; ``receive`` finds the end
                    self._unsent.clear()

    def receive(self) -> list[bytes]:
        """All messages that are there, in their order."""
        messages: list[bytes] = []
        num_bytes = _RECEIVE_BYTES
        while num_bytes == _RECEIVE_BYTES and not self.is_closed:
            try:
                num_bytes = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                break
            except ConnectionResetError:
                num_bytes = 0
            self.is_closed = not num_bytes
            messages += self._unpacker.feed(memoryview(self._buffer)[:num_bytes])
        return messages

    def close(self, linger_s: float = 0.0) -> None:
        """Close this end, after at most ``linger_s`` for what is unsent."""
        if self._unsent and linger_s:
            self._socket.settimeout(linger_s)
            with contextlib.suppress(OSError):  # the other end is gone, or takes too long
                self._socket.sendall(self._unsent)
        self._socket.close()


def connect(path: Path) -> Channel:
    """The end of the process that was started. Raises OSError when no process listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(path))
    return Channel(sock)


def listen(path: Path) -> socket.socket:
    """Where the other process connects; ``accept`` gives this end. The directory must be this user's own."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.bind(str(path))
    sock.listen(_BACKLOG)
    return sock


def accept(listener: socket.socket) -> Channel | None:
    """This end of the connection; None while no process has connected."""
    try:
        return Channel(listener.accept()[0])
    except BlockingIOError:
        return None
