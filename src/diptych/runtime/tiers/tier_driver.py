"""Carries out what control decides for the tiers of one worker: hands each action to the disk or to the reader of
peers, and collects their events."""

from typing import TYPE_CHECKING

from diptych.control.engine.kvcache.tier_records import (
    NO_PEER,
    LoadBlocks,
    ShareBlocks,
    StoreBlocks,
    TierAction,
    TierEvent,
)
from diptych.runtime.tiers.tier_events import TierEvents
from diptych.runtime.tiers.tier_mover import TierMover

if TYPE_CHECKING:
    from diptych.runtime.tiers.peer_reader import PeerReader


class TierDriver:
    """disk, peers: what there is of both; they emit into ``events``."""

    def __init__(self, events: TierEvents, disk: TierMover | None, peers: "PeerReader | None") -> None:
        self.disk = disk
        self._peers = peers
        self._events = events

    def fileno(self) -> int:
        """Readable when there are events."""
        return self._events.fileno()

    def poll(self) -> list[TierEvent]:
        """What has happened since the last call, in order."""
        return self._events.poll()

    def wait(self, timeout_s: float) -> None:
        """Until there are events, or for so long."""
        self._events.wait(timeout_s)

    def act(self, action: TierAction) -> None:
        """Begin to carry out an action; returns at once."""
        is_for_disk = isinstance(action, StoreBlocks) or (isinstance(action, LoadBlocks) and action.peer == NO_PEER)
        is_for_peers = isinstance(action, ShareBlocks) or (isinstance(action, LoadBlocks) and action.peer != NO_PEER)
        if self.disk is not None and not is_for_peers:
            self.disk.act(action)
        if self._peers is not None and not is_for_disk:
            self._peers.act(action)

    def close(self) -> None:
        """Finish the stores that were begun, and stop."""
        if self._peers is not None:
            self._peers.close()
        if self.disk is not None:
            self.disk.close()
        self._events.close()
