"""From an engine's block hashes to ours: what its own KV events say of its prefix cache, in the hashes of our prompts.

An engine names its blocks by hashes of its own making, and gives with each new block its tokens and its parent. From
these our hash of the same tokens is made, once, and kept under the engine's name for the day when it says that the
block is gone. (Both keys of a block: llm-d's KV cache indexer does the same.)

Block sizes may differ: a block of ours is there when every engine block that holds a token of it is. Where anything is
unclear (a parent that is not known, a block stored twice), the block does not count: the index may know too little of
an engine, never too much. Memory: bounded by ``max_blocks`` engine blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from diptych.control.engine.kvcache.prefix_cache import hash_block, root_hash

EngineHash = int | bytes


@dataclass(frozen=True, slots=True)
class EngineBlocksStored:
    """Blocks that the engine's cache holds now, each the child of the one before it; parent: of the first (None: it
    begins a prompt). token_ids: of all of them."""

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    token_ids: Sequence[int]
    block_size: int


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that the engine's cache holds no longer."""

    hashes: Sequence[EngineHash]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The engine's cache is empty."""


EngineCacheEvent = EngineBlocksStored | BlocksRemoved | CacheCleared


@dataclass(slots=True)
class _Copy:
    """A block of ours, as some engine blocks hold it together."""

    own: bytes
    is_whole: bool = True


@dataclass(slots=True)
class _Node:
    """One engine block. parent: our hash before the first token of ``pending``. pending: the tokens after the last full
    block of ours. holders: the engine blocks that hold these. copies: of blocks of ours that hold a token of it."""

    parent: bytes
    pending: tuple[int, ...]
    holders: tuple[EngineHash, ...]
    copies: list[_Copy] = field(default_factory=list)


class KVBridge:
    """One engine's cache. block_size: of our blocks."""

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._nodes: dict[EngineHash, _Node] = {}
        self._held: dict[bytes, int] = {}  # our blocks and how many copies there are, parents before their children
        self._changed: dict[bytes, bool] = {}  # whether it was held before this batch

    def __len__(self) -> int:
        return len(self._nodes)

    def holds(self, block_hash: bytes) -> bool:
        """Whether a block of ours is held."""
        return block_hash in self._held

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Our hashes of everything that is held."""
        return tuple(self._held)

    @property
    def is_full(self) -> bool:
        """Whether there are more blocks than an engine of this size can have: its events are not what they seem."""
        return len(self._nodes) > self._max_blocks

    def apply(self, events: Iterable[EngineCacheEvent]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """A batch of events, in order: our hashes that are held from now on, and those that are not any more."""
        self._changed = {}
        for event in events:
            if isinstance(event, EngineBlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                for block in event.hashes:
                    self._remove(block)
            else:
                self._clear()
        return self._differences()

    def clear(self) -> tuple[bytes, ...]:
        """Forget everything. Returns what was held."""
        self._changed = {}
        self._clear()
        return self._differences()[1]

    def _differences(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        changed, held = self._changed, self._held
        self._changed = {}
        stored = tuple(block for block, was_held in changed.items() if not was_held and block in held)
        evicted = tuple(block for block, was_held in changed.items() if was_held and block not in held)
        return stored, evicted

    def _store(self, event: EngineBlocksStored) -> None:
        size = event.block_size
        if size < 1 or len(event.token_ids) != size * len(event.hashes):
            return
        if event.parent is None:
            parent: _Node | None = _Node(root_hash(), (), ())
        else:
            parent = self._nodes.get(event.parent)
        for number, block in enumerate(event.hashes):
            if parent is None:
                break
            known = self._nodes.get(block)
            if known is None:
                known = self._add(block, parent, event.token_ids[number * size : (number + 1) * size])
            parent = known

    def _add(self, block: EngineHash, parent: _Node, token_ids: Sequence[int]) -> _Node:
        own, before = parent.parent, parent.pending
        holders, node = (*parent.holders, block), _Node(b"", (), ())
        self._nodes[block] = node
        tokens, begin = (*before, *token_ids), 0
        while len(tokens) - begin >= self._block_size:
            own = hash_block(own, tokens[begin : begin + self._block_size])
            begin += self._block_size
            self._hold(own, holders)
            holders = (block,)
        node.parent, node.pending = own, tokens[begin:]
        node.holders = holders if node.pending else ()
        return node

    def _hold(self, own: bytes, holders: Sequence[EngineHash]) -> None:
        if not all(holder in self._nodes for holder in holders):
            return
        self._changed.setdefault(own, own in self._held)
        self._held[own] = self._held.get(own, 0) + 1
        copy = _Copy(own)
        for holder in holders:
            self._nodes[holder].copies.append(copy)

    def _remove(self, block: EngineHash) -> None:
        node = self._nodes.pop(block, None)
        if node is None:
            return
        for copy in node.copies:
            if not copy.is_whole:
                continue
            copy.is_whole = False
            self._changed.setdefault(copy.own, True)
            self._held[copy.own] -= 1
            if not self._held[copy.own]:
                del self._held[copy.own]

    def _clear(self) -> None:
        for own in self._held:
            self._changed.setdefault(own, True)
        self._held.clear()
        self._nodes.clear()
