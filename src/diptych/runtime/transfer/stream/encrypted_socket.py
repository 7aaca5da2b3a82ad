"""A connected socket with TLS in it, with the calls that StreamConnection makes of a plain one. Never waits.

The pieces of a message are gathered before they are encrypted. Bytes that TLS has begun to encrypt are kept until the
kernel takes them: what lies in the KV blocks may change meanwhile.
"""

import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from diptych.tls.shared_key import SharedKey

Result = TypeVar("Result")

GATHERED_BYTES = 1 << 18  # encrypted at once


@dataclass(frozen=True, slots=True)
class KVEncryption:
    """How a connector encrypts what it receives, and what it sends."""

    receiver: ssl.SSLContext
    sender: ssl.SSLContext


def kv_encryption(secret: bytes) -> KVEncryption:
    """Encryption for connectors that share this secret."""
    key = SharedKey(secret)
    return KVEncryption(key.server_tls("KV receiver", "KV sender"), key.client_tls("KV sender", "KV receiver"))


class EncryptedSocket:
    """Takes ``sock`` over, which is connected and does not block. Begins the handshake; sending and receiving go on
    with it. waits_for_read: ``sendmsg`` can do nothing before something has come."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self.family = sock.family
        self.waits_for_read = False
        self._socket = context.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False)
        self._begun = b""  # of what sendmsg is given; TLS wants the same bytes again
        if not is_server:
            try:
                self._attempt(self._socket.do_handshake)
            except BlockingIOError:
                pass
            except OSError:
                self._socket.close()
                raise

    def fileno(self) -> int:
        """File descriptor of the socket below."""
        return self._socket.fileno()

    def getsockopt(self, level: int, option: int, size: int = 0) -> int | bytes:
        """Option of the socket below."""
        return self._socket.getsockopt(level, option, size) if size else self._socket.getsockopt(level, option)

    @property
    def has_pending(self) -> bool:
        """Whether something can be received that the kernel knows nothing of."""
        return self._socket.pending() > 0

    def sendmsg(self, pieces: Sequence[memoryview]) -> int:
        """How many of these bytes are on their way. The next call must begin with the first that is not. Raises
        BlockingIOError, and OSError when the connection has failed."""
        data = self._begun = self._begun or _gathered(pieces)
        count = self._attempt(lambda: self._socket.send(data))
        self._begun = b""
        return count

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int]:
        """How many bytes have come into these places; 0 at the end. Raises BlockingIOError, and OSError when the
        connection has failed."""
        total = 0
        for view in views:
            done = 0
            while done < len(view) and (not total or self.has_pending):
                count = self._attempt(partial(self._socket.recv_into, view[done:]), is_reading=True)
                if not count:
                    return (total,)
                done += count
                total += count
            if done < len(view):
                break
        return (total,)

    def _attempt(self, call: Callable[[], Result], *, is_reading: bool = False) -> Result:
        self.waits_for_read = False
        try:
            return call()
        except ssl.SSLWantReadError:
            self.waits_for_read = not is_reading
            raise BlockingIOError from None
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None
        except ssl.SSLCertVerificationError as error:
            raise ConnectionRefusedError("the other end proves another secret; has it the same secret?") from error

    def close(self) -> None:
        """Close the socket below."""
        self._socket.close()


def _gathered(pieces: Sequence[memoryview]) -> bytes:
    parts, left = [], GATHERED_BYTES
    for piece in pieces:
        if left <= 0:
            break
        parts.append(piece[:left])
        left -= len(piece)
    return b"".join(parts)
