"""The bodies of DATA frames: how each connector describes them to the stream that carries them.

A *part* is a rectangle, some layers of some tokens: the body of one frame. A body format cuts what is sent into parts,
and knows where the bytes of a part are read and written. It takes no lock and touches no socket: the caller sees to it
that the blocks may be read or written.

Frame.encoding names a body format on the wire:
    0         empty: the KV lies in one shared pool (shared_memory_connector.py)
    1 to 5    one more than the number of a WireEncoding of the codec (tcp_connector.py)
    16        addresses, from which the receiver reads (nixl_connector.py)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.runtime.transfer.kv_format import KVFormat


@dataclass(frozen=True, slots=True)
class Part:
    """``num_layers`` layers from ``first_layer`` of the tokens [start, start + num_tokens), K and V."""

    start: int
    num_tokens: int
    first_layer: int
    num_layers: int
    is_last: bool  # of its send


class BodyFormat(Protocol):
    """One way for KV to travel. ``parts`` and ``pack`` are the sender's, ``accepts``, ``targets`` and ``unpack`` the
    receiver's."""

    encoding: int

    def parts(self, start: int, num_tokens: int) -> Iterator[Part]:
        """These tokens in all layers, cut into bodies of about the frame size; the last one says so."""
        ...

    def pack(self, block_ids: Sequence[int], part: Part) -> list[memoryview]:
        """The body, in pieces. May point into the blocks."""
        ...

    def num_bytes(self, part: Part) -> int:
        """Bytes of KV, as they are moved."""
        ...

    def accepts(self, part: Part, body_bytes: int) -> bool:
        """Whether the body of this part can have that length. Raises ProtocolError for a part that cannot be one."""
        ...

    def targets(self, block_ids: Sequence[int], part: Part) -> list[memoryview] | None:
        """Where the body belongs, piece by piece; None when it has to be unpacked."""
        ...

    def unpack(self, block_ids: Sequence[int], part: Part, body: memoryview) -> None:
        """Write a body that has no targets into its blocks. Raises ProtocolError when it cannot be read."""
        ...


class BodyFormats(Protocol):
    """The body formats of one connector."""

    def for_sending(self, receiver: KVFormat, num_tokens: int, link_bytes_per_s: float | None) -> BodyFormat:
        """The format of a send of this many tokens; ``link_bytes_per_s``: None while the link's speed is not known.

        Raises ConfigError when there is none that a receiver with this cache can take.
        """
        ...

    def for_receiving(self, encoding: int, sender: KVFormat) -> BodyFormat:
        """The format of a frame. Raises ProtocolError for an encoding that this connector does not know or take."""
        ...
