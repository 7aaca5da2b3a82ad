"""The disk tier's store: what is written is found again, by anybody, and what is damaged never."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import pytest

from diptych.control.engine.kvcache.tier_records import (
    CancelLoad,
    DiskContents,
    DiskState,
    LoadBlocks,
    RunLoaded,
    RunStored,
    StoreBlocks,
    TierEvent,
)
from diptych.control.errors import ConfigError
from diptych.runtime.tiers import disk_store, extent_format, tier_io, uncached_file
from diptych.runtime.tiers.disk_store import DiskStore
from diptych.runtime.tiers.extent_format import PAGE_BYTES, extent_bytes, unpack_header
from diptych.runtime.tiers.tier_io import TierDriver, TierEvents, TierMover
from tests.runtime.test_uncached_file import refuse_direct_files

FORMAT = b"f" * 16
BLOCK = 3000  # bytes
CAP = 1 << 20


def hash_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def content(block_hash: bytes, size: int = BLOCK) -> bytes:
    return random.Random(block_hash).randbytes(size)


def opened(directory: Path, cap: int = CAP, digest: bytes = FORMAT) -> DiskStore:
    return DiskStore(directory, cap, digest, BLOCK)


def put(store: DiskStore, *numbers: int) -> int:
    hashes = [hash_of(number) for number in numbers]
    return store.store(hashes, [memoryview(content(block_hash)) for block_hash in hashes])


def get(store: DiskStore, *numbers: int) -> int:
    """How many are read; asserts that each is right."""
    hashes = [hash_of(number) for number in numbers]
    buffers = [bytearray(BLOCK) for _ in hashes]
    count = store.load(hashes, [memoryview(buffer) for buffer in buffers])
    for block_hash, buffer in zip(hashes[:count], buffers, strict=False):
        assert bytes(buffer) == content(block_hash)
    return count


def segment(directory: Path) -> Path:
    (path,) = directory.glob("*.kv")
    return path


def test_blocks_are_found_again_by_the_same_store_and_by_one_that_is_opened_later(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert put(store, *range(10)) == 10
    assert get(store, *range(12)) == 10
    store.close()
    later = opened(tmp_path)
    assert len(later) == 10
    assert get(later, *range(10)) == 10
    assert later.take_changes()[0] == tuple(hash_of(number) for number in range(10))


def test_a_closed_segment_takes_no_more_than_its_extents(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, *range(10))
    store.close()
    assert segment(tmp_path).stat().st_size == extent_bytes(10, BLOCK)


def test_what_is_there_already_is_not_written_twice(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1, 2, 3)
    assert put(store, 2, 3, 4) == 3
    assert store.counts.stored_blocks == 4


def test_formats_do_not_see_each_other(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    other = opened(tmp_path, digest=b"g" * 16)
    assert get(other, 1) == 0


def test_another_process_finds_what_was_stored_since_it_looked(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    put(first, 1, 2)
    assert get(second, 1) == 0
    second.refresh()
    assert get(second, 1, 2) == 2
    put(first, 3)
    second.refresh()
    assert get(second, 3) == 1


@pytest.mark.parametrize("offset", [0, 24, 45, 4090, PAGE_BYTES, PAGE_BYTES + BLOCK - 1, PAGE_BYTES + 2 * BLOCK + 7])
def test_a_flipped_bit_anywhere_is_a_miss(tmp_path: Path, offset: int) -> None:
    store = opened(tmp_path)
    put(store, 1, 2, 3)
    put(store, 4)
    store.close()
    with segment(tmp_path).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    later = opened(tmp_path)
    assert get(later, 1, 2, 3) == max(0, (offset - PAGE_BYTES) // BLOCK)
    assert get(later, 1, 2, 3) == 0  # the extent is dropped whole
    if offset >= PAGE_BYTES:
        assert later.counts.damaged_blocks == 3
        assert get(opened(tmp_path), 1) == 0  # and for everybody
        assert get(opened(tmp_path), 4) == 1


@pytest.mark.parametrize("size", [0, 100, PAGE_BYTES, PAGE_BYTES + 100, extent_bytes(3, BLOCK) - 1])
def test_a_truncated_segment_is_a_miss(tmp_path: Path, size: int) -> None:
    store = opened(tmp_path)
    put(store, 1, 2, 3)
    store.close()
    os.truncate(segment(tmp_path), size)
    assert get(opened(tmp_path), 1, 2, 3) == 0
    assert put(store, 4) == 1


def test_a_segment_that_is_truncated_or_deleted_under_an_open_store_is_a_miss(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1, 2, 3)
    reader = opened(tmp_path)
    os.truncate(segment(tmp_path), PAGE_BYTES + BLOCK)
    assert get(reader, 1, 2, 3) == 1
    segment(tmp_path).unlink()
    assert get(store, 1) == 0
    assert hash_of(1) not in store


@pytest.mark.parametrize("harm", [lambda path: os.truncate(path, PAGE_BYTES), Path.unlink])
def test_a_segment_that_lost_its_place_does_not_grow_over_what_others_took_since(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    store = opened(tmp_path)
    put(store, 1)
    path = segment(tmp_path)
    harm(path)
    size = path.stat().st_size if path.exists() else None
    assert put(store, 2) == 1
    assert get(store, 2) == 1
    assert (path.stat().st_size if path.exists() else None) == size
    for found in tmp_path.glob("*.kv"):
        harm(found)
    used = store.folder.used_bytes()
    store.close()
    assert store.folder.used_bytes() == used  # and is not extended at its end


def test_a_block_whose_write_did_not_reach_the_disk_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)

    def torn(fd: int, buffers: list[memoryview], offset: int) -> None:
        whole_write(fd, [buffer[: len(buffer) // 2] for buffer in buffers], offset)

    whole_write = uncached_file.write_fully
    monkeypatch.setattr(uncached_file, "write_fully", torn)
    assert put(store, 1) == 0
    assert store.counts.damaged_blocks == 1
    monkeypatch.undo()
    assert put(store, 1) == 1
    assert get(store, 1) == 1


def test_the_least_recently_used_segments_make_room_and_the_cap_holds(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for first in range(0, 2000, 40):
        put(store, *range(first, first + 40))
        if first:
            assert get(store, 0) == 1  # used again and again
        assert store.folder.used_bytes() <= CAP
        time.sleep(0.0005)  # two uses are told apart by their time
    assert store.counts.stored_blocks == 2000
    store.refresh()
    assert 100 < len(store) < CAP // BLOCK
    _, removed = store.take_changes()
    assert len(removed) > 1000
    assert get(store, 1999) == 1
    assert get(store, 0) == 1


def test_a_segment_of_another_version_of_the_format_is_a_miss_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(extent_format, "_MAGIC", b"DPTCHKV1")
        store = opened(tmp_path)
        put(store, 1, 2)
        store.close()
    old = segment(tmp_path)
    store = opened(tmp_path)
    assert get(store, 1) == 0
    assert not old.exists()
    assert put(store, 1) == 1


def test_two_stores_in_one_folder_keep_one_cap(tmp_path: Path) -> None:
    stores = [opened(tmp_path), opened(tmp_path, digest=b"g" * 16)]
    for number in range(0, 1600, 40):
        put(stores[number // 40 % 2], *range(number, number + 40))
        assert stores[0].folder.used_bytes() <= CAP


def test_what_is_deleted_for_a_new_segment_is_gone_from_the_index_at_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for first in range(0, 2000, 40):
        put(store, *range(first, first + 40))
        there = {path.name for path in tmp_path.glob("*.kv")}
        assert all(place.segment.path.name in there for place in store._places.values())


def test_a_file_system_without_direct_writes_keeps_blocks_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct_files(monkeypatch)
    store = opened(tmp_path)
    assert put(store, *range(10)) == 10
    assert get(store, *range(10)) == 10


def test_a_segment_that_is_read_is_not_deleted(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    store.close()
    with disk_store.reading(segment(tmp_path)) as fd, store.folder.locked():
        assert fd is not None
        assert not store.folder.delete(segment(tmp_path))
    with store.folder.locked():
        assert store.folder.delete(segment(tmp_path))


def test_a_cap_below_a_few_blocks_and_a_folder_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_disk_gb gives 9\.766 KiB; blocks of .* need at least"):
        opened(tmp_path, 10_000)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_disk is"):
        opened(tmp_path / "file" / "folder")


WRITER = """
import sys, random
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.runtime.test_disk_store import opened, put
store = opened(Path(sys.argv[1]))
print("ready", flush=True)
for number in range(10**9):
    put(store, 2 * number, 2 * number + 1)
"""


def test_a_process_that_is_killed_while_it_stores_leaves_nothing_wrong(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), root], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    store = opened(tmp_path)
    assert store.folder.used_bytes() <= CAP
    assert all(get(store, number) == 1 for number in range(10_000) if hash_of(number) in store)
    assert unpack_header(b"\0" * PAGE_BYTES) is None
    assert put(store, *range(20_000, 20_010)) == 10


# -- the threads ------------------------------------------------------------------------------------------------------


class Host:
    """Host blocks in plain memory."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [bytearray(BLOCK) for _ in range(num_blocks)]

    def __call__(self, block: int) -> memoryview:
        return memoryview(self.blocks[block])


def moving(store: DiskStore, host: Host) -> TierDriver:
    events = TierEvents()
    return TierDriver(events, TierMover(store, host, events=events), None)


def wait_for(mover: TierDriver, kind: type[TierEvent], timeout_s: float = 10.0) -> list[TierEvent]:
    """All events up to the first of this kind."""
    events: list[TierEvent] = []
    give_up = time.monotonic() + timeout_s
    while not any(isinstance(event, kind) for event in events):
        assert time.monotonic() < give_up, f"no {kind.__name__}"
        events += mover.poll()
        time.sleep(0.001)
    return events


def test_stores_and_loads_are_answered(tmp_path: Path) -> None:
    host = Host(8)
    mover = moving(opened(tmp_path), host)
    hashes = tuple(hash_of(number) for number in range(3))
    for block, block_hash in enumerate(hashes):
        host.blocks[block][:] = content(block_hash)
    mover.act(StoreBlocks(1, hashes, (0, 1, 2)))
    events = wait_for(mover, RunStored)
    assert DiskContents(added=hashes) in events and RunStored(1, 3) in events
    mover.act(LoadBlocks(1, (*hashes, hash_of(9)), (4, 5, 6, 7)))
    (loaded,) = wait_for(mover, RunLoaded)
    assert isinstance(loaded, RunLoaded) and loaded.num_blocks == 3
    assert [bytes(block) for block in host.blocks[4:7]] == [content(block_hash) for block_hash in hashes]
    mover.close()


def test_a_cancelled_load_is_answered(tmp_path: Path) -> None:
    mover = moving(opened(tmp_path), Host(4))
    mover.act(CancelLoad(1))
    mover.act(LoadBlocks(1, (hash_of(1),), (0,)))
    wait_for(mover, RunLoaded)
    mover.close()


def test_a_disk_that_fails_again_and_again_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    mover = moving(store, Host(4))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(store, "load", fail)
    for number in range(5):
        mover.act(LoadBlocks(number, (hash_of(1),), (0,)))
    events = wait_for(mover, DiskState)
    while sum(isinstance(event, RunLoaded) for event in events) < 5:
        events += wait_for(mover, RunLoaded)
    (state,) = (event for event in events if isinstance(event, DiskState))
    assert not state.is_on and "input/output error" in state.message
    mover.act(StoreBlocks(1, (hash_of(1),), (0,)))
    assert RunStored(1, 0) in wait_for(mover, RunStored)
    mover.close()


def test_a_full_disk_is_asked_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, is_full = opened(tmp_path), True
    allocate = os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "no space left on device")
        allocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(tier_io, "FULL_REST_S", 0.05)
    mover = moving(store, Host(4))
    for number in range(6):
        mover.act(StoreBlocks(number, (hash_of(1),), (0,)))
        assert RunStored(number, 0) in wait_for(mover, RunStored)
    assert store.folder.used_bytes() < PAGE_BYTES * 2  # nothing is left over
    is_full = False
    time.sleep(0.06)
    mover.act(StoreBlocks(9, (hash_of(1),), (0,)))
    assert RunStored(9, 1) in wait_for(mover, RunStored)
    mover.close()


def test_room_is_kept_for_what_the_file_system_needs_for_its_own_map(tmp_path: Path) -> None:
    """A segment may take more than it was allocated with, when what was allocated is written piece by piece."""
    store = opened(tmp_path)
    for first in range(0, 2000, 40):
        put(store, *range(first, first + 40))
        kept = [path.stat().st_size for path in tmp_path.glob("*.kv")]
        assert store.folder.used_bytes() + len(kept) * 4096 + sum(kept) // 256 <= CAP
    assert len(kept) >= disk_store.MIN_SEGMENTS - 1


@pytest.mark.parametrize("block_bytes", [100, 3000, 1_500_000])
def test_the_least_cap_is_room_enough_for_segments_of_one_block(tmp_path: Path, block_bytes: int) -> None:
    least = disk_store.least_bytes(block_bytes)
    store = DiskStore(tmp_path, least, FORMAT, block_bytes)
    hashes = [hash_of(number) for number in range(8)]
    assert [store.store([block], [memoryview(content(block, block_bytes))]) for block in hashes] == [1] * 8
    assert store.folder.used_bytes() <= least
    with pytest.raises(ConfigError, match="need at least"):
        DiskStore(tmp_path, least - 1, FORMAT, block_bytes)
