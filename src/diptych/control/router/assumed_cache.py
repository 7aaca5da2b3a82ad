"""What an engine's prefix cache probably holds, where the engine does not say it, or not all: the prompts it was sent.

The blocks that were used last, as many as its cache has, for as long as they are believed: engines evict the least
recently used first, and so does this. It gives changes as a worker reports them, so that a router need not know how
they were found. Memory: one entry per block of the cache.
"""

from collections.abc import Iterable, Sequence


class AssumedCache:
    """capacity: blocks that the engine holds. lifetime_ns: after which a block that was not used is not believed in any
    more (other clients of the engine may have displaced it)."""

    def __init__(self, capacity: int, lifetime_ns: int) -> None:
        self._capacity = max(1, capacity)
        self._lifetime_ns = lifetime_ns
        self._used: dict[bytes, int] = {}  # hash -> when it was used last, in this order

    def __len__(self) -> int:
        return len(self._used)

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """All that is believed, parents before their children wherever both were used at one time."""
        return tuple(reversed(self._used))

    def on_computed(self, hashes: Sequence[bytes], now: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """The engine has computed a prompt with these blocks: what is new, and what is not believed any more.

        Of a prompt that is longer than the cache, its beginning counts: that is what another prompt can share.
        """
        kept = hashes[: self._capacity]
        used = self._used
        stored: list[bytes] = []
        for block_hash in reversed(kept):  # children are older than their parents: they go first
            if used.pop(block_hash, None) is None:
                stored.append(block_hash)
            used[block_hash] = now
        stored.reverse()
        return tuple(stored), self._evict(now)

    def holds(self, block_hash: bytes) -> bool:
        """Whether a block is believed to be held."""
        return block_hash in self._used

    def drop(self, hashes: Iterable[bytes]) -> None:
        """These are known to be gone."""
        for block_hash in hashes:
            self._used.pop(block_hash, None)

    def expire(self, now: int) -> tuple[bytes, ...]:
        """What is not believed any more for its age."""
        return self._evict(now)

    def _evict(self, now: int) -> tuple[bytes, ...]:
        used = self._used
        evicted: list[bytes] = []
        for block_hash, used_ns in used.items():
            if len(used) - len(evicted) <= self._capacity and now - used_ns < self._lifetime_ns:
                break
            evicted.append(block_hash)
        for block_hash in evicted:
            del used[block_hash]
        return tuple(evicted)
