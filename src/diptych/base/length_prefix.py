"""Messages in a stream of bytes: each is its length (uint32, little endian) and its bytes.

Used between two processes of one user on one host: the sockets between a front end and its workers, the pipes between a
server and the process that computes its panels. There is no limit but the prefix's own (4 GiB) because both ends are
ours. What comes over a network has a limit, inside TLS (serving/join/framed_link.py), or frames with seals of their own
(runtime/transfer/stream/frames.py).
"""

import struct
from typing import IO

_LENGTH = struct.Struct("<I")


def pack(message: bytes) -> bytes:
    """The message as it is sent. Raises struct.error above 4 GiB."""
    return _LENGTH.pack(len(message)) + message


def read_message(stream: IO[bytes]) -> bytes:
    """The next message of a blocking, buffered stream. Raises EOFError when the stream ends before it is whole."""
    length = _LENGTH.unpack(_exactly(stream, _LENGTH.size))[0]
    return _exactly(stream, length)


class Unpacker:
    """Cuts messages out of bytes that arrive in pieces of any size. limit: bytes of the longest message."""

    def __init__(self, limit: int = 2**32 - 1) -> None:
        self.limit = limit
        self._arrived = bytearray()  # the beginning of a message

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The messages that these bytes complete, in their order. Raises ValueError for one above the limit, as soon as
        its length is known."""
        self._arrived += data
        arrived, start = self._arrived, 0
        messages: list[bytes] = []
        while len(arrived) >= (begin := start + _LENGTH.size):
            length = _LENGTH.unpack_from(arrived, start)[0]
            if length > self.limit:
                raise ValueError(f"a message of {length} bytes; at most {self.limit}")
            end = begin + length
            if end > len(arrived):
                break
            messages.append(bytes(arrived[begin:end]))
            start = end
        del arrived[:start]
        return messages


def _exactly(stream: IO[bytes], num_bytes: int) -> bytes:
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError(f"the stream ended {num_bytes - len(data)} bytes before the end of a message")
    return data
