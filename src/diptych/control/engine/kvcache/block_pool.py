"""The blocks of one KV cache: reference counts, the free list and least-recently-used eviction, each operation O(1).

A block is in exactly one state: in use (references > 0), cached (no reference, but its content can still be found), or
free. "Recently used" is the order of releases, never a clock.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice

from diptych.control.engine.kvcache.boundaries import Boundaries
from diptych.control.engine.kvcache.prefix_cache import PrefixCache
from diptych.control.errors import BrokenInvariantError


@lru_cache(maxsize=4)
def _block_ids(first: int, num_blocks: int) -> tuple[int, ...]:
    """The same number objects for every pool of a size: a simulated fleet has hundreds of them."""
    return tuple(range(first, first + num_blocks))


class BlockPool:
    """Owner of block ids first_block .. first_block + num_blocks - 1. boundaries: of a model with windows, which end as
    blocks are evicted; then ``drain_changes`` says what became of these, else of the blocks."""

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_prefix_cache: bool = True,
        first_block: int = 0,
        names_evictors: bool = False,
        boundaries: Boundaries | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.first_block = first_block
        self.prefix_cache = PrefixCache()
        self._enable_prefix_cache = enable_prefix_cache
        self._references = [0] * (first_block + num_blocks)
        self._num_held = 0  # blocks with a reference, counted as they are taken and given up
        self._free = list(reversed(_block_ids(first_block, num_blocks)))  # a stack; low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._stored: dict[bytes, None] = {}  # since the last ``drain_changes``, and still there
        self._evicted: list[bytes] = []
        self.version = 0  # changes when the oldest cached blocks may have
        self.taker = ""  # the request whose blocks are taken next
        self._names_evictors = names_evictors
        self._boundaries = boundaries
        self._evicted_for: list[tuple[str, int]] = []  # (taker, how many of ``_evicted``), in their order
        self._end = first_block + num_blocks  # blocks from here on are given up as soon as nobody holds them

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can hand out (free, or cached and evictable)."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out without an eviction."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_available

    def references(self, block_id: int) -> int:
        """How many requests hold the block."""
        return self._references[block_id]

    def allocate(self, count: int) -> list[int]:
        """``count`` private blocks; the caller has checked ``num_available``. Evicts the least recently used."""
        if count > self.num_available:
            raise BrokenInvariantError(f"asked for {count} blocks, {self.num_available} available")
        self.version += 1
        free = self._free
        taken = min(count, len(free))
        blocks = free[len(free) - taken :]
        # The order in which ``take_one`` would give them: the ids of blocks are part of the decisions that are
        # replayed.
        blocks.reverse()
        del free[len(free) - taken :]
        for _ in range(count - taken):
            block_id, _ = self._cached.popitem(last=False)
            self._forget(self.prefix_cache.remove(block_id))
            blocks.append(block_id)
        for block_id in blocks:
            self._references[block_id] = 1
        self._num_held += count
        return blocks

    def take_one(self) -> int | None:
        """One private block; None when there is none. Evicts like ``allocate``."""
        self.version += 1
        if self._free:
            block_id = self._free.pop()
            self._references[block_id] = 1
            self._num_held += 1
            return block_id
        return self.allocate(1)[0] if self._cached else None

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these cached or used blocks."""
        self.version += 1
        for block_id in blocks:
            if self._references[block_id] == 0:
                del self._cached[block_id]
                self._num_held += 1
            self._references[block_id] += 1

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks no request holds (sharing them makes them unavailable)."""
        return sum(self._references[block_id] == 0 for block_id in blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block. The tail is released first, so that prefixes stay longest."""
        self.version += 1
        references, holds, free = self._references, self.prefix_cache.holds, self._free
        if not len(self.prefix_cache):  # nothing is shared, nothing stays findable
            for block_id in blocks:
                if references[block_id] != 1:
                    raise BrokenInvariantError(f"block {block_id} released more often than held")
                references[block_id] = 0
            # As the loop below leaves them, so that both ways give the same ids later.
            free.extend(reversed(blocks))
            self._num_held -= len(blocks)
            self._give_up(blocks)
            return
        # Tails go first: what is evicted next is the end of a prefix, never a block that others still build on.
        for block_id in reversed(blocks):
            count = references[block_id] - 1
            if count < 0:
                raise BrokenInvariantError(f"block {block_id} released more often than held")
            references[block_id] = count
            if count == 0:
                self._num_held -= 1
                if holds(block_id):
                    self._cached[block_id] = None
                else:
                    free.append(block_id)
        self._give_up(blocks)

    def shrink(self, num_blocks: int) -> None:
        """Own the first ``num_blocks`` blocks only. Those of the others that requests hold are given up when they are
        released; until then ``num_blocks`` counts them."""
        self.version += 1
        self._end = self.first_block + num_blocks
        for block_id in [block_id for block_id in self._cached if block_id >= self._end]:
            del self._cached[block_id]
            self._forget(self.prefix_cache.remove(block_id))
        self._free = [block_id for block_id in self._free if block_id < self._end]
        self.num_blocks = len(self._free) + len(self._cached) + self._num_held

    @property
    def is_shrinking(self) -> bool:
        """Whether a request still holds a block that is to be given up."""
        return self.first_block + self.num_blocks > self._end

    def _give_up(self, released: Sequence[int]) -> None:
        """Let go of what was released and is not to be owned any more."""
        if self.is_shrinking and max(released, default=0) >= self._end:
            self.shrink(self._end - self.first_block)

    def evict_first(self, blocks: Iterable[int]) -> None:
        """Let those of these blocks that no request holds, and whose content can be found, be evicted before all
        others."""
        self.version += 1
        for block_id in blocks:
            if block_id in self._cached:
                self._cached.move_to_end(block_id, last=False)

    def evict_last(self, blocks: Iterable[int]) -> None:
        """Let those of these blocks that no request holds, and whose content can be found, be evicted after all
        others, the last of them last."""
        self.version += 1
        for block_id in blocks:
            if block_id in self._cached:
                self._cached.move_to_end(block_id)

    def oldest_cached(self, count: int) -> list[bytes]:
        """The content of the ``count`` cached blocks that are evicted next, first of all those."""
        hash_of = self.prefix_cache.hash_of
        return [hash_of(block_id) for block_id in islice(self._cached, count)]

    def remember(self, block_hash: bytes, block_id: int) -> None:
        """Make a full, computed block that is in use findable by its content."""
        if self._enable_prefix_cache and self.prefix_cache.insert(block_hash, block_id) and self._boundaries is None:
            self._stored[block_hash] = None

    def report_boundary(self, block_hash: bytes) -> None:
        """A boundary is new: say so with the changes."""
        self._stored[block_hash] = None

    def end_boundary(self, block_hash: bytes) -> None:
        """A page that a boundary needs is gone. What only it had use for is evicted before all others."""
        boundaries = self._boundaries
        assert boundaries is not None, "a dense cache has none"
        left = [self.prefix_cache.get(key) for key in boundaries.end(block_hash)]
        self.evict_first([block_id for block_id in left if block_id is not None])
        self._report_gone(block_hash)

    def forget(self, block_id: int) -> None:
        """Make a block that is in use not findable any more: its holder is about to overwrite it."""
        self._forget(self.prefix_cache.remove(block_id))

    @property
    def has_changes(self) -> bool:
        """Whether ``drain_changes`` would return something."""
        return bool(self._stored or self._evicted)

    def drain_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """(stored, evicted) hashes since the last call, as if all evictions had come first."""
        if not self._stored and not self._evicted:
            return (), ()
        changes = tuple(self._stored), tuple(self._evicted)
        self._stored.clear()
        self._evicted.clear()
        return changes

    def drain_evictors(self) -> tuple[tuple[str, int], ...]:
        """The requests for which the evicted blocks of the next ``drain_changes`` made room; empty unless that is
        noted."""
        if not self._evicted_for:
            return ()
        evicted_for = tuple(self._evicted_for)
        self._evicted_for.clear()
        return evicted_for

    def _forget(self, block_hash: bytes) -> None:
        """The content can no longer be found."""
        if self._boundaries is None:
            self._report_gone(block_hash)
            return
        for boundary in self._boundaries.ended_by(block_hash):
            self.end_boundary(boundary)

    def _report_gone(self, block_hash: bytes) -> None:
        """What came and went between two drains is not reported."""
        if block_hash in self._stored:
            del self._stored[block_hash]
            return
        self._evicted.append(block_hash)
        if self._names_evictors:
            runs = self._evicted_for
            if runs and runs[-1][0] == self.taker:
                runs[-1] = (self.taker, runs[-1][1] + 1)
            else:
                runs.append((self.taker, 1))

    def check_counts(self) -> None:
        """Raise BrokenInvariantError unless free, cached and held blocks are all blocks. O(1)."""
        if len(self._free) + len(self._cached) + self._num_held != self.num_blocks:
            raise BrokenInvariantError(
                f"{len(self._free)} blocks are free, {len(self._cached)} cached and {self._num_held} held: "
                f"not the {self.num_blocks} that there are"
            )

    def check(self) -> None:
        """Assert the pool's invariants (for tests): every block in exactly one state."""
        free, cached = set(self._free), set(self._cached)
        self.check_counts()
        assert len(free) == len(self._free)
        assert not free & cached
        for block_id in range(self.first_block, self.first_block + self.num_blocks):
            count = self._references[block_id]
            assert (count == 0) == (block_id in free or block_id in cached), block_id
            assert (block_id in cached) <= self.prefix_cache.holds(block_id)
            assert not (block_id in free and self.prefix_cache.holds(block_id))
