"""How the bytes of a block change on their way to the disk and back.

Without a codec they stay as they are, and so do all tokens. With ``int8`` a block takes about half (the KV codec's
tiles, runtime/transfer/codec), reads take as much less time, and what is read differs in its last bits.
"""

from collections.abc import Sequence

import torch

from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.tiers.extent_format import Buffer, DiskCodecName
from diptych.runtime.transfer.codec.kv_codec import KVCodec
from diptych.runtime.transfer.codec.wire_format import WireEncoding
from diptych.runtime.transfer.kv_format import KVFormat


class BlockCoding:
    """One direction of one thread: a block at a time passes through memory of its own.

    codec: other than "none". layers: caches whose blocks have the shape of those in the host tier. Raises ConfigError
    where tiles do not fit into blocks."""

    def __init__(self, codec: DiskCodecName, kv_format: KVFormat, layers: Sequence[LayerCache]) -> None:
        memory = torch.empty(kv_format.bytes_per_block, dtype=torch.uint8)
        parts = [cache for layer in layers for cache in layer]
        views, size = [], kv_format.bytes_per_layer_block
        for number, cache in enumerate(parts):
            part = memory[number * size : (number + 1) * size]
            views.append(part.view(cache.dtype).view(1, *cache.shape[1:]))
        self._block: Buffer = memory.numpy().data
        pairs = list(zip(views[::2], views[1::2], strict=True))
        self._codec = KVCodec(pairs, kv_format, WireEncoding[codec.upper()])
        self._num_tokens = kv_format.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of a block on disk."""
        return self._codec.num_bytes(self._num_tokens)

    def encode(self, block: Buffer) -> Buffer:
        """A block as it goes to the disk."""
        self._block[:] = block
        wire = bytearray(self.num_bytes)
        self._codec.encode([0], 0, self._num_tokens, wire)
        return memoryview(wire)

    def decode(self, wire: Buffer, block: Buffer) -> None:
        """Fill ``block`` with what came from the disk."""
        self._codec.decode(wire, [0], 0, self._num_tokens)
        block[:] = self._block
