"""The frames on a connection between two connectors: their layout, their bounds, their seals. No I/O.

A frame is a header of HEADER_BYTES and a body. Integers are little-endian; nothing is ever unpickled.

    kind        from      body                  meaning
    OPEN        sender    transfer id           this number stands for this transfer; its first token is ``start``
    DATA        sender    KV of a rectangle     layers x tokens, number ``sequence`` of its transfer (body_format.py)
    COMMIT      sender    payload               the last of its transfer; numbered after the last DATA
    CANCEL      sender                          the sender gives the transfer up
    ACK         receiver                        everything below ``sequence`` of this transfer is here
    REFUSE      receiver  message               the receiver does not take this transfer, or no longer

The seal of a frame is a MAC under a key of this connection and direction, over the frame's place in the stream, the
header and, for all kinds but DATA, the body. The body of DATA is covered by a CRC-32 that stands in the sealed header.
What that protects against, and what not, is said in handshake.py.
"""

import hashlib
import hmac
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from diptych.control.errors import DiptychError
from diptych.runtime.transfer.connector import MAX_ATTEMPT_ID_BYTES, MAX_PAYLOAD_BYTES

_FIELDS = struct.Struct("<BBHIQQIIIHH")
_PLACE = struct.Struct("<Q")
MAC_BYTES = 16
HEADER_BYTES = _FIELDS.size + MAC_BYTES
MAX_DATA_BYTES = 1 << 26
MAX_MESSAGE_BYTES = 2048
LAST_OF_CHUNK = 1  # flag of DATA: with this frame all layers of one send are complete


class ProtocolError(DiptychError):
    """The other side broke the protocol, or bytes were damaged: this connection ends."""


class Kind(IntEnum):
    """What a frame is."""

    OPEN = 1
    DATA = 2
    COMMIT = 3
    CANCEL = 4
    ACK = 5
    REFUSE = 6


_MAX_BODY = {
    Kind.OPEN: MAX_ATTEMPT_ID_BYTES,
    Kind.DATA: MAX_DATA_BYTES,
    Kind.COMMIT: MAX_PAYLOAD_BYTES,
    Kind.CANCEL: 0,
    Kind.ACK: 0,
    Kind.REFUSE: MAX_MESSAGE_BYTES,
}


@dataclass(frozen=True, slots=True)
class Frame:
    """A header. ``number`` names the transfer among those of one sender."""

    kind: Kind
    number: int
    sequence: int = 0
    start: int = 0
    num_tokens: int = 0
    first_layer: int = 0
    num_layers: int = 0
    encoding: int = 0
    flags: int = 0
    body_bytes: int = 0
    checksum: int = 0


def checksum(views: Iterable[memoryview | bytes]) -> int:
    """CRC-32 of a body that lies in pieces."""
    value = 0
    for view in views:
        value = zlib.crc32(view, value)
    return value


class Seal:
    """Seals or checks the headers of one direction of one connection; counts the frames."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._place = 0

    def seal(self, frame: Frame, body: bytes = b"") -> bytes:
        """The header's bytes. ``body``: of kinds other than DATA."""
        fields = _FIELDS.pack(
            frame.kind, frame.encoding, frame.flags, frame.body_bytes, frame.number, frame.sequence, frame.checksum,
            frame.start, frame.num_tokens, frame.first_layer, frame.num_layers,
        )  # fmt: skip
        return fields + self._mac(fields, body)

    def open(self, header: bytes | bytearray) -> Frame:
        """The next frame, by its header. What the seal covers besides the header (the body of kinds other than DATA,
        where there is one) is left to ``check``. Raises ProtocolError."""
        frame = parse_header(header)
        if frame.kind is Kind.DATA or not frame.body_bytes:
            self.check(header)
        return frame

    def check(self, header: bytes | bytearray, body: bytes | bytearray = b"") -> None:
        """Raises ProtocolError when the header (and the body of kinds other than DATA) is not the next one."""
        fields = bytes(header[: _FIELDS.size])
        if not hmac.compare_digest(bytes(header[_FIELDS.size :]), self._mac(fields, body)):
            raise ProtocolError("a frame's seal is wrong")

    def _mac(self, fields: bytes, body: bytes | bytearray) -> bytes:
        mac = hashlib.blake2s(_PLACE.pack(self._place) + fields, key=self._key, digest_size=MAC_BYTES)
        mac.update(body)
        self._place += 1
        return mac.digest()


def make_seals(key_in: bytes, key_out: bytes) -> tuple[Seal, Seal]:
    """The seals of what comes in on a connection, and of what goes out."""
    return Seal(key_in), Seal(key_out)


def parse_header(header: bytes | bytearray) -> Frame:
    """The fields, bounded but not yet believed. Raises ProtocolError."""
    kind, encoding, flags, body_bytes, number, sequence, crc, start, tokens, first, layers = _FIELDS.unpack_from(header)
    try:
        known = Kind(kind)
    except ValueError:
        raise ProtocolError(f"unknown kind of frame {kind}") from None
    if body_bytes > _MAX_BODY[known]:
        raise ProtocolError(f"a frame of kind {known.name} has {body_bytes} bytes; at most {_MAX_BODY[known]}")
    return Frame(known, number, sequence, start, tokens, first, layers, encoding, flags, body_bytes, crc)
