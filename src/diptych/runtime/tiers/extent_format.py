"""An extent on disk: a header of one page, then the KV of a run of blocks, one after the other.

    offset  bytes
    0       8         magic, with the version of this format
    8       16        digest of what the bytes mean: weights, layout, dtype, block size (KVFormat and more)
    24      4, 4, 8   number of blocks, 0, bytes of one block (little-endian)
    40      32 each   chain hash of the block, checksum of the block
    4080    16        checksum of the bytes before

A checksum is XXH3 with 128 bits: it finds damage, at the speed of memory, and is no defence against someone who may
write into the folder. That of a block covers its chain hash, too, so that no block is taken for another. Blocks begin
behind the header; the next extent begins at the next whole page. A header of another version is none.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from xxhash import xxh3_128

PAGE_BYTES = 4096
MAX_BLOCKS = 64
DIGEST_BYTES = 16
_MAGIC = b"DPTCHKV2"
_FIXED = struct.Struct("<8s16sIIQ")
_ENTRY = struct.Struct("<16s16s")
_CHECKED = PAGE_BYTES - DIGEST_BYTES

Buffer = memoryview
DiskCodecName = Literal["none", "int8"]


@dataclass(frozen=True, slots=True)
class ExtentHeader:
    """entries: (chain hash, checksum) of each block."""

    format: bytes
    block_bytes: int
    entries: tuple[tuple[bytes, bytes], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole extent, up to where the next one begins."""
        return extent_bytes(len(self.entries), self.block_bytes)

    def pack(self) -> bytes:
        """The page."""
        assert 0 < len(self.entries) <= MAX_BLOCKS, f"{len(self.entries)} blocks"
        fixed = _FIXED.pack(_MAGIC, self.format, len(self.entries), 0, self.block_bytes)
        page = (fixed + b"".join(_ENTRY.pack(*entry) for entry in self.entries)).ljust(_CHECKED, b"\0")
        return page + checksum(b"", page)


def unpack_header(page: bytes) -> ExtentHeader | None:
    """The header; None for a page that is not a whole one."""
    if len(page) != PAGE_BYTES or checksum(b"", page[:_CHECKED]) != page[_CHECKED:]:
        return None
    magic, format_digest, count, _, block_bytes = _FIXED.unpack_from(page)
    if magic != _MAGIC or not 0 < count <= MAX_BLOCKS or block_bytes < 1:
        return None
    entries = tuple(_ENTRY.iter_unpack(page[_FIXED.size : _FIXED.size + count * _ENTRY.size]))
    return ExtentHeader(format_digest, block_bytes, entries)


def extent_bytes(num_blocks: int, block_bytes: int) -> int:
    """Bytes of an extent with ``num_blocks`` blocks: header, blocks, and padding up to a whole page."""
    return PAGE_BYTES + -(-num_blocks * block_bytes // PAGE_BYTES) * PAGE_BYTES


def checksum(block_hash: bytes, data: bytes | Buffer) -> bytes:
    """Checksum of a block's KV, or of a header's page (then without a hash)."""
    digest = xxh3_128(block_hash)
    digest.update(data)
    return digest.digest()


def header_of(format_digest: bytes, hashes: Sequence[bytes], buffers: Sequence[Buffer]) -> ExtentHeader:
    """The header of an extent that holds these blocks."""
    entries = tuple((block_hash, checksum(block_hash, data)) for block_hash, data in zip(hashes, buffers, strict=True))
    return ExtentHeader(format_digest, len(buffers[0]), entries)
