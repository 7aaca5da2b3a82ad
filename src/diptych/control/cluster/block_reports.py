"""What workers report of the blocks in their caches, passed to the router's index; a gap asks for all of them again."""

from collections import Counter

from diptych.control.cluster.membership import Membership
from diptych.control.commands import AskKVSnapshot, Command
from diptych.control.events import KVEvents, KVSnapshot
from diptych.control.router.routing import Router


class BlockReports:
    """counts: of the core; gaps are counted as ``block_gaps``."""

    def __init__(self, members: Membership, router: Router, counts: Counter[str]) -> None:
        self._members = members
        self._router = router
        self._counts = counts

    def take_changes(self, worker: int, event: KVEvents, now: int) -> list[Command]:
        """Blocks came to a tier or left it since the last report."""
        if not self._members.is_usable(worker) or self._router.on_kv_events(
            worker, event.sequence, event.stored, event.evicted, event.tier
        ):
            return []
        self._counts["block_gaps"] += 1
        return [AskKVSnapshot(worker)]

    def take_snapshot(self, worker: int, event: KVSnapshot, now: int) -> list[Command]:
        """All blocks in one tier of a worker."""
        if self._members.is_usable(worker):
            self._router.on_kv_snapshot(worker, event.sequence, event.hashes, event.tier)
        return []
