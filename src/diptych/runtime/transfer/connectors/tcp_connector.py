"""KV between hosts: blocks are sent from where they lie and received to where they belong. No RDMA, no broker.

Where the two caches differ, or a codec is asked for, the bytes are those of codec/kv_codec.py and pass a buffer.
"""

from collections.abc import Iterator, Sequence

from diptych.runtime.dtypes import INT8
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.transfer.codec.kv_codec import KVCodec, measure_rates
from diptych.runtime.transfer.codec.wire_format import WireEncoding, choose_codec, wire_encoding
from diptych.runtime.transfer.connector import CodecName, TransferOptions
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.runtime.transfer.stream.body_format import BodyFormat, Part
from diptych.runtime.transfer.stream.frames import ProtocolError
from diptych.runtime.transfer.stream.stream_connector import StreamConnector

AUTOMATIC = ("none", "int8")  # what "auto" chooses from: int4 changes too many tokens to be taken unasked


class TcpConnector(StreamConnector):
    """A KVConnector over TCP, or over unix sockets between pools of one host. Authenticated, checksummed, resumable."""

    def __init__(
        self, layers: Sequence[LayerCache], kv_format: KVFormat, options: TransferOptions, groups: Sequence[int] = ()
    ) -> None:
        bodies = CodecBodies(layers, kv_format, options.codec, options.frame_bytes)
        super().__init__(bodies, kv_format, options, groups)


class CodecBodies:
    """The BodyFormats of this connector: one for each encoding of the codec, and the choice between them."""

    def __init__(self, layers: Sequence[LayerCache], kv_format: KVFormat, codec: CodecName, frame_bytes: int) -> None:
        self._layers = layers
        self._codec = codec
        self._frame_bytes = frame_bytes
        self._format = kv_format
        self._bodies: dict[WireEncoding, CodecBody] = {}
        self._chosen: dict[tuple[str, KVFormat], CodecBody] = {}  # by codec and receiver
        self._rates = measure_rates(kv_format) if codec == "auto" else None
        self._body(wire_encoding("none", kv_format, kv_format))  # checks what the tensors are

    def for_sending(self, receiver: KVFormat, num_tokens: int, link_bytes_per_s: float | None) -> BodyFormat:
        codec: str = self._codec
        if codec == "auto":
            codec = "none" if link_bytes_per_s is None else self._fastest(num_tokens, link_bytes_per_s)
        if (codec, receiver) not in self._chosen:
            self._chosen[codec, receiver] = self._body(wire_encoding(codec, self._format, receiver))
        return self._chosen[codec, receiver]

    def for_receiving(self, encoding: int, sender: KVFormat) -> BodyFormat:
        if not 1 <= encoding <= len(WireEncoding):
            raise ProtocolError(f"unknown encoding {encoding}")
        known = WireEncoding(encoding - 1)
        if known is WireEncoding.RAW and sender != self._format:
            raise ProtocolError("blocks in another format cannot be taken as they lie")
        return self._body(known)

    def _fastest(self, num_tokens: int, link_bytes_per_s: float) -> str:
        assert self._rates is not None
        form, rates = self._format, self._rates
        if form.dtype == INT8:  # less than the codecs make of it would be no KV
            return "none"
        kv_bytes = num_tokens * form.bytes_per_block // form.block_size
        return choose_codec(
            link_bytes_per_s, kv_bytes, rates.encode_bytes_per_s, rates.decode_bytes_per_s, AUTOMATIC, dtype=form.dtype,
            head_dim=form.head_dim,
        )  # fmt: skip

    def _body(self, encoding: WireEncoding) -> "CodecBody":
        if encoding not in self._bodies:
            self._bodies[encoding] = CodecBody(KVCodec(self._layers, self._format, encoding), self._frame_bytes)
        return self._bodies[encoding]


class CodecBody:
    """A BodyFormat with bytes in one encoding. RAW is sent from the blocks and received into them; the others pass a
    buffer."""

    def __init__(self, codec: KVCodec, frame_bytes: int) -> None:
        self.encoding = codec.encoding.value + 1
        self._is_raw = codec.encoding is WireEncoding.RAW
        self._codec = codec
        self._frame_bytes = frame_bytes
        self._step, self._step_bytes = codec.piece_tokens, codec.piece_bytes

    def parts(self, start: int, num_tokens: int, layers: range | None = None) -> Iterator[Part]:
        """Parts with as many layers as fit, for all tokens; of a long send, one layer for as many tokens as fit."""
        span, end = layers or range(self._codec.format.num_layers), start + num_tokens
        height = min(len(span), max(1, self._frame_bytes // (-(-num_tokens // self._step) * self._step_bytes)))
        width = num_tokens
        if height == 1:
            width = max(1, self._frame_bytes // self._step_bytes) * self._step
        for layer in span[::height]:
            rows = min(height, span.stop - layer)
            for begin in range(start, end, width):
                stop = min(end, begin + width)
                yield Part(begin, stop - begin, layer, rows, stop == end and layer + rows == span.stop)

    def pack(self, block_ids: Sequence[int], part: Part) -> list[memoryview]:
        if self._is_raw:
            return self._codec.segments(block_ids, part.start, part.num_tokens, _layers(part))
        wire = bytearray(self.num_bytes(part))
        self._codec.encode(block_ids, part.start, part.num_tokens, wire, _layers(part))
        return [memoryview(wire)]

    def num_bytes(self, part: Part) -> int:
        return part.num_layers * -(-part.num_tokens // self._step) * self._step_bytes

    def accepts(self, part: Part, body_bytes: int) -> bool:
        if part.start % self._step:
            raise ProtocolError(f"KV from token {part.start} on, which is no multiple of {self._step}")
        return body_bytes == self.num_bytes(part)

    def targets(self, block_ids: Sequence[int], part: Part) -> list[memoryview] | None:
        return self._codec.segments(block_ids, part.start, part.num_tokens, _layers(part)) if self._is_raw else None

    def unpack(self, block_ids: Sequence[int], part: Part, body: memoryview) -> None:
        self._codec.decode(body, block_ids, part.start, part.num_tokens, _layers(part))


def _layers(part: Part) -> range:
    return range(part.first_layer, part.first_layer + part.num_layers)
