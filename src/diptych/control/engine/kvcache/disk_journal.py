"""What has come to a disk and gone from it since the last look: the net changes, for the index of a router."""

from collections.abc import Iterable
from itertools import islice


class DiskJournal:
    """Empty until it ``is_kept``. Memory: an entry for each block whose change was not taken yet."""

    def __init__(self) -> None:
        self.is_kept = False
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    @property
    def has_changes(self) -> bool:
        """Whether ``take`` would return something."""
        return bool(self._added or self._removed)

    def add(self, block_hash: bytes) -> None:
        """The disk has it now, and had it not."""
        if self.is_kept:
            if block_hash in self._removed:
                del self._removed[block_hash]
            else:
                self._added[block_hash] = None

    def remove(self, block_hash: bytes) -> None:
        """The disk had it, and has it no longer."""
        if self.is_kept:
            if block_hash in self._added:
                del self._added[block_hash]
            else:
                self._removed[block_hash] = None

    def begin_again(self, hashes: Iterable[bytes]) -> None:
        """Begin anew for a reader that knows nothing from now on; the disk holds these."""
        self._removed.clear()
        self._added = dict.fromkeys(hashes)

    def take(self, most: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """(added, removed) since it was looked at, of the former the first ``most``: the others come next."""
        added, removed = tuple(islice(self._added, most)), tuple(self._removed)
        if len(added) == len(self._added):
            self._added.clear()
        else:
            for block_hash in added:
                del self._added[block_hash]
        self._removed.clear()
        return added, removed
