"""The conversations that were seen, block by block: what a new prompt is compared with.

A tree of blocks under the hashes that the caches know them by, so that one look finds the longest beginning that was
seen under the same salt. Beside each block lies a *piece*: bytes that stand for its tokens, by which the first token
that differs is found inside of a block. What a piece is made of is the caller's choice; here it is only compared.

Memory is bounded: the blocks that no prompt has begun with for the longest time are forgotten, ends before beginnings.
"""

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

PIECE_BYTES = 4  # of a piece, per token
MAX_SALTS = 4  # that are remembered of one content


class PromptTokens(Protocol):
    """A prompt, or a prompt with its answer, without a way to its tokens.

    root: what the first hash is chained to; differs by salt. hashes: of the full blocks, as caches know them. contents:
    of the same blocks without the salt (the same hashes where there is none).
    """

    root: bytes
    hashes: tuple[bytes, ...]
    contents: tuple[bytes, ...]
    num_tokens: int

    def piece(self, index: int) -> bytes:
        """PIECE_BYTES for each token of block ``index``, of which the last may not be full. Equal for equal tokens
        behind an equal beginning. Empty: the tokens are not known."""
        ...

    def chunks(self, start: int) -> list[tuple[int, int, bytes]]:
        """(first token, number of tokens, digest) of chunks from token ``start`` on, cut by what they hold and not by
        where they are: the same text is cut alike behind another beginning. Empty: the tokens are not known."""
        ...


@dataclass(frozen=True, slots=True)
class Origin:
    """The request that a conversation came with."""

    request_id: str
    tenant: str


@dataclass(slots=True)
class _SeenBlock:
    """key: its hash, or for the end of a conversation, which is no full block, its parent and its piece."""

    parent: bytes
    piece: bytes
    content: bytes  # b"": it came without a salt, or is no full block
    origin: Origin


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt was seen before.

    num_blocks, num_tokens: from its beginning on, under the same salt. goes_on: a conversation has other tokens behind
    these. nearest: that conversation. key: of its block that differs (b"": there is none). origin: of the last full
    block that was seen. num_other_blocks: seen under another salt, in the conversation ``other``.
    """

    num_blocks: int
    num_tokens: int
    goes_on: bool = False
    nearest: Origin | None = None
    key: bytes = b""
    num_other_blocks: int = 0
    other: Origin | None = None


class PrefixHistory:
    """The prompts that were seen, as at most ``max_blocks`` blocks of ``block_size`` tokens."""

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.num_forgotten = 0  # blocks, so far
        self._blocks: OrderedDict[bytes, _SeenBlock] = OrderedDict()  # longest unused first
        self._after: dict[bytes, list[tuple[bytes, bytes]]] = {}  # parent -> (piece, key) of what follows, sorted
        self._salted: dict[bytes, dict[bytes, None]] = {}  # content -> hashes under salts

    def __len__(self) -> int:
        return len(self._blocks)

    def origin(self, block_hash: bytes) -> Origin | None:
        """The request that had this block last."""
        block = self._blocks.get(block_hash)
        return None if block is None else block.origin

    def match(self, prompt: PromptTokens) -> Match:
        """Compare a prompt with what was seen before it."""
        blocks, count = self._blocks, 0
        for block_hash in prompt.hashes:
            if block_hash not in blocks:
                break
            count += 1
        num_others = self._num_other_blocks(prompt, count)
        other = self._origin_of_content(prompt, num_others - 1) if num_others else None
        seen = count * self.block_size
        parent = prompt.hashes[count - 1] if count else prompt.root
        nearest = blocks[parent].origin if count else None
        if seen >= prompt.num_tokens:
            return Match(count, seen, nearest=nearest, num_other_blocks=num_others, other=other)
        piece = prompt.piece(count)
        if not piece and count == len(prompt.hashes):  # the end of the prompt, and no way to look into it
            return Match(count, seen, nearest=nearest, num_other_blocks=num_others, other=other)
        common, key, goes_on = self._nearest(parent, piece)
        seen += common
        if key and (common or goes_on):
            nearest = blocks[key].origin
        goes_on = goes_on and seen < prompt.num_tokens
        return Match(count, seen, goes_on, nearest, key if goes_on else b"", num_others, other)

    def add(self, prompt: PromptTokens, origin: Origin) -> None:
        """A prompt was sent, or its answer is complete."""
        blocks, parent, keys = self._blocks, prompt.root, list(prompt.hashes)
        for index, block_hash in enumerate(prompt.hashes):
            block = blocks.get(block_hash)
            if block is None:
                content = prompt.contents[index]
                self._insert(block_hash, _SeenBlock(parent, prompt.piece(index), content, origin))
            else:
                block.origin = origin
            parent = block_hash
        if prompt.num_tokens > len(keys) * self.block_size and (piece := prompt.piece(len(keys))):
            key = parent + piece
            if key in blocks:
                blocks[key].origin = origin
            else:
                self._insert(key, _SeenBlock(parent, piece, b"", origin))
            keys.append(key)
        for key in reversed(keys):
            blocks.move_to_end(key)
        while len(blocks) > self.max_blocks:
            self._forget(next(iter(blocks)))
            self.num_forgotten += 1

    def continuation(self, key: bytes, num_pieces: int) -> bytes:
        """The piece of block ``key`` and those of the blocks that follow it in some conversation, at most
        ``num_pieces``."""
        pieces: list[bytes] = []
        while len(pieces) < num_pieces and (block := self._blocks.get(key)) is not None:
            pieces.append(block.piece)
            following = self._after.get(key)
            if not following:
                break
            key = following[0][1]
        return b"".join(pieces)

    def check(self) -> None:
        """Assert that the tree and the list of blocks are of one mind (for tests)."""
        assert len(self._blocks) <= self.max_blocks
        children = {(parent, key) for parent, following in self._after.items() for _, key in following}
        assert children == {(block.parent, key) for key, block in self._blocks.items()}
        assert all(following == sorted(following) for following in self._after.values())
        known = {key for hashes in self._salted.values() for key in hashes}
        assert known <= self._blocks.keys()

    def _nearest(self, parent: bytes, piece: bytes) -> tuple[int, bytes, bool]:
        """(leading tokens in common, key, whether it has other tokens behind them) of the block after ``parent`` that
        is most like ``piece``. Of sorted pieces it is a neighbour."""
        following = self._after.get(parent)
        if not following:
            return 0, b"", False
        at = bisect_left(following, (piece,))
        neighbours = following[max(0, at - 1) : at + 1]
        best = max(neighbours, key=lambda known: (common_tokens(known[0], piece), len(known[0])))
        common = common_tokens(best[0], piece)
        return common, best[1], not best[0] or len(best[0]) > common * PIECE_BYTES

    def _num_other_blocks(self, prompt: PromptTokens, count: int) -> int:
        """Leading blocks that were seen under another salt, where these are more than ``count``."""
        if prompt.contents == prompt.hashes and not self._salted:
            return 0
        end = count
        while end < len(prompt.contents) and self._other_hash(prompt, end):
            end += 1
        return end if end > count else 0

    def _other_hash(self, prompt: PromptTokens, index: int) -> bytes | None:
        """The hash under another salt of what block ``index`` of the prompt holds."""
        content, own = prompt.contents[index], prompt.hashes[index]
        if content != own and content in self._blocks:
            return content
        return next((known for known in self._salted.get(content, ()) if known != own), None)

    def _origin_of_content(self, prompt: PromptTokens, index: int) -> Origin | None:
        known = self._other_hash(prompt, index)
        return None if known is None else self.origin(known)

    def _insert(self, key: bytes, block: _SeenBlock) -> None:
        following = self._after.setdefault(block.parent, [])
        at = bisect_left(following, (block.piece, key))
        if at and block.piece and block.piece.startswith(following[at - 1][0]) and self._is_end(following[at - 1][1]):
            at -= 1
            del self._blocks[following.pop(at)[1]]  # the conversation that ended there goes on
        following.insert(at, (block.piece, key))
        if block.content and block.content != key:
            salted = self._salted.setdefault(block.content, {})
            salted[key] = None
            if len(salted) > MAX_SALTS:
                del salted[next(iter(salted))]
        self._blocks[key] = block

    def _is_end(self, key: bytes) -> bool:
        block = self._blocks[key]
        return key == block.parent + block.piece

    def _forget(self, key: bytes) -> None:
        block = self._blocks.pop(key)
        following = self._after[block.parent]
        del following[bisect_left(following, (block.piece, key))]
        if not following:
            del self._after[block.parent]
        salted = self._salted.get(block.content)
        if salted is not None:
            salted.pop(key, None)
            if not salted:
                del self._salted[block.content]


def common_tokens(piece: bytes, other: bytes) -> int:
    """How many leading tokens two pieces have in common."""
    length = min(len(piece), len(other))
    differing = int.from_bytes(piece[:length], "big") ^ int.from_bytes(other[:length], "big")
    return (length - (differing.bit_length() + 7) // 8) // PIECE_BYTES


class SeenChunks:
    """The digests of chunks of text that were seen anywhere in a prompt or an answer, the latest ``max_chunks``."""

    def __init__(self, max_chunks: int) -> None:
        self.max_chunks = max_chunks
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, chunks: list[tuple[int, int, bytes]]) -> None:
        """These were seen."""
        digests = self._digests
        for _, _, digest in chunks:
            digests[digest] = None
            digests.move_to_end(digest)
        while len(digests) > self.max_chunks:
            digests.popitem(last=False)
