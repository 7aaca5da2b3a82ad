"""The disk tier and the host blocks of peers, at their bounds: what lies where, what is given back, who is asked, and
for how long something is waited for."""

import contextlib
import errno
import fcntl
import os
import random
import select
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.control.engine.kvcache.tier_records import (
    NO_PEER,
    CancelLoad,
    DiskState,
    LoadBlocks,
    RunLoaded,
    RunStored,
    ShareBlocks,
    StoreBlocks,
    TierAction,
)
from diptych.control.errors import ConfigError, WorkerError
from diptych.runtime.tiers import disk_store, folder_view, tier_io, weights_digest
from diptych.runtime.tiers.disk_store import DiskStore, least_bytes, mark_dropped
from diptych.runtime.tiers.extent_format import PAGE_BYTES, ExtentHeader, checksum, extent_bytes, unpack_header
from diptych.runtime.tiers.segment_folder import SegmentFolder, bound_bytes, reading
from diptych.runtime.tiers.shared_host import PeerHost, SharedHost
from diptych.runtime.tiers.tier_io import PeerReader, TierDriver, TierEvents, TierMover
from diptych.runtime.tiers.uncached_file import UncachedFile
from tests.runtime.open_descriptors import descriptors
from tests.runtime.test_disk_store import BLOCK, CAP, FORMAT, Host, get, hash_of, moving, opened, put, wait_for
from tests.runtime.test_uncached_file import refuse_direct_files

# -- what is opened is closed -----------------------------------------------------------------------------------------


def stored_and_loaded(folder: Path, patch: pytest.MonkeyPatch) -> None:
    store = opened(folder)
    for first in range(0, 400, 40):  # more segments than one
        put(store, *range(first, first + 40))
        get(store, *range(first, first + 3))
    store.close()
    store.close()  # idempotent


def damaged(folder: Path, patch: pytest.MonkeyPatch) -> None:
    stored_and_loaded(folder, patch)
    for path in folder.glob("*.kv"):
        with path.open("r+b") as file:
            file.seek(PAGE_BYTES)
            file.write(b"?")
    store = opened(folder)
    assert get(store, *range(400)) != 400
    mark_dropped(folder / "gone.kv", 0)
    mark_dropped(next(folder.glob("*.kv")), 1)  # no header begins there


def looked_at(folder: Path, patch: pytest.MonkeyPatch) -> None:
    stored_and_loaded(folder, patch)
    view = SegmentFolder(folder, CAP)
    for segment in view.segments():
        folder_view.verify(view, segment)
    folder_view.summaries(view)
    with contextlib.closing(folder_view.extents(view.segments()[0].path)) as found:
        next(found)
    folder_view.clear(view)
    view.trim()
    with reading(folder / "gone.kv") as fd:
        assert fd is None
    with view.unused(folder / "gone.kv") as fd:
        assert fd is None


def full(folder: Path, patch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    store = opened(folder)
    patch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(OSError, match="no space"):
        put(store, 1)
    assert [path.name for path in folder.glob("*-*")] == []


def unwritable(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A segment's lock could be made, and its file could not."""
    private = disk_store.SegmentFolder.make.__globals__["open_private"]

    def refuse(path: Path, flags: int) -> int:
        if path.suffix == ".kv":
            raise OSError(errno.EROFS, "read-only file system")
        return int(private(path, flags))

    store = opened(folder)
    patch.setitem(disk_store.SegmentFolder.make.__globals__, "open_private", refuse)
    with pytest.raises(OSError, match="read-only"):
        put(store, 1)
    assert [path.name for path in folder.glob("*-*")] == []


def torn(folder: Path, patch: pytest.MonkeyPatch) -> None:
    store = opened(folder)
    patch.setattr(store, "_is_written", lambda *_: False)
    assert put(store, 1, 2) == 0 and store.counts.damaged_blocks == 2 and store.counts.stored_blocks == 0
    patch.undo()
    assert put(store, 1, 2) == 2 and store.counts.stored_blocks == 2
    store.close()


def without_direct_files(folder: Path, patch: pytest.MonkeyPatch) -> None:
    refuse_direct_files(patch)
    stored_and_loaded(folder, patch)


def moved(folder: Path, patch: pytest.MonkeyPatch) -> None:
    mover = moving(opened(folder), Host(2))
    mover.act(StoreBlocks(1, (hash_of(1),), (0,)))
    wait_for(mover, RunStored)
    mover.close()


def read_from_peers(folder: Path, patch: pytest.MonkeyPatch) -> None:
    peers = Pair(2)
    peers.share(0)
    assert peers.load(0) == 1
    peers.close()


@pytest.mark.parametrize(
    "act",
    [stored_and_loaded, damaged, looked_at, full, unwritable, torn, without_direct_files, moved, read_from_peers],
    ids=lambda act: act.__name__,
)
def test_no_descriptor_stays_open(
    act: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    act(tmp_path, monkeypatch)
    monkeypatch.undo()
    assert descriptors() <= before


# -- what lies where --------------------------------------------------------------------------------------------------


def test_a_header_lies_on_disk_as_it_is_documented() -> None:
    entries = tuple((bytes([at]) * 16, bytes([99 - at]) * 16) for at in range(3))
    page = ExtentHeader(b"f" * 16, 3000, entries).pack()
    assert page[:8] == b"DPTCHKV2" and page[8:24] == b"f" * 16
    assert struct.unpack("<IIQ", page[24:40]) == (3, 0, 3000)
    assert page[40 : 40 + 96] == b"".join(first + second for first, second in entries)
    assert not any(page[136:4080]) and page[4080:] == checksum(b"", page[:4080])
    assert checksum(b"hash", b"data") == checksum(b"", b"hashdata") != checksum(b"", b"data")
    assert ExtentHeader(b"f" * 16, 3000, entries).num_bytes == 4096 + 12288


def page_of(magic: bytes, count: int, block_bytes: int) -> bytes:
    page = (struct.pack("<8s16sIIQ", magic, b"f" * 16, count, 0, block_bytes)).ljust(4080, b"\1")
    return page + checksum(b"", page)


@pytest.mark.parametrize(
    ("magic", "count", "block_bytes", "is_one"),
    [(b"DPTCHKV2", 1, 1, True), (b"DPTCHKV2", 64, 1 << 40, True), (b"DPTCHKV2", 0, 1, False),
     (b"DPTCHKV2", 65, 1, False), (b"DPTCHKV2", 1, 0, False), (b"DPTCHKV1", 1, 1, False)],
)  # fmt: skip
def test_a_page_whose_numbers_cannot_be_is_no_header(magic: bytes, count: int, block_bytes: int, is_one: bool) -> None:
    header = unpack_header(page_of(magic, count, block_bytes))
    assert (header is not None) is is_one
    if header is not None:
        assert (len(header.entries), header.block_bytes, header.format) == (count, block_bytes, b"f" * 16)


@pytest.mark.parametrize("block_bytes", [1, 3000, 4096, 100_000, 1_500_000])
@pytest.mark.parametrize("more", [0, 10_000, 1 << 20, 200 << 20, 2 << 30])
def test_four_segments_fill_the_cap_up_to_64_mib_or_64_blocks_each(block_bytes: int, more: int, tmp_path: Path) -> None:
    cap = least_bytes(block_bytes) + more
    store = DiskStore(tmp_path, cap, FORMAT, block_bytes)
    size, most = store._segment_bytes, max(64 << 20, extent_bytes(64, block_bytes))
    assert size % 4096 == 0 and extent_bytes(1, block_bytes) <= size <= most
    folder_files = 4 * 4096  # lock, description
    assert 4 * bound_bytes(size) + folder_files <= cap
    assert size == most // 4096 * 4096 or 4 * bound_bytes(size + 3 * 4096) + folder_files > cap
    longest = store.max_run
    assert 1 <= longest <= 64 and extent_bytes(longest, block_bytes) <= size
    assert longest == 64 or extent_bytes(longest + 1, block_bytes) > size
    with pytest.raises(ConfigError, match="need at least"):
        DiskStore(tmp_path, least_bytes(block_bytes) - 1, FORMAT, block_bytes)


def test_the_least_cap_is_four_segments_of_a_block_and_the_files_of_the_folder() -> None:
    assert [least_bytes(size) for size in (1, 4096, 1 << 20)] == [98_432, 98_432, 4_292_736]


def test_a_file_takes_a_leaf_and_12_bytes_a_page_for_its_map_at_most() -> None:
    assert [bound_bytes(size) for size in (0, 1, 4096, 1 << 20)] == [0, 4097, 8208, (1 << 20) + 8192]


def test_a_segment_is_allocated_whole_and_what_is_unused_of_it_given_back(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1, 2)
    (path,) = tmp_path.glob("*.kv")
    assert path.stat().st_size == store._segment_bytes
    assert path.stem.startswith(FORMAT.hex() + "-") and path.with_suffix(".lock").exists()
    store.close()
    assert path.stat().st_size == extent_bytes(2, BLOCK)
    with path.open("ab") as file:  # as a process that was killed leaves it
        file.write(bytes(50_000))
    os.utime(path, ns=(10**18, 10**18))
    assert len(opened(tmp_path)) == 2
    assert path.stat().st_size == extent_bytes(2, BLOCK) and path.stat().st_mtime_ns == 10**18
    os.truncate(path, 0)
    opened(tmp_path)
    assert not path.exists() and not path.with_suffix(".lock").exists()


def test_what_came_and_went_since_the_last_look_is_told_as_gone_and_what_went_and_came_as_there(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1, 2)
    store.close()
    (path,) = tmp_path.glob("*.kv")
    path.unlink()
    store.refresh()
    assert store.take_changes() == ((), (hash_of(1), hash_of(2)))
    put(store, 1)
    assert store.take_changes() == ((hash_of(1),), ())
    store.close()
    (path,) = tmp_path.glob("*.kv")
    path.unlink()
    store.refresh()
    put(store, 1)
    assert store.take_changes() == ((hash_of(1),), ())


def test_an_extent_that_two_have_found_damaged_is_dropped_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1, 2, 3)
    place = store._places[hash_of(2)]
    for _ in range(2):
        store._drop_extent(place)
    assert store.counts.damaged_blocks == 3 and len(store) == 0


def test_reading_and_storing_are_use_and_looking_is_none(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    store.close()
    (path,) = tmp_path.glob("*.kv")
    os.utime(path, ns=(10**18, 10**18))
    store.refresh()
    opened(tmp_path)
    folder_view.summaries(store.folder)
    assert path.stat().st_mtime_ns == 10**18
    get(store, 1)
    assert path.stat().st_mtime_ns > 10**18


@pytest.mark.parametrize("num_blocks", [1, 2, 170, 171])
def test_host_blocks_lie_in_their_file_as_it_is_documented(num_blocks: int) -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    host = SharedHost(fd, num_blocks, 512)
    begin = -(-(4096 + 24 * num_blocks) // 4096) * 4096
    assert os.fstat(fd).st_size == begin + 512 * num_blocks and len(host.memory) == 512 * num_blocks
    assert os.pread(fd, 24, 0) == b"DPTYHOST" + struct.pack("<QQ", num_blocks, 512)
    last = num_blocks - 1
    with host.writing((last,)):
        host.memory.numpy()[512 * last :] = 7
        (generation,) = struct.unpack("<Q", os.pread(fd, 8, 4096 + 8 * last))
        assert generation % 2 == 1
    host.publish([b"n" * 16], [last])
    assert os.pread(fd, 16, 4096 + 8 * num_blocks + 16 * last) == b"n" * 16
    assert os.pread(fd, 512, begin + 512 * last) == b"\7" * 512
    (after,) = struct.unpack("<Q", os.pread(fd, 8, 4096 + 8 * last))
    assert after % 2 == 0 and after > generation
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK) == (
        fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
    )
    os.close(fd)


def test_names_are_compared_whole_also_where_their_halves_are_alike() -> None:
    rng = random.Random(0)
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    host = SharedHost(fd, 40, 64)
    peer = PeerHost.open(fd, 64)
    assert peer is not None
    halves = [rng.randbytes(8) for _ in range(5)]
    names = [first + second for first in halves for second in halves]
    for _ in range(30):
        shared = rng.sample(names, rng.randint(0, 20))
        blocks = rng.sample(range(40), len(shared))
        with host.writing(range(40)):
            pass
        host.publish(shared, blocks)
        asked = rng.sample(names, rng.randint(1, 25))
        places = dict(zip(shared, blocks, strict=True))
        assert peer.find(asked) == [places.get(name, -1) for name in asked]
    del peer
    os.close(fd)


def test_a_foreign_file_is_not_read() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    for size in (0, 1, 4095):
        os.ftruncate(fd, size)
        assert PeerHost.open(fd, 512) is None
    os.ftruncate(fd, 8192 + 512)
    good = struct.pack("<8sQQ", b"DPTYHOST", 1, 512)
    for head in (bytes(24), b"x" + good[1:], struct.pack("<8sQQ", b"DPTYHOST", 2, 512)):
        os.pwrite(fd, head, 0)
        assert PeerHost.open(fd, 512) is None
    os.pwrite(fd, good, 0)
    assert PeerHost.open(fd, 511) is None and PeerHost.open(fd, 512) is not None
    os.pwrite(fd, struct.pack("<8sQQ", b"DPTYHOST", 1, 256), 0)
    with pytest.raises(ConfigError, match="laid out for others"):
        SharedHost(fd, 1, 512)
    os.close(fd)


# -- who is asked -----------------------------------------------------------------------------------------------------

ACTIONS: list[TierAction] = [
    StoreBlocks(1, (hash_of(1),), (0,)),
    LoadBlocks(1, (hash_of(1),), (0,)),
    LoadBlocks(1, (hash_of(1),), (0,), peer=3),
    ShareBlocks((hash_of(1),), (0,)),
    CancelLoad(1),
]


@pytest.mark.parametrize("has_disk", [True, False])
@pytest.mark.parametrize("has_peers", [True, False])
def test_the_disk_and_the_peers_get_what_is_theirs_and_a_cancel_goes_to_both(has_disk: bool, has_peers: bool) -> None:
    got: dict[str, list[TierAction]] = {"disk": [], "peers": []}
    closed: list[str] = []
    parts: dict[str, Any] = {
        name: SimpleNamespace(act=actions.append, close=lambda name=name: closed.append(name))
        for name, actions in got.items()
    }
    events = TierEvents()
    driver = TierDriver(events, parts["disk"] if has_disk else None, parts["peers"] if has_peers else None)
    for action in ACTIONS:
        driver.act(action)
    store, load, read, share, cancel = ACTIONS
    assert isinstance(load, LoadBlocks) and load.peer == NO_PEER
    assert got["disk"] == ([store, load, cancel] if has_disk else [])
    assert got["peers"] == ([read, share, cancel] if has_peers else [])
    assert driver.fileno() == events.fileno()
    fd = driver.fileno()
    driver.close()
    assert closed == ["peers"] * has_peers + ["disk"] * has_disk
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_disk_that_is_off_is_asked_for_nothing_and_still_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, asked = opened(tmp_path), list[str]()

    def fail(name: str) -> Callable[..., int]:
        def ask(*_: object) -> int:
            asked.append(name)
            raise OSError(errno.EIO, "input/output error")

        return ask

    for name in ("load", "store"):
        monkeypatch.setattr(store, name, fail(name))
    mover = moving(store, Host(1))
    for number in range(6):
        mover.act(LoadBlocks(number, (hash_of(1),), (0,)) if number % 2 else StoreBlocks(number, (hash_of(1),), (0,)))
        wait_for(mover, RunLoaded if number % 2 else RunStored)
    assert asked == ["store", "load", "store"]
    mover.close()


def test_a_disk_that_is_full_is_left_alone_for_30_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [1000.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    store = opened(tmp_path)

    def full(*_: object) -> int:
        asked.append(now[0])
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(store, "store", full)
    events = TierEvents()
    mover = TierMover(store, Host(1), events=events)
    for time_s in (1000.0, 1000.5, 1001.9):  # the writer waits 2 s for an action before it looks at the folder
        now[0] = time_s
        assert mover._store(StoreBlocks(1, (hash_of(1),), (0,))) == 0
    now[0] = 1029.9
    mover._store(StoreBlocks(1, (hash_of(1),), (0,)))
    now[0] = 1030.0
    mover._store(StoreBlocks(1, (hash_of(1),), (0,)))
    assert asked == [1000.0, 1030.0]
    assert mover._is_on
    mover.close()
    events.close()


def test_a_folder_is_looked_at_every_two_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, looked = [1000.0], list[float]()
    store = opened(tmp_path)
    monkeypatch.setattr(TierMover, "_write_loop", lambda self: None)  # the test is the writer
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(store, "refresh", lambda: looked.append(now[0]))
    events = TierEvents()
    mover = TierMover(store, Host(1), events=events)
    for time_s in (1001.9, 1002.0, 1002.1, 1003.9, 1004.0, 1010.0, 1011.9):
        now[0] = time_s
        mover._refresh()
    assert looked == [1002.0, 1004.0, 1010.0]
    mover.close()
    events.close()


def test_a_failing_look_counts_among_the_failures_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    monkeypatch.setattr(TierMover, "_write_loop", lambda self: None)
    events = TierEvents()
    mover = TierMover(store, Host(1), events=events)
    for _ in range(3):
        mover._failed("reading", OSError(errno.EIO, "input/output error"))
    mover._failed("reading", OSError(errno.EIO, "input/output error"))
    states = [event for event in events.poll() if isinstance(event, DiskState)]
    assert [state.is_on for state in states] == [False]
    assert states[0].message.startswith("reading failed 3 times in a row, the last time with: ")
    mover.close()
    events.close()


def test_threads_end_with_their_process_and_the_writer_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nice: list[tuple[str, int]] = []
    monkeypatch.setattr(
        tier_io, "lower_priority", lambda niceness: nice.append((threading.current_thread().name, niceness))
    )
    mover = moving(opened(tmp_path), Host(1))
    peers = Pair(1)
    assert mover.disk is not None
    threads = [*mover.disk._threads, peers.reader._thread]
    assert [(thread.name, thread.daemon) for thread in threads] == [
        ("tier-reader", True), ("tier-writer", True), ("peer-reader", True),
    ]  # fmt: skip
    mover.close()
    peers.close()
    assert nice == [("tier-writer", 10)] and not any(thread.is_alive() for thread in threads)


def test_a_thread_that_ends_by_a_defect_is_an_error_of_who_polls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    monkeypatch.setattr(store, "load", lambda *_: 1 // 0)
    mover = moving(store, Host(1))
    mover.act(LoadBlocks(1, (hash_of(1),), (0,)))
    mover.wait(10.0)
    for _ in range(2):
        with pytest.raises(WorkerError, match="division"):
            mover.poll()
    mover.close()


def test_the_end_of_a_disk_is_no_defect_and_what_was_taken_wakes_nobody(tmp_path: Path) -> None:
    events = TierEvents()
    mover = TierMover(opened(tmp_path), Host(1), events=events)
    mover.act(StoreBlocks(1, (hash_of(1),), (0,)))
    mover.close()
    assert select.select([events], [], [], 10)[0]
    assert RunStored(1, 1) in events.poll()
    assert not select.select([events], [], [], 0)[0] and events.poll() == []
    events.close()


def test_a_segment_that_was_deleted_while_it_was_opened_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole_open = tmp_path / "x.kv", os.open
    path.write_bytes(b"x")

    def then_deleted(name: Path, flags: int) -> int:
        fd = whole_open(name, flags)
        os.unlink(name)
        return fd

    monkeypatch.setattr(os, "open", then_deleted)
    with reading(path) as fd:
        assert fd is None


class Pair:
    """A worker that reads the host memory of another one, 512 bytes a block."""

    def __init__(self, num_blocks: int) -> None:
        self.fds = [os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for _ in range(2)]
        self.own, self.other = (SharedHost(fd, num_blocks, 512) for fd in self.fds)
        memory = memoryview(self.own.memory.numpy())
        self.events = TierEvents()
        target = lambda block: memory[block * 512 :][:512]  # noqa: E731
        self.reader = PeerReader(self.own, {1: self.fds[1]}, b"f", target, self.events)
        self.driver = TierDriver(self.events, None, self.reader)

    def share(self, *blocks: int) -> None:
        for block in blocks:
            with self.other.writing((block,)):
                self.other.memory.numpy()[block * 512 : (block + 1) * 512] = block + 1
        self.other.publish(self.reader._names([hash_of(block) for block in blocks]), blocks)

    def load(self, *blocks: int, peer: int = 1) -> int:
        action = LoadBlocks(5, tuple(map(hash_of, blocks)), tuple(range(len(blocks))), peer=peer)
        self.driver.act(action)
        (event,) = wait_for(self.driver, RunLoaded)
        assert isinstance(event, RunLoaded) and event.load_id == 5 and event.duration_ns >= 0
        return event.num_blocks

    def close(self) -> None:
        self.driver.close()
        del self.own, self.other, self.reader, self.driver
        for fd in self.fds:
            os.close(fd)


@pytest.mark.parametrize("ends", ["cancelled", "closed", "not"])
def test_a_load_from_a_peer_ends_at_the_next_block_when_it_is_cancelled(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(4)
    pair.share(0, 1, 2, 3)
    copy, copied = PeerHost.copy, list[int]()

    def then_end(self: PeerHost, block: int, name: bytes, target: memoryview) -> bool:
        copied.append(block)
        if len(copied) == 2 and ends == "cancelled":
            pair.driver.act(CancelLoad(4))  # another load
            pair.driver.act(CancelLoad(5))
        if len(copied) == 2 and ends == "closed":
            pair.reader._is_closed = True
        return copy(self, block, name, target)

    monkeypatch.setattr(PeerHost, "copy", then_end)
    assert pair.load(0, 1, 2, 3) == len(copied) == (4 if ends == "not" else 2)
    if ends == "cancelled":  # which is over: the next load of this number is another one
        copied.clear()
        monkeypatch.setattr(PeerHost, "copy", copy)
        pair.driver.act(CancelLoad(5))
        assert pair.load(0, 1, 2, 3) == 4
    pair.close()


def test_a_load_from_a_peer_that_is_under_way_is_cut_short_by_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, copy, has_begun = Pair(3), PeerHost.copy, threading.Event()
    pair.share(0, 1, 2)

    def slow(self: PeerHost, block: int, name: bytes, target: memoryview) -> bool:
        has_begun.set()
        while pair.reader._loads.empty():  # until it is told to end
            time.sleep(0.001)
        return copy(self, block, name, target)

    monkeypatch.setattr(PeerHost, "copy", slow)
    pair.driver.act(LoadBlocks(5, tuple(map(hash_of, range(3))), (0, 1, 2), peer=1))
    assert has_begun.wait(10)
    pair.reader.close()
    [event] = pair.events.poll()
    assert isinstance(event, RunLoaded) and event.num_blocks == 1
    pair.close()


def test_a_load_from_the_disk_that_was_cancelled_leaves_the_next_one_of_its_number_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    put(store, 1, 2)
    load: Callable[..., int] = store.load
    mover = moving(store, Host(2))

    def cancelled(hashes: Any, buffers: Any, is_cancelled: Callable[[], bool]) -> int:
        assert not is_cancelled()
        mover.act(CancelLoad(7))
        assert is_cancelled()
        return load(hashes, buffers, is_cancelled)

    for is_cancelled in (True, False):
        monkeypatch.setattr(store, "load", cancelled if is_cancelled else load)
        mover.act(CancelLoad(7))  # nothing of that number is pending
        mover.act(LoadBlocks(7, (hash_of(1), hash_of(2)), (0, 1)))
        (event,) = (event for event in wait_for(mover, RunLoaded) if isinstance(event, RunLoaded))
        assert (event.load_id, event.num_blocks) == (7, 0 if is_cancelled else 2)
    mover.close()


def test_the_memory_of_a_peer_is_mapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, open_peer, opened_fds = Pair(2), PeerHost.open, list[int]()
    pair.share(0, 1)

    def noted(fd: int, block_bytes: int) -> PeerHost | None:
        opened_fds.append(fd)
        return open_peer(fd, block_bytes) if len(opened_fds) > 1 else None  # its owner has not made it yet

    monkeypatch.setattr(PeerHost, "open", noted)
    assert [pair.load(0), pair.load(0), pair.load(1)] == [0, 1, 1]
    assert opened_fds == [pair.fds[1]] * 2
    pair.close()


def test_what_a_worker_without_files_of_others_reads_is_a_miss() -> None:
    pair = Pair(2)
    pair.share(0)
    assert pair.load(0, peer=2) == 0 and pair.load(0) == 1
    assert pair.reader._names([hash_of(1)]) != pair.reader._names([hash_of(2)])
    names = pair.reader._names([hash_of(1)])
    pair.reader._digest = b"g"
    assert pair.reader._names([hash_of(1)]) != names  # another format
    pair.close()


# -- how long, and in which order -------------------------------------------------------------------------------------


def test_a_folder_that_another_process_keeps_is_waited_for_five_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SegmentFolder(tmp_path, CAP)
    with folder.locked():
        pass
    held = os.open(tmp_path / "folder.lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda _: now.append(now.pop() + 1.0))
    before = descriptors()
    with pytest.raises(OSError, match="locked by another process") as caught, folder.locked():
        pass
    assert caught.value.errno == errno.EAGAIN and now == [106.0]
    assert descriptors() == before
    now[0] = 100.0

    def released(_: float) -> None:
        now[0] += 1.0
        if now[0] == 105.0:
            fcntl.flock(held, fcntl.LOCK_UN)

    monkeypatch.setattr("time.sleep", released)
    with folder.locked():
        assert now[0] == 105.0
        assert not tier_try_lock(tmp_path / "folder.lock")
    assert tier_try_lock(tmp_path / "folder.lock")
    os.close(held)


def tier_try_lock(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_synced_before_write_returns(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 16))
    if not direct:
        refuse_direct_files(monkeypatch)
    with path.open("r+b", buffering=0) as raw:
        file, calls = UncachedFile(path, raw.fileno()), list[str]()
        if file.is_direct != direct:
            pytest.skip("this file system has no direct input and output")
        for name in ("pwrite", "fdatasync", "posix_fadvise"):
            call = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *a, call=call, name=name: (calls.append(name), call(*a))[1])
        file.write([memoryview(b"x" * 5000), memoryview(b"y" * 5000)], 4096)
        assert calls[-1 - (not direct) :] == ["fdatasync"] + ["posix_fadvise"] * (not direct)
        assert set(calls[: calls.index("fdatasync")]) == {"pwrite"}
        assert file.is_direct == direct  # the file system has refused nothing
        file.close()
        file.close()  # idempotent
        assert not file.is_direct


def test_weights_are_digested_again_only_when_a_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept = tmp_path / "w", tmp_path / "weights.json"
    path.write_bytes(b"x" * 100)
    digest = weights_digest.weights_digest([path], tmp_path)
    assert kept.stat().st_mode & 0o777 == 0o600
    os.utime(kept, ns=(5, 10**18))
    assert weights_digest.weights_digest([path], tmp_path) == digest
    assert kept.stat().st_mtime_ns == 10**18  # nothing new to keep
    path.write_bytes(b"y" * 100)
    assert weights_digest.weights_digest([path], tmp_path) != digest
    assert kept.stat().st_mtime_ns != 10**18
    kept.unlink()
    kept.mkdir()  # where nothing can be kept, the digest is the same
    path.write_bytes(b"x" * 100)
    assert weights_digest.weights_digest([path], tmp_path) == digest
    assert sorted(found.name for found in tmp_path.iterdir()) == ["w", "weights.json"]
    whole = weights_digest._digest(path)
    monkeypatch.setattr(weights_digest, "CHUNK_BYTES", 7)
    assert weights_digest._digest(path) == whole


def test_64_digests_are_kept(tmp_path: Path) -> None:
    for number in range(66):
        other = tmp_path / f"w{number}"
        other.write_bytes(bytes([number]))
        weights_digest.weights_digest([other], tmp_path)
    assert len(weights_digest._read(tmp_path / "weights.json")) == 64
