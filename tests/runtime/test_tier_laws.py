"""Laws of the disk tier: a store is a dictionary that forgets, what people see of its folder is what is in it, and no
event of its threads says more than has happened."""

import errno
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from diptych.control.engine.kvcache.tier_records import (
    DiskContents,
    DiskState,
    LoadBlocks,
    RunLoaded,
    RunStored,
    ShareBlocks,
    StoreBlocks,
    TierEvent,
)
from diptych.runtime.tiers import folder_view, tier_io
from diptych.runtime.tiers.disk_store import DROPPED, DiskStore
from diptych.runtime.tiers.extent_format import PAGE_BYTES, ExtentHeader, extent_bytes, unpack_header
from diptych.runtime.tiers.segment_folder import SegmentFolder, bound_bytes, reading
from diptych.runtime.tiers.shared_host import PeerHost, SharedHost
from diptych.runtime.tiers.tier_io import PeerReader, TierDriver, TierEvents, TierMover
from diptych.runtime.tiers.weights_digest import weights_digest
from tests.runtime.test_disk_store import BLOCK, CAP, FORMAT, Host, content, get, hash_of, moving, opened, put, wait_for


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def prefix(known: set[int], numbers: list[int]) -> int:
    """How many of the first are known."""
    return next((at for at, number in enumerate(numbers) if number not in known), len(numbers))


@pytest.mark.parametrize("seed", range(6))
def test_a_store_is_a_dictionary_that_forgets_only_what_was_damaged(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    stores = [opened(tmp_path, 4 * CAP) for _ in range(2)]
    there: set[int] = set()  # on disk and sound
    known: list[set[int]] = [set(), set()]  # what each store has in its index
    reported: list[set[bytes]] = [set(), set()]
    for _ in range(60):
        at, first = rng.randrange(2), rng.randrange(60)
        numbers = list(range(first, first + rng.randint(1, 8)))
        match rng.choice(["put", "put", "get", "refresh", "reopen"]):
            case "put":
                assert put(stores[at], *numbers) == len(numbers)
                there |= set(numbers)
                known[at] |= set(numbers)
            case "get":
                assert get(stores[at], *numbers) == prefix(known[at], numbers)
            case "refresh":
                stores[at].refresh()
                known[at] |= there
            case "reopen":
                stores[at].close()
                stores[at] = opened(tmp_path, 4 * CAP)
                reported[at].clear()
                known[at] = set(there)
        found = {number for number in range(70) if hash_of(number) in stores[at]}
        assert known[at] <= found <= there  # a new segment is a reason to look what others have
        known[at] = found
        added, removed = stores[at].take_changes()
        reported[at] = reported[at] - set(removed) | set(added)
        assert reported[at] == {hash_of(number) for number in found}
        assert len(stores[at]) == len(found)
    for store in stores:
        store.close()
    assert sum(summary.num_blocks for summary in folder_view.summaries(stores[0].folder)) >= len(there)


@pytest.mark.parametrize("damaged", range(5))
def test_a_load_ends_before_the_first_damaged_block_and_the_next_one_begins_behind_it(
    damaged: int, tmp_path: Path
) -> None:
    store = opened(tmp_path)
    for number in range(5):
        put(store, number)  # an extent each
    store.close()
    (path,) = tmp_path.glob("*.kv")
    store = opened(tmp_path)
    flip(path, damaged * extent_bytes(1, BLOCK) + PAGE_BYTES + 5)
    store.take_changes()
    assert get(store, *range(5)) == damaged
    assert store.counts.loaded_blocks == damaged and store.counts.damaged_blocks == 1
    assert store.take_changes() == ((), (hash_of(damaged),))
    assert get(store, *range(damaged + 1, 5)) == 4 - damaged
    assert put(store, damaged) == 1 and get(store, *range(5)) == 5  # and may be stored again


@pytest.mark.parametrize("other", [{"digest": b"g" * 16}, {"block_bytes": BLOCK + 1}])
def test_a_segment_under_a_wrong_name_is_none_of_its_format(other: dict[str, object], tmp_path: Path) -> None:
    fields = {"digest": FORMAT, "block_bytes": BLOCK} | other
    foreign = DiskStore(tmp_path / "other", CAP, **fields)  # type: ignore[arg-type]
    size = int(fields["block_bytes"])  # type: ignore[call-overload]
    foreign.store([hash_of(1)], [memoryview(content(hash_of(1), size))])
    foreign.close()
    (path,) = (tmp_path / "other").glob("*.kv")
    (tmp_path / "own").mkdir()
    path.rename(tmp_path / "own" / f"{FORMAT.hex()}-{path.name.partition('-')[2]}")
    store = opened(tmp_path / "own")
    assert hash_of(1) not in store and get(store, 1) == 0 and put(store, 1) == 1


def test_cancelling_ends_a_load_where_it_is(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, *range(8))
    for most in range(9):
        asked = iter(range(most + 1))
        hashes = [hash_of(number) for number in range(8)]
        buffers = [memoryview(bytearray(BLOCK)) for _ in hashes]
        # asked once before the run, and once before each block
        count = store.load(hashes, buffers, lambda asked=asked: next(asked, None) is None)
        assert count == min(max(0, most), 8)


def test_an_extent_is_its_header_and_whole_pages() -> None:
    for count in (1, 2, 63, 64):
        for size in (1, 100, 4095, 4096, 4097, 10_000):
            whole = extent_bytes(count, size)
            assert whole % PAGE_BYTES == 0 and 0 <= whole - PAGE_BYTES - count * size < PAGE_BYTES
            entries = tuple((hash_of(number), hash_of(-number % 97)) for number in range(count))
            header = ExtentHeader(FORMAT, size, entries)
            page = header.pack()
            assert len(page) == PAGE_BYTES and unpack_header(page) == header and header.num_bytes == whole
            assert unpack_header(page[:-1]) is None and unpack_header(page + b"\0") is None
            at = random.Random(count * size).randrange(PAGE_BYTES)
            assert unpack_header(page[:at] + bytes([page[at] ^ 16]) + page[at + 1 :]) is None


# -- what people see --------------------------------------------------------------------------------------------------


def filled(folder: Path) -> DiskStore:
    """Three extents of 4, 2 and 3 blocks in a closed segment."""
    store = DiskStore(folder, CAP, FORMAT, BLOCK, {"block_size": 16, "name": "m"})
    put(store, 1, 2, 3, 4)
    put(store, 5, 6)
    put(store, 7, 8, 9)
    store.close()
    return store


def test_a_folder_is_summed_up_by_format_the_largest_first(tmp_path: Path) -> None:
    filled(tmp_path)
    (first,) = tmp_path.glob("*.kv")
    small = DiskStore(tmp_path, CAP, b"g" * 16, BLOCK)
    put(small, 1)
    small.close()
    os.utime(first, ns=(5, 5_000_000_000))
    folder = SegmentFolder(tmp_path, CAP)
    large, other = folder_view.summaries(folder)
    assert (large.format, other.format) == (FORMAT.hex(), (b"g" * 16).hex())
    assert (large.num_segments, large.num_extents, large.num_blocks, large.num_tokens) == (1, 3, 9, 144)
    assert (other.num_segments, other.num_extents, other.num_blocks, other.num_tokens) == (1, 1, 1, 0)
    assert large.used_ns == 5_000_000_000 < other.used_ns
    assert large.num_bytes + other.num_bytes == sum(segment.num_bytes for segment in folder.segments())
    assert large.description["name"] == "m"
    again = filled(tmp_path)  # a second segment of the format would be made only for what is not there
    assert len(again) == 9
    odd = folder_view.FormatSummary("x", {"block_size": "16"}, num_blocks=3)
    assert odd.num_tokens == 0


@pytest.mark.parametrize("harmed", [(), (0,), (1,), (0, 2), (0, 1, 2)], ids=str)
def test_a_verification_counts_each_damaged_block_drops_its_extent_and_leaves_the_rest(
    harmed: tuple[int, ...], tmp_path: Path
) -> None:
    filled(tmp_path)
    folder = SegmentFolder(tmp_path, CAP)
    (path,) = tmp_path.glob("*.kv")
    starts = [0, extent_bytes(4, BLOCK), extent_bytes(4, BLOCK) + extent_bytes(2, BLOCK)]
    extents = [(1, 2, 3, 4), (5, 6), (7, 8, 9)]
    for at in harmed:
        flip(path, starts[at] + PAGE_BYTES + BLOCK + 3)  # its second block
    os.utime(path, ns=(7, 7_000_000_000))
    (segment,) = folder.segments()
    found = folder_view.verify(folder, segment)
    assert (found.num_blocks, found.num_damaged, found.num_unreadable_bytes) == (9, len(harmed), 0)
    assert path.stat().st_mtime_ns == 7_000_000_000  # to look is no use
    store = opened(tmp_path)
    assert [get(store, *numbers) for numbers in extents] == [
        0 if at in harmed else len(numbers) for at, numbers in enumerate(extents)
    ]
    (segment,) = folder.segments()
    again = folder_view.verify(folder, segment)
    left = 9 - sum(len(extents[at]) for at in harmed)
    assert (again.num_blocks, again.num_damaged) == (left, 0)
    assert folder_view.summaries(folder)[0].num_blocks == left
    hashes = [block_hash for _, _, header in folder_view.extents(path) for block_hash, _ in header.entries]
    assert hashes.count(DROPPED) == 9 - left


def test_what_is_behind_the_last_whole_header_is_counted_and_zeros_are_not(tmp_path: Path) -> None:
    filled(tmp_path)
    folder = SegmentFolder(tmp_path, CAP)
    (path,) = tmp_path.glob("*.kv")
    size = path.stat().st_size
    for tail, unreadable in ((bytes(3 << 20), 0), (b"\1" + bytes(99), 100), (bytes(2 << 20) + b"x" * 5, 5)):
        with path.open("ab") as file:
            file.write(tail)
        (segment,) = folder.segments()
        found = folder_view.verify(folder, segment)
        assert found.num_unreadable_bytes == unreadable
        assert found.num_blocks == 9 and found.num_damaged == 0
        os.truncate(path, size)
    os.truncate(path, size - 1)  # the last extent is not whole
    (segment,) = folder.segments()
    found = folder_view.verify(folder, segment)
    assert found.num_blocks == 6 and found.num_unreadable_bytes == extent_bytes(3, BLOCK) - 1
    path.unlink()
    assert folder_view.verify(folder, segment) == folder_view.Verification(0, 0, 0)


def test_clearing_frees_what_nobody_uses_of_one_format_or_of_all(tmp_path: Path) -> None:
    filled(tmp_path)
    (path,) = tmp_path.glob("*.kv")
    other = DiskStore(tmp_path, CAP, b"g" * 16, BLOCK)
    put(other, 1)  # it appends to its segment
    folder = SegmentFolder(tmp_path, CAP)
    with reading(path):
        assert folder_view.clear(folder, FORMAT.hex()) == (0, 1)
    taken = max(path.stat().st_size, path.stat().st_blocks * 512)
    assert folder_view.clear(folder, FORMAT.hex()) == (taken, 0)
    assert folder_view.clear(folder) == (0, 1)
    other.close()
    freed, num_in_use = folder_view.clear(folder)
    assert freed > 0 and num_in_use == 0 and folder.segments() == []
    assert not list(tmp_path.glob("*-*.lock"))


def test_locks_without_a_segment_go_and_the_folder_never_exceeds_its_cap(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path, CAP)
    (tmp_path / "ab-1.lock").touch()
    folder.trim()
    assert [path.name for path in tmp_path.glob("*.lock")] == ["folder.lock"]
    with pytest.raises(OSError) as caught:
        folder.make("ab", CAP)
    assert caught.value.errno == errno.ENOSPC
    made = [folder.make("ab", CAP // 5) for _ in range(3)]
    assert len({path for path, _, _ in made}) == 3
    with pytest.raises(OSError):  # none can be deleted: all are in use
        folder.make("ab", CAP // 2)
    for _, file, lock in made:
        os.close(file)
        os.close(lock)
    oldest = min((path for path, _, _ in made), key=lambda path: path.stat().st_mtime_ns)
    path, file, lock = folder.make("ab", CAP // 2)
    os.close(file)
    os.close(lock)
    assert not oldest.exists() and path.exists()
    assert folder.used_bytes() <= CAP
    assert [bound_bytes(size) - size for size in (0, 1, 1 << 20)] == sorted(
        bound_bytes(size) - size for size in (0, 1, 1 << 20)
    )


# -- the threads ------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_switched_off_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_io, "REFRESH_S", 0.0)
    store = opened(tmp_path)
    asked: list[str] = []

    def fail(*_: object) -> int:
        asked.append("refresh")
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(store, "refresh", fail)
    mover = moving(store, Host(2))
    states = [event for event in wait_for(mover, DiskState) if isinstance(event, DiskState)]
    assert [state.is_on for state in states] == [False] and "3 times in a row" in states[0].message
    mover.act(StoreBlocks(1, (hash_of(1),), (0,)))
    mover.act(LoadBlocks(2, (hash_of(1),), (0,)))
    wait_for(mover, RunLoaded)
    time.sleep(0.05)  # the writer turns all the time
    assert len(asked) == tier_io.MAX_FAILURES and not [e for e in mover.poll() if isinstance(e, DiskState)]
    mover.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ESTALE])
def test_a_disk_that_does_not_write_is_switched_off_and_one_that_is_full_is_not(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, is_off in ((code, True), (errno.ENOSPC, False), (errno.EDQUOT, False)):
        store = opened(tmp_path / str(error))

        def fail(*_: object, error: int = error) -> int:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(store, "store", fail)
        monkeypatch.setattr(tier_io, "FULL_REST_S", 0.0)
        mover = moving(store, Host(1))
        events: list[TierEvent] = []
        for number in range(tier_io.MAX_FAILURES):
            mover.act(StoreBlocks(number, (hash_of(1),), (0,)))
            events += wait_for(mover, RunStored)
        mover.close()
        assert any(isinstance(event, DiskState) for event in events) == is_off


def test_a_failure_that_passes_switches_nothing_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    put(store, 1)
    load: Callable[..., int] = store.load
    outcomes = iter([False, False, True, False, False, True])

    def sometimes(*arguments: object) -> int:
        if next(outcomes):
            return load(*arguments)
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(store, "load", sometimes)
    mover = moving(store, Host(2))
    events: list[TierEvent] = []
    for number in range(6):
        mover.act(LoadBlocks(number, (hash_of(1),), (0,)))
        events += wait_for(mover, RunLoaded)
    assert not [event for event in events if isinstance(event, DiskState)]
    assert [event.num_blocks for event in events if isinstance(event, RunLoaded)] == [0, 0, 1, 0, 0, 1]
    mover.close()


def test_what_others_store_is_reported_and_where_they_delete_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_io, "REFRESH_S", 0.005)
    other = opened(tmp_path)
    mover = moving(opened(tmp_path), Host(2))
    put(other, 1, 2)
    other.close()
    (event,) = [event for event in wait_for(mover, DiskContents) if isinstance(event, DiskContents)]
    assert event == DiskContents(added=(hash_of(1), hash_of(2)))
    assert mover.disk is not None
    folder_view.clear(other.folder)
    (event,) = [event for event in wait_for(mover, DiskContents) if isinstance(event, DiskContents)]
    assert event == DiskContents((), (hash_of(1), hash_of(2)))
    while mover.disk.used_bytes > PAGE_BYTES:
        time.sleep(0.001)
    mover.close()


# -- peers ------------------------------------------------------------------------------------------------------------

SIZE = 512


class Peers:
    """A worker that reads the host memory of another one, whose blocks hold their number."""

    def __init__(self, num_own: int, num_peer: int = 8) -> None:
        self.fds = [os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for _ in range(2)]
        self.own, self.other = SharedHost(self.fds[0], num_own, SIZE), SharedHost(self.fds[1], num_peer, SIZE)
        self.events = TierEvents()
        memory = self.own.memory.numpy()
        self.reader = PeerReader(
            self.own, {1: self.fds[1]}, b"f", lambda block: memoryview(memory)[block * SIZE :][:SIZE], self.events
        )
        self.driver = TierDriver(self.events, None, self.reader)
        for block in range(num_peer):
            with self.other.writing((block,)):
                self.other.memory.numpy()[block * SIZE : (block + 1) * SIZE] = block + 1

    def share(self, *blocks: int) -> None:
        """The other worker names these of its blocks."""
        self.other.publish(self.reader._names([hash_of(block) for block in blocks]), blocks)

    def load(self, *blocks: int) -> int:
        """Into own blocks 0 and on: how many are said to be there. What is there is right."""
        self.driver.act(LoadBlocks(1, tuple(hash_of(block) for block in blocks), tuple(range(len(blocks))), peer=1))
        (event,) = wait_for(self.driver, RunLoaded)
        assert isinstance(event, RunLoaded)
        for target, block in list(enumerate(blocks))[: event.num_blocks]:
            assert (self.own.memory.numpy()[target * SIZE : (target + 1) * SIZE] == block + 1).all()
        return event.num_blocks

    def close(self) -> None:
        self.driver.close()
        for fd in self.fds:
            os.close(fd)


def test_a_worker_with_one_host_block_reads_from_peers() -> None:
    peers = Peers(1)
    peers.share(3)
    assert peers.load(3) == 1
    peers.close()


@pytest.mark.parametrize("lost", range(4))
def test_a_load_from_a_peer_ends_before_the_block_that_was_overwritten(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = Peers(4)
    peers.share(0, 1, 2, 3)
    find = PeerHost.find

    def then_overwritten(self: PeerHost, names: list[bytes]) -> list[int]:
        found = find(self, names)
        with peers.other.writing((lost,)):
            pass
        return found

    monkeypatch.setattr(PeerHost, "find", then_overwritten)
    assert peers.load(0, 1, 2, 3) == lost
    peers.close()


def test_a_peer_is_read_up_to_the_first_block_that_it_does_not_have() -> None:
    peers = Peers(4)
    peers.share(5, 6, 2)
    assert [peers.load(5, 6, 7, 2), peers.load(7, 5), peers.load(2, 5, 6)] == [2, 0, 3]
    peers.driver.act(ShareBlocks((hash_of(9),), (0,)))  # own blocks are named under the same rule
    names = peers.reader._names([hash_of(9)])
    reader = PeerHost.open(peers.fds[0], SIZE)
    assert reader is not None and reader.find(names) == [0]
    assert PeerHost.open(peers.fds[0], SIZE + 1) is None
    del reader
    peers.close()


# -- weights ----------------------------------------------------------------------------------------------------------


def test_the_digest_of_weights_is_that_of_their_bytes_in_the_order_of_their_names(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    contents = {"x.bin": b"1" * 5000, "y.bin": b"2"}
    first = [tmp_path / "a" / name for name in contents]
    second = [tmp_path / "b" / name for name in contents]
    for path in (*first, *second):
        path.write_bytes(contents[path.name])
    digest = weights_digest(first, kept)
    assert weights_digest(first, kept) == digest == weights_digest(first[::-1], kept)
    assert weights_digest(second, kept) == digest  # wherever they lie
    second[0].write_bytes(b"2")
    second[1].write_bytes(b"1" * 5000)
    assert weights_digest(second, kept) != digest
    (kept / "weights.json").write_text("[]")
    assert weights_digest(first, kept) == digest
    (kept / "weights.json").write_text('{"a": 1}')
    assert weights_digest(first, kept) == digest
    assert not list(kept.glob("*.part"))


def test_bytes_are_read_once_and_only_so_many_digests_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.runtime.tiers import weights_digest as module

    path = tmp_path / "w"
    path.write_bytes(b"x" * 100)
    digest = weights_digest([path], tmp_path)
    monkeypatch.setattr(module, "_digest", lambda path: pytest.fail("read again"))
    assert weights_digest([path], tmp_path) == digest
    monkeypatch.undo()
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    for number in range(5):
        other = tmp_path / f"w{number}"
        other.write_bytes(bytes([number]))
        weights_digest([other], tmp_path)
    assert len(module._read(tmp_path / "weights.json")) == 3
    assert np.all([len(value) == 40 for value in module._read(tmp_path / "weights.json").values()])


def test_the_mover_of_a_store_says_how_much_the_folder_takes(tmp_path: Path) -> None:
    store = filled(tmp_path)
    events = TierEvents()
    mover = TierMover(opened(tmp_path), Host(1), events=events)
    assert mover.used_bytes == store.folder.used_bytes() > 9 * BLOCK
    driver = TierDriver(events, mover, None)
    (event,) = [event for event in driver.poll() if isinstance(event, DiskContents)]
    assert len(event.added) == 9
    driver.close()
