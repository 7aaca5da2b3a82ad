"""What the prefix cache of a worker holds, told to whoever routes by it: numbered changes, and all of it when asked.

Owns the numbers: a listener that misses one asks for everything. Must never look into the cache itself, so that a
snapshot is exactly what the changes up to its number make.
"""

from collections.abc import Iterable

from diptych.control.events import BlocksEvicted, BlocksStored, Event
from diptych.serving.link.messages import Blocks


class KVEventPublisher:
    """The publications of one worker, from 1 on."""

    def __init__(self) -> None:
        self._sequence = 0
        self._held: dict[bytes, None] = {}  # in the order of their coming: parents first

    def on_events(self, events: Iterable[Event]) -> Blocks | None:
        """The record of a step's changes (evicted, then stored); None when there are none."""
        stored: list[bytes] = []
        evicted: list[bytes] = []
        for event in events:
            if isinstance(event, BlocksStored):
                stored += event.hashes
            elif isinstance(event, BlocksEvicted):
                evicted += event.hashes
        if not stored and not evicted:
            return None
        for block_hash in evicted:
            self._held.pop(block_hash, None)
        self._held.update(dict.fromkeys(stored))
        self._sequence += 1
        return Blocks(self._sequence, stored, evicted)

    def snapshot(self) -> Blocks:
        """Everything that is held as of the last record."""
        return Blocks(self._sequence, list(self._held), [], is_snapshot=True)
