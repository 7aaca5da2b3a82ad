"""What a router is to know of the tiers below a worker's KV cache: their changes, numbered tier by tier, as KV events.

Made only where there are such tiers, and a router reads them. What lies on disk is said in parts of a bounded size, so
that a full disk that a new worker finds does not make one message of megabytes: until all of it is said, a router knows
too little, never too much.
"""

from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.engine.kvcache.tier_records import Tier
from diptych.control.events import Event, KVEvents, KVSnapshot

MOST_HASHES = 65_536  # on disk, that one event says


class TierChanges:
    """The changes of one worker's tiers since they were taken last."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._disk = kv.tiers.loads.journal
        self._disk.is_kept = True
        self._numbers: dict[Tier, int] = {"host": 0, "disk": 0}

    @property
    def has_more(self) -> bool:
        """Whether ``take`` would return something."""
        return self._kv.host.has_changes or self._disk.has_changes

    def take(self, now: int) -> list[Event]:
        """What has changed since the last call, or the first part of it."""
        events: list[Event] = []
        if self._kv.host.has_changes:
            stored, evicted = self._kv.host.drain_changes()
            events.append(KVEvents(now, self._next("host"), stored, evicted, tier="host"))
        if self._disk.has_changes:
            stored, evicted = self._disk.take(MOST_HASHES)
            events.append(KVEvents(now, self._next("disk"), stored, evicted, tier="disk"))
        return events

    def snapshot(self, now: int) -> list[Event]:
        """All that the tiers hold; of the disk a first part, which ``take`` continues."""
        self._kv.host.drain_changes()
        host = KVSnapshot(now, self._next("host"), tuple(self._kv.host.prefix_cache), "host")
        self._disk.begin_again(self._kv.tiers.loads.hashes)
        stored, _ = self._disk.take(MOST_HASHES)
        return [host, KVSnapshot(now, self._next("disk"), stored, "disk")]

    def _next(self, tier: Tier) -> int:
        self._numbers[tier] += 1
        return self._numbers[tier]
