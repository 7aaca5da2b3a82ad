"""Carries out what control decides for the disk, on two threads: one reads, one writes, so that no load waits for a
store. Answers every action with its event, whatever the disk does.

A disk that fails several times in a row is not used any more: a DiskState event and a log line say so, and the worker
goes on without it. A disk that is full is asked again later.
"""

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from diptych.control.engine.kvcache.tier_records import (
    CancelLoad,
    DiskContents,
    DiskState,
    LoadBlocks,
    RunLoaded,
    RunStored,
    StoreBlocks,
    TierAction,
)
from diptych.limited_log import LimitedLog
from diptych.runtime.device.thread_priority import give_way
from diptych.runtime.tiers.disk_store import DiskStore
from diptych.runtime.tiers.extent_format import Buffer
from diptych.runtime.tiers.tier_events import TierEvents

if TYPE_CHECKING:
    from diptych.runtime.tiers.block_coding import BlockCoding

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # in a row
FULL_REST_S = 30.0  # after the disk was full
WRITER_NICENESS = 10  # a step is waited for, a store is not
REFRESH_S = 2.0  # between looks at what other processes have stored: each asks for every file of the folder

HostBuffer = Callable[[int], Buffer]
Writing = Callable[[Sequence[int]], AbstractContextManager[None]]


def _unguarded(blocks: Sequence[int]) -> AbstractContextManager[None]:
    """Host blocks that nobody else reads."""
    return nullcontext()


class TierMover:
    """The disk of one worker. host_buffer: the bytes of a host block. coding: of the thread that reads, and of the one
    that writes (None: blocks lie on disk as they are). events: what it reports. writing: within it, these host blocks
    may be written (see SharedHost)."""

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
        except OSError as error:
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
        give_way(WRITER_NICENESS)
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
