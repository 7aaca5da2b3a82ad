"""Reads blocks out of the host memories of the other workers of this machine, on a thread of its own, and names the
blocks that others may read here. Answers every load with its event, whatever has become of the peer.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

from diptych.control.engine.kvcache.tier_records import CancelLoad, LoadBlocks, RunLoaded, ShareBlocks, TierAction
from diptych.limited_log import LimitedLog
from diptych.runtime.tiers.extent_format import Buffer
from diptych.runtime.tiers.shared_host import NAME_BYTES, PeerHost, SharedHost
from diptych.runtime.tiers.tier_events import TierEvents

logger = logging.getLogger(__name__)


class PeerReader:
    """own: the host blocks of this worker. fds: the files of the others, by worker. format_digest: what the bytes of a
    block mean; only blocks of the same are found. host_buffer: the bytes of an own host block."""

    def __init__(
        self,
        own: SharedHost,
        fds: Mapping[int, int],
        format_digest: bytes,
        host_buffer: Callable[[int], Buffer],
        events: TierEvents,
    ) -> None:
        self._log = LimitedLog(logger)
        self._own = own
        self._fds = dict(fds)
        self._digest = format_digest
        self._host_buffer = host_buffer
        self._events = events
        self._block_bytes = len(host_buffer(0))
        self._peers: dict[int, PeerHost] = {}
        self._pending: set[int] = set()  # loads that are not answered
        self._cancelled: set[int] = set()  # of these
        self._is_closed = False
        self._loads: queue.SimpleQueue[LoadBlocks | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read_loop, name="peer-reader", daemon=True)
        self._thread.start()

    def act(self, action: TierAction) -> None:
        """Begin to carry out an action; returns at once."""
        if isinstance(action, LoadBlocks):
            self._pending.add(action.load_id)
            self._loads.put(action)
        elif isinstance(action, ShareBlocks):
            self._own.publish(self._names(action.hashes), action.host_blocks)
        elif isinstance(action, CancelLoad) and action.load_id in self._pending:
            self._cancelled.add(action.load_id)

    def close(self) -> None:
        """Stop; loads that were begun are cut short."""
        self._is_closed = True
        self._loads.put(None)
        self._thread.join()

    def _names(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Block hashes say which tokens, and the digest of what model and in which layout."""
        key = self._digest
        return [blake2b(block_hash, digest_size=NAME_BYTES, key=key).digest() for block_hash in hashes]

    def _read_loop(self) -> None:
        with self._events.defects():
            self._read_all()

    def _read_all(self) -> None:
        while (action := self._loads.get()) is not None:
            begun_ns, count = time.monotonic_ns(), 0
            try:
                count = self._load(action)
            except OSError as error:
                self._log.warning("read", "reading host memory of worker %d failed: %s", action.peer, error)
            self._pending.discard(action.load_id)
            self._cancelled.discard(action.load_id)
            self._events.emit(RunLoaded(action.load_id, count, time.monotonic_ns() - begun_ns))

    def _load(self, action: LoadBlocks) -> int:
        """Returns how many of the blocks are in own host blocks now."""
        peer = self._peer(action.peer)
        if peer is None:
            return 0
        names, count = self._names(action.hashes), 0
        for name, block, target in zip(names, peer.find(names), action.host_blocks, strict=True):
            if block < 0 or self._is_closed or action.load_id in self._cancelled:
                break
            with self._own.writing((target,)):
                is_whole = peer.copy(block, name, self._host_buffer(target))
            if not is_whole:
                break
            count += 1
        return count

    def _peer(self, worker: int) -> PeerHost | None:
        peer = self._peers.get(worker)
        if peer is None and worker in self._fds:
            peer = PeerHost.open(self._fds[worker], self._block_bytes)
            if peer is not None:
                self._peers[worker] = peer
        return peer
