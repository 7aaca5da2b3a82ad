"""Messages in a stream of bytes: each is its length (uint32, little endian) and its bytes.

Used between two processes of one user on one host: the sockets between a front end and its workers, the pipes between a
server and the process that computes its panels. There is no limit but the prefix's own (4 GiB) because both ends are
ours. What comes over a network has frames with limits and authentication: runtime/transfer/stream/frames.py.
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
    """Cuts messages out of bytes that arrive in pieces of any size."""

    def __init__(self) -> None:
        self._arrived = bytearray()  # the beginning of a message

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The messages that these bytes complete, in their order."""
        self._arrived += data
        arrived, start = self._arrived, 0
        messages: list[bytes] = []
        while len(arrived) >= (begin := start + _LENGTH.size):
            end = begin + _LENGTH.unpack_from(arrived, start)[0]
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
