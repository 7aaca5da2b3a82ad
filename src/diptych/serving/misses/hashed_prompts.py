"""A prompt as the explanation of prefix misses keeps it: comparable, and readable only where that was asked for.

A block's tokens are kept under a pad that follows from a random key of this process and from everything before the
block. Two prompts with an equal beginning get equal pads, so the first token that differs can be found; between other
prompts nothing can be compared. Without the key the text cannot be read; the key is never written anywhere, but it is
in the memory of this process. Without a key (None) token ids are kept as they are.
"""

import re
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b, shake_128
from itertools import pairwise

from diptych.control.engine.kvcache.prefix_cache import hash_block, hash_blocks, root_hash
from diptych.control.misses.prefix_history import PIECE_BYTES

DIGEST_BYTES = 8  # of a chunk
CHUNK_TOKENS = 8  # that a digest covers at least
LONG_CHUNK = 64  # tokens; longer ones are cut finer
# Text is cut before tokens of one class of sixteen, whatever stands before them; long pieces before one class of four.
_CUT = re.compile(b"[" + b"".join(re.escape(bytes([value])) for value in range(7, 256, 16)) + b"]")
_FINE_CUT = re.compile(b"[" + b"".join(re.escape(bytes([value])) for value in range(3, 256, 4)) + b"]")
_LOW_BYTE = 0 if sys.byteorder == "little" else PIECE_BYTES - 1


class HashedPrompt:
    """The PromptTokens of control.misses. key: of the pads and digests; None: tokens stay readable in pieces."""

    __slots__ = ("_block_size", "_ids", "_key", "_owner", "contents", "hashes", "num_tokens", "root")

    def __init__(
        self,
        token_ids: Sequence[int],
        block_size: int,
        key: bytes | None,
        salt: str | None = None,
        tenant: str = "",
        hashes: tuple[bytes, ...] = (),
    ) -> None:
        """hashes: of the full blocks, where the caller has them."""
        self._ids = token_ids
        self._block_size = block_size
        self._key = key
        self._owner = root_hash(salt) + tenant.encode()
        self.root = root_hash(salt)
        self.hashes = hashes or hash_blocks(token_ids, block_size, salt)
        self.contents = self.hashes if salt is None else hash_blocks(token_ids, block_size)
        self.num_tokens = len(token_ids)

    def followed_by(self, token_ids: Sequence[int]) -> "HashedPrompt":
        """The prompt with an answer behind it; what is hashed already is not hashed again."""
        whole = HashedPrompt.__new__(HashedPrompt)
        whole._ids = [*self._ids, *token_ids]
        whole._block_size, whole._key, whole._owner, whole.root = self._block_size, self._key, self._owner, self.root
        whole.hashes = _longer(self.hashes, self.root, whole._ids, self._block_size)
        whole.contents = whole.hashes
        if self.contents is not self.hashes:
            whole.contents = _longer(self.contents, root_hash(), whole._ids, self._block_size)
        whole.num_tokens = len(whole._ids)
        return whole

    def piece(self, index: int) -> bytes:
        begin = index * self._block_size
        data = array("I", self._ids[begin : begin + self._block_size]).tobytes()
        if self._key is None:
            return data
        parent = self.hashes[index - 1] if index else self.root
        pad = shake_128(self._key + parent).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(pad, "big")).to_bytes(len(data), "big")

    def chunks(self, start: int) -> list[tuple[int, int, bytes]]:
        """Chunks from ``start`` on. Those of one salt or one tenant never equal another's: what was computed again says
        nothing about the texts of others."""
        data = array("I", self._ids[start:]).tobytes()
        key, owner = self._key or b"", self._owner
        cuts, found = _cuts(data[_LOW_BYTE::PIECE_BYTES]), []
        for begin, end in pairwise(cuts):
            text = data[begin * PIECE_BYTES : max(end, begin + CHUNK_TOKENS) * PIECE_BYTES]
            if len(text) >= CHUNK_TOKENS * PIECE_BYTES:
                digest = blake2b(owner + text, digest_size=DIGEST_BYTES, key=key).digest()
                found.append((start + begin, end - begin, digest))
        return found

    def tokens(self, begin: int, end: int) -> list[int]:
        """The token ids at these positions."""
        return list(self._ids[max(0, begin) : end])


def _cuts(low_bytes: bytes) -> list[int]:
    """Where a text of these tokens is cut."""
    cuts: list[int] = []
    for found in _CUT.finditer(low_bytes):
        at = found.start()
        if cuts and at - cuts[-1] > LONG_CHUNK:
            cuts += [fine.start() for fine in _FINE_CUT.finditer(low_bytes, cuts[-1] + 1, at)]
        cuts.append(at)
    if not cuts or len(low_bytes) - cuts[-1] > LONG_CHUNK:
        cuts += [fine.start() for fine in _FINE_CUT.finditer(low_bytes, cuts[-1] + 1 if cuts else 0)]
    return cuts


def unsealed(piece: bytes) -> list[int]:
    """The token ids of pieces that were made without a key."""
    ids = array("I")
    ids.frombytes(piece)
    return ids.tolist()


def _longer(hashes: tuple[bytes, ...], root: bytes, token_ids: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """The hashes of all full blocks, of which the first ones are known."""
    longer = list(hashes)
    for begin in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        longer.append(hash_block(longer[-1] if longer else root, token_ids[begin : begin + block_size]))
    return tuple(longer)
