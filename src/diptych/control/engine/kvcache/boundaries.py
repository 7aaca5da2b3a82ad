"""Boundaries of the prefixes of prompts in a model with windows: where a sequence may go on that begins as another did.

Behind a boundary a sequence needs every page of the groups that keep all tokens, and of each window the last pages
before it. A boundary ends with the first of these that is evicted. Pages of windows are of use to boundaries alone:
what is left of one that has ended is evicted before all others. Knows pages by their keys, never by number.
"""

from collections.abc import Iterator, Sequence

SHARED_USES = 2  # uses of a boundary from which on it is taken to be one that prompts have in common


class Boundaries:
    """Owner of the boundaries of one worker, by the hash of the last block before each."""

    def __init__(self) -> None:
        self._pages: dict[bytes, tuple[bytes, ...]] = {}  # boundary -> keys of its pages in windows
        self._ends: dict[bytes, list[bytes]] = {}  # page -> boundaries that end with it
        self._last: dict[bytes, tuple[bytes, ...]] = {}  # boundary -> keys of its last pages in the other groups
        self._uses: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._pages

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pages)

    def add(self, block_hash: bytes, window_pages: Sequence[bytes], last_pages: Sequence[bytes]) -> None:
        """Let sequences go on behind this block. window_pages: the keys of the last pages before it in each window;
        last_pages: of the last page in each other group (those before it are used last later than it is)."""
        self._pages[block_hash], self._last[block_hash] = tuple(window_pages), tuple(last_pages)
        self._uses[block_hash] = 0
        for key in (*window_pages, *last_pages):
            self._ends.setdefault(key, []).append(block_hash)

    def use(self, block_hash: bytes) -> None:
        """A sequence goes on there."""
        if block_hash in self._uses:
            self._uses[block_hash] += 1

    def is_shared(self, block_hash: bytes) -> bool:
        """Whether several sequences have gone on there."""
        return self._uses[block_hash] >= SHARED_USES

    def window_pages(self, block_hash: bytes) -> tuple[bytes, ...]:
        """The keys of its pages in windows."""
        return self._pages[block_hash]

    def end(self, block_hash: bytes) -> list[bytes]:
        """Forget a boundary. Returns the keys of its pages in windows that no other one needs."""
        del self._uses[block_hash]
        pages, last = self._pages.pop(block_hash), self._last.pop(block_hash)
        for key in (*pages, *last):
            others = self._ends[key]
            others.remove(block_hash)
            if not others:
                del self._ends[key]
        return [key for key in pages if key not in self._ends]

    def ended_by(self, key: bytes) -> tuple[bytes, ...]:
        """The boundaries that end when this page can no longer be found."""
        return tuple(self._ends.get(key, ()))
