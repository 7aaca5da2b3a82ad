"""Finding blocks by content: chained hashes over full blocks of tokens.

The hash of a block covers the hash of the block before it, so equal hashes mean equal prefixes. The root hash holds
the tenant's salt: requests with different salts never share a block. blake2b is collision-resistant, so that a
hostile prompt cannot be made to hit the blocks of another request.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(salt: str | None = None) -> bytes:
    """The parent of a first block; differs by ``salt`` (a tenant's name, or None)."""
    return blake2b(b"" if salt is None else b"salt:" + salt.encode(), digest_size=HASH_BYTES).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of one full block after ``parent``; token ids are below 2**32."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


def hash_blocks(token_ids: Sequence[int], block_size: int, salt: str | None = None) -> tuple[bytes, ...]:
    """The chained hashes of all full blocks of a prompt (about 1 microsecond a block)."""
    data = memoryview(array("I", token_ids).tobytes())
    parent, width = root_hash(salt), 4 * block_size
    hashes = []
    for end in range(width, len(data) + 1, width):
        parent = blake2b(parent + data[end - width : end], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return tuple(hashes)


def page_key(block_hash: bytes, group: int) -> bytes:
    """The name of the block with this content in one of several groups of layers: a hash like others, for tiers, and
    that of no block of a model with one group."""
    return (int.from_bytes(block_hash, "big") ^ (group + 1)).to_bytes(HASH_BYTES, "big")


class Hit:
    """What a prefix cache holds of a prompt: its first ``num_tokens`` tokens, up to a boundary: a place where computing
    may go on. blocks: those that the request gets a share of, in the order of its tokens. tables: likewise by group of
    layers, of those whose layers are of several; of a group with a window, the blocks of the last one.

    Where every layer attends to all tokens before it, each block ends at a boundary. Where layers are of several
    groups, some of it may lie in a tier below: NO_BLOCK in the tables, and ``below`` has, for each of these in their
    order, the name of the block and the host block. num_device_tokens: how far it would be without these.
    """

    __slots__ = ("below", "blocks", "num_device_tokens", "num_tokens", "tables")

    def __init__(
        self,
        blocks: list[int],
        num_tokens: int,
        tables: tuple[list[int], ...] = (),
        below: list[tuple[bytes, int]] | None = None,
        num_device_tokens: int | None = None,
    ) -> None:
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.tables = tables
        self.below = below or []
        self.num_device_tokens = num_tokens if num_device_tokens is None else num_device_tokens


class PrefixCache:
    """A bijection between hashes and the blocks that hold their content. Knows nothing of who uses a block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __iter__(self) -> Iterator[bytes]:
        """The hashes of everything that is known, in the order of its coming."""
        return iter(self._block_of)

    def get(self, block_hash: bytes) -> int | None:
        """The block with this content, if one is known."""
        return self._block_of.get(block_hash)

    def holds(self, block_id: int) -> bool:
        """Whether the block can be found by its content."""
        return block_id in self._hash_of

    def hash_of(self, block_id: int) -> bytes:
        """The hash of a block that can be found."""
        return self._hash_of[block_id]

    def insert(self, block_hash: bytes, block_id: int) -> bool:
        """Register a full, computed block; False if that content is known already (the block stays private)."""
        if block_hash in self._block_of or block_id in self._hash_of:
            return False
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        return True

    def remove(self, block_id: int) -> bytes:
        """Forget a block that is about to be overwritten; returns its hash."""
        block_hash = self._hash_of.pop(block_id)
        del self._block_of[block_hash]
        return block_hash

    def longest_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of ``hashes``."""
        blocks = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks
