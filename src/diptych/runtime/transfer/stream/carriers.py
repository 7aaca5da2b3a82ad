"""How KV becomes the bodies of frames: what a send is cut into, and where its bytes are read and written.

Owns the choice of an encoding. A *part* is a rectangle, some layers of some tokens: the body of one frame. The bytes
are codec.py's. Must never take a lock or touch a socket: the caller sees to it that the blocks may be read or written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.runtime.kv_tensors import LayerCache
from diptych.runtime.transfer.codec.kv_codec import CodecRates, KVCodec, measure_rates
from diptych.runtime.transfer.codec.wire_format import TILE_TOKENS, WireEncoding, choose_codec, wire_encoding
from diptych.runtime.transfer.connector import CodecName, KVFormat
from diptych.runtime.transfer.stream.frames import ProtocolError

AUTOMATIC = ("none", "int8")  # what "auto" chooses from: int4 changes too many tokens to be taken unasked
NOTHING = 0  # value of Frame.encoding; the codec's are one more than WireEncoding's


@dataclass(frozen=True, slots=True)
class Part:
    """``num_layers`` layers from ``first_layer`` of the tokens [start, start + num_tokens), K and V."""

    start: int
    num_tokens: int
    first_layer: int
    num_layers: int
    is_last: bool  # of its send


class Carrier(Protocol):
    """One way for KV to travel. ``pack`` at the sender and the rest at the receiver belong together."""

    encoding: int

    def parts(self, start: int, num_tokens: int) -> Iterator[Part]:
        """Sender: these tokens in all layers, cut into bodies of about the frame size; the last one says so."""
        ...

    def pack(self, block_ids: Sequence[int], part: Part) -> list[memoryview]:
        """Sender: the body, in pieces. May point into the blocks."""
        ...

    def num_bytes(self, part: Part) -> int:
        """Bytes of KV, as they are moved."""
        ...

    def accepts(self, part: Part, body_bytes: int) -> bool:
        """Receiver: whether the body of this part can have that length. Raises ProtocolError for an odd part."""
        ...

    def targets(self, block_ids: Sequence[int], part: Part) -> list[memoryview] | None:
        """Receiver: where the body belongs, piece by piece; None when it has to be unpacked."""
        ...

    def unpack(self, block_ids: Sequence[int], part: Part, body: memoryview) -> None:
        """Receiver: write a body that has no targets into its blocks."""
        ...


class CarrierChoice(Protocol):
    """Which carrier a worker's KV takes."""

    def for_sending(self, receiver: KVFormat, num_tokens: int, link_bytes_per_s: float | None) -> Carrier:
        """The way to send so many tokens; ``link_bytes_per_s``: None while the link's speed is not known.

        Raises ConfigError when there is none to a receiver of this format.
        """
        ...

    def for_receiving(self, encoding: int, sender: KVFormat) -> Carrier:
        """The way that a frame came. Raises ProtocolError for one that this side does not know or take."""
        ...


class NothingMoves:
    """For one shared pool: the sender has computed straight into the receiver's blocks. Only word of it travels."""

    encoding = NOTHING

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers

    def parts(self, start: int, num_tokens: int) -> Iterator[Part]:
        """See Carrier."""
        yield Part(start, num_tokens, 0, self._num_layers, True)

    def pack(self, block_ids: Sequence[int], part: Part) -> list[memoryview]:
        """See Carrier."""
        return []

    def num_bytes(self, part: Part) -> int:
        """See Carrier."""
        return 0

    def accepts(self, part: Part, body_bytes: int) -> bool:
        """See Carrier."""
        return body_bytes == 0

    def targets(self, block_ids: Sequence[int], part: Part) -> list[memoryview] | None:
        """See Carrier."""
        return []

    def unpack(self, block_ids: Sequence[int], part: Part, body: memoryview) -> None:
        """See Carrier."""


class Coded:
    """Bytes in one encoding. RAW is sent from the blocks and received into them; the others pass a buffer."""

    def __init__(self, codec: KVCodec, frame_bytes: int) -> None:
        self.encoding = codec.encoding.value + 1
        self.is_raw = codec.encoding is WireEncoding.RAW
        self._codec = codec
        self._frame_bytes = frame_bytes
        self._step = codec.format.block_size if self.is_raw else TILE_TOKENS

    def parts(self, start: int, num_tokens: int) -> Iterator[Part]:
        """See Carrier. As many layers as fit of all tokens; or, of a long send, one layer of as many tokens as fit."""
        layers, end = self._codec.format.num_layers, start + num_tokens
        height = min(layers, max(1, self._frame_bytes // self._codec.num_bytes(num_tokens, 1)))
        width = num_tokens
        if height == 1:
            width = max(1, self._frame_bytes // self._codec.num_bytes(self._step, 1)) * self._step
        for layer in range(0, layers, height):
            rows = min(height, layers - layer)
            for begin in range(start, end, width):
                stop = min(end, begin + width)
                yield Part(begin, stop - begin, layer, rows, stop == end and layer + rows == layers)

    def pack(self, block_ids: Sequence[int], part: Part) -> list[memoryview]:
        """See Carrier."""
        span = _layers(part)
        if self.is_raw:
            return self._codec.segments(block_ids, part.start, part.num_tokens, span)
        wire = bytearray(self.num_bytes(part))
        self._codec.encode(block_ids, part.start, part.num_tokens, wire, span)
        return [memoryview(wire)]

    def num_bytes(self, part: Part) -> int:
        """See Carrier."""
        return self._codec.num_bytes(part.num_tokens, part.num_layers)

    def accepts(self, part: Part, body_bytes: int) -> bool:
        """See Carrier."""
        if part.start % self._step:
            raise ProtocolError(f"KV from token {part.start} on, which is no multiple of {self._step}")
        return body_bytes == self.num_bytes(part)

    def targets(self, block_ids: Sequence[int], part: Part) -> list[memoryview] | None:
        """See Carrier."""
        return self._codec.segments(block_ids, part.start, part.num_tokens, _layers(part)) if self.is_raw else None

    def unpack(self, block_ids: Sequence[int], part: Part, body: memoryview) -> None:
        """See Carrier."""
        self._codec.decode(body, block_ids, part.start, part.num_tokens, _layers(part))


class Carriers:
    """See CarrierChoice: all encodings of the codec, or word of what lies in one shared pool."""

    def __init__(
        self, layers: Sequence[LayerCache], kv_format: KVFormat, codec: CodecName, frame_bytes: int, moves: bool
    ) -> None:
        self._layers = layers
        self._codec_name = codec
        self._frame_bytes = frame_bytes
        self._mine = kv_format
        self._nothing = None if moves else NothingMoves(kv_format.num_layers)
        self._coded: dict[WireEncoding, Coded] = {}
        self._rates: CodecRates | None = measure_rates(self._mine) if moves and codec == "auto" else None
        if moves:
            self._get(wire_encoding("none", kv_format, kv_format))  # checks what the tensors are

    def for_sending(self, receiver: KVFormat, num_tokens: int, link_bytes_per_s: float | None) -> Carrier:
        """See CarrierChoice."""
        if self._nothing is not None:
            return self._nothing
        name: str = self._codec_name
        if name == "auto":
            name = "none" if link_bytes_per_s is None else self._fastest(num_tokens, link_bytes_per_s)
        return self._get(wire_encoding(name, self._mine, receiver))

    def for_receiving(self, encoding: int, sender: KVFormat) -> Carrier:
        """See CarrierChoice."""
        if self._nothing is not None and encoding == NOTHING:
            return self._nothing
        if self._nothing is not None or not 1 <= encoding <= len(WireEncoding):
            raise ProtocolError(f"unknown encoding {encoding}")
        known = WireEncoding(encoding - 1)
        if known is WireEncoding.RAW and sender != self._mine:
            raise ProtocolError("blocks in another format cannot be taken as they lie")
        return self._get(known)

    def _fastest(self, num_tokens: int, link_bytes_per_s: float) -> str:
        assert self._rates is not None
        form, rates = self._mine, self._rates
        kv_bytes = num_tokens * form.bytes_per_block // form.block_size
        return choose_codec(
            link_bytes_per_s, kv_bytes, rates.encode_bytes_per_s, rates.decode_bytes_per_s, AUTOMATIC, dtype=form.dtype,
            head_dim=form.head_dim,
        )  # fmt: skip

    def _get(self, encoding: WireEncoding) -> Coded:
        if encoding not in self._coded:
            self._coded[encoding] = Coded(KVCodec(self._layers, self._mine, encoding), self._frame_bytes)
        return self._coded[encoding]


def _layers(part: Part) -> range:
    return range(part.first_layer, part.first_layer + part.num_layers)
