"""Carries out what control decides for the tiers of one worker, on threads of its own, and reports what has happened.

TierEvents is the queue between these threads and the one that decides; TierMover is the disk; PeerReader reads the host
memories of other workers; TierDriver hands each action to one of the two. Every action is answered with its event,
whatever the disk or a peer does.
"""

import errno
import logging
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

from diptych.base.limited_log import LimitedLog
from diptych.control.engine.kvcache.tier_records import (
    NO_PEER,
    CancelLoad,
    DiskContents,
    DiskState,
    LoadBlocks,
    RunLoaded,
    RunStored,
    ShareBlocks,
    StoreBlocks,
    TierAction,
    TierEvent,
)
from diptych.control.errors import WorkerError
from diptych.runtime.device.thread_limits import lower_priority
from diptych.runtime.tiers.disk_store import DiskStore
from diptych.runtime.tiers.extent_format import Buffer

if TYPE_CHECKING:
    from diptych.runtime.tiers.block_coding import BlockCoding
    from diptych.runtime.tiers.shared_host import PeerHost, SharedHost

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # in a row
FULL_REST_S = 30.0  # after the disk was full
WRITER_NICENESS = 10  # a step is waited for, a store is not
REFRESH_S = 2.0  # between looks at what other processes have stored: each asks for every file of the folder

HostBuffer = Callable[[int], Buffer]
Writing = Callable[[Sequence[int]], AbstractContextManager[None]]


class TierEvents:
    """A queue of events that can be polled: any thread emits, one takes."""

    def __init__(self) -> None:
        self._events: deque[TierEvent] = deque()
        self._defect: Exception | None = None  # that has ended a thread
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable when there are events."""
        return self._fd

    def emit(self, event: TierEvent) -> None:
        """Queue an event."""
        self._events.append(event)
        os.eventfd_write(self._fd, 1)

    @contextmanager
    def defects(self) -> Iterator[None]:
        """Around all that a thread does: an exception that ends it goes to who polls."""
        try:
            yield
        except Exception as error:
            self._defect = error
            os.eventfd_write(self._fd, 1)

    def poll(self) -> list[TierEvent]:
        """What has happened since the last call, in order. Raises WorkerError when a thread has ended by a defect: what
        waits for it would wait for ever."""
        if self._defect is not None:
            raise WorkerError(f"a thread of the KV tiers has failed: {self._defect}") from self._defect
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return []
        return [self._events.popleft() for _ in range(len(self._events))]

    def wait(self, timeout_s: float) -> None:
        """Wait until there are events, or for ``timeout_s``."""
        select.select([self._fd], [], [], timeout_s)

    def close(self) -> None:
        """End: no thread emits any more."""
        os.close(self._fd)


def _unguarded(blocks: Sequence[int]) -> AbstractContextManager[None]:
    """A guard for host blocks that no other process reads: none."""
    return nullcontext()


class TierMover:
    """The disk of one worker, on two threads: one reads, one writes, so that no load waits for a store.

    A disk that fails several times in a row is not used any more: a DiskState event and a log line say so, and the
    worker goes on without it. A disk that is full is asked again later.

    host_buffer: the bytes of a host block. coding: of the thread that reads, and of the one that writes (None: blocks
    lie on disk as they are). events: what it reports. writing: within it, these host blocks may be written (see
    SharedHost).
    """

    def __init__(
        self,
        store: DiskStore,
        host_buffer: HostBuffer,
        coding: "tuple[BlockCoding, BlockCoding] | None" = None,
        *,
        events: TierEvents,
        writing: Writing = _unguarded,
    ) -> None:
        self.store = store
        self._host_buffer = host_buffer
        self._coding = coding
        self._writing = writing
        self._events = events
        self._emit = events.emit
        self._log = LimitedLog(logger)
        self._pending: set[int] = set()  # loads that are not answered
        self._cancelled: set[int] = set()  # of these
        self._loads: queue.SimpleQueue[LoadBlocks | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[StoreBlocks | None] = queue.SimpleQueue()
        self._num_failures = 0
        self._is_on = True
        self._full_until = 0.0
        self._refresh_at = time.monotonic() + REFRESH_S
        self._is_closed = False
        self.used_bytes = store.folder.used_bytes()  # of the folder, as of the last look
        self._report_changes()
        self._threads = [
            threading.Thread(target=self._read_loop, name="tier-reader", daemon=True),
            threading.Thread(target=self._write_loop, name="tier-writer", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def act(self, action: TierAction) -> None:
        """Begin to carry out an action; returns at once."""
        if isinstance(action, LoadBlocks):
            self._pending.add(action.load_id)
            self._loads.put(action)
        elif isinstance(action, StoreBlocks):
            self._stores.put(action)
        elif isinstance(action, CancelLoad) and action.load_id in self._pending:
            self._cancelled.add(action.load_id)

    def close(self) -> None:
        """Finish the stores that were begun, and stop."""
        self._is_closed = True
        self._loads.put(None)
        self._stores.put(None)
        for thread in self._threads:
            thread.join()
        try:
            self.store.close()
        except OSError as error:  # what is not in it is computed again
            logger.warning("the last segment of the disk tier was not closed: %s", error)

    # -- the reader's thread ------------------------------------------------------------------------------------------

    def _read_loop(self) -> None:
        with self._events.defects():
            self._read_all()

    def _read_all(self) -> None:
        while (action := self._loads.get()) is not None:
            begun_ns, count = time.monotonic_ns(), 0
            load_id = action.load_id
            if self._is_on and not self._is_closed:
                try:
                    with self._writing(action.host_blocks):
                        count = self._load(action)
                    self._num_failures = 0
                except OSError as error:
                    self._failed("reading", error)
            self._report_changes()
            self._pending.discard(load_id)
            self._cancelled.discard(load_id)
            self._emit(RunLoaded(load_id, count, time.monotonic_ns() - begun_ns))

    def _load(self, action: LoadBlocks) -> int:
        """Returns how many of the blocks are in host memory now."""
        is_cancelled = partial(self._is_cancelled, action.load_id)
        blocks = [self._host_buffer(block) for block in action.host_blocks]
        if self._coding is None:
            return self.store.load(action.hashes, blocks, is_cancelled)
        coding = self._coding[0]
        read = [memoryview(bytearray(coding.num_bytes)) for _ in blocks]
        count = self.store.load(action.hashes, read, is_cancelled)
        for data, block in zip(read[:count], blocks, strict=False):
            coding.decode(data, block)
        return count

    def _is_cancelled(self, load_id: int) -> bool:
        return load_id in self._cancelled or self._is_closed

    # -- the writer's thread ------------------------------------------------------------------------------------------

    def _write_loop(self) -> None:
        with self._events.defects():
            self._write_all()

    def _write_all(self) -> None:
        lower_priority(WRITER_NICENESS)
        while True:
            self._refresh()
            try:
                action = self._stores.get(timeout=max(0.0, self._refresh_at - time.monotonic()))
            except queue.Empty:
                continue
            if action is None:
                return
            self._emit(RunStored(action.store_id, self._store(action)))

    def _store(self, action: StoreBlocks) -> int:
        if not self._is_on or time.monotonic() < self._full_until:
            return 0
        count = 0
        try:
            blocks = [self._host_buffer(block) for block in action.host_blocks]
            if self._coding is not None:
                blocks = [self._coding[1].encode(block) for block in blocks]
            count = self.store.store(action.hashes, blocks)
            self._num_failures = 0
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                words = "the disk tier is full: %s; nothing is stored for %d s at a time"
                self._log.warning("full", words, error, FULL_REST_S)
                self._full_until = time.monotonic() + FULL_REST_S
            else:
                self._failed("writing", error)
        self._report_changes()
        return count

    def _refresh(self) -> None:
        """Where it is time."""
        if time.monotonic() < self._refresh_at:
            return
        self._refresh_at = time.monotonic() + REFRESH_S
        if not self._is_on:
            return
        try:
            self.store.refresh()
            self.used_bytes = self.store.folder.used_bytes()
        except OSError as error:
            self._failed("reading", error)
        self._report_changes()

    def _report_changes(self) -> None:
        added, removed = self.store.take_changes()
        if added or removed:
            self._emit(DiskContents(added, removed))

    def _failed(self, what: str, error: OSError) -> None:
        self._num_failures += 1
        self._log.warning(what, "%s the disk tier failed: %s", what, error)
        if self._num_failures >= MAX_FAILURES and self._is_on:
            self._is_on = False
            message = f"{what} failed {self._num_failures} times in a row, the last time with: {error}"
            logger.error("the disk tier is not used any more: %s", message)
            self._emit(DiskState(False, message))


class PeerReader:
    """Reads blocks out of the host memories of the other workers of this machine, on a thread of its own, and names the
    blocks that others may read here.

    own: the host blocks of this worker. fds: the files of the others, by worker. format_digest: what the bytes of a
    block mean; only blocks of the same are found. host_buffer: the bytes of an own host block.
    """

    def __init__(
        self,
        own: "SharedHost",
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
        from diptych.runtime.tiers.shared_host import NAME_BYTES  # imports numpy, which a front end may lack

        return [blake2b(block_hash, digest_size=NAME_BYTES, key=key).digest() for block_hash in hashes]

    def _read_loop(self) -> None:
        with self._events.defects():
            self._read_all()

    def _read_all(self) -> None:
        while (action := self._loads.get()) is not None:
            begun_ns, count = time.monotonic_ns(), 0
            try:
                count = self._load(action)
            except OSError as error:  # count says that nothing came: it is computed
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

    def _peer(self, worker: int) -> "PeerHost | None":
        peer = self._peers.get(worker)
        if peer is None and worker in self._fds:
            from diptych.runtime.tiers.shared_host import PeerHost  # imports numpy, which a front end may lack

            peer = PeerHost.open(self._fds[worker], self._block_bytes)
            if peer is not None:
                self._peers[worker] = peer
        return peer


class TierDriver:
    """disk, peers: what there is of both; they emit into ``events``."""

    def __init__(self, events: TierEvents, disk: TierMover | None, peers: PeerReader | None) -> None:
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
        """Wait until there are events, or for ``timeout_s``."""
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
