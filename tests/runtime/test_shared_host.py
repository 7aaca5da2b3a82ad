"""Host blocks that other workers read while their owner overwrites them: never a wrong byte, and a miss for everything
that cannot be read."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import pytest
import torch

from diptych.control.engine.kvcache.tier_records import CancelLoad, LoadBlocks, RunLoaded, ShareBlocks
from diptych.control.errors import ConfigError
from diptych.runtime.kv_cache.kv_tensors import KVTensors
from diptych.runtime.tiers.shared_host import PeerHost, SharedHost
from diptych.runtime.tiers.tier_io import PeerReader, TierDriver, TierEvents
from tests.runtime.test_kv_tensors import make_backend

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on linux only")

BLOCKS, BLOCK = 16, 20_000  # of more than one page, so that a copy takes a while
FORMAT = b"one format"

BIG, FEW, NAMES = 400_000, 6, 10  # so that most copies meet a writer

OWNER = """
import random, sys
from tests.runtime.test_shared_host import BIG, FEW, NAMES, content, name_of
from diptych.runtime.tiers.shared_host import SharedHost
fd, first = map(int, sys.argv[1:])
host, rng = SharedHost(fd, FEW, BIG), random.Random(first)
memory = host.memory.numpy()
contents = {name: content(name, BIG) for name in map(name_of, range(first, first + NAMES))}
number = 0
while True:
    block, name = rng.randrange(FEW), rng.choice(list(contents))
    with host.writing((block,)):
        memory[block * BIG : (block + 1) * BIG] = contents[name]
    host.publish([name], [block])
    number += 1
    if number == 50:
        print("ready", flush=True)
"""


def name_of(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "little"), digest_size=16).digest()


def content(name: bytes, num_bytes: int = BLOCK) -> np.ndarray:
    """What a block of this name holds: every byte of it depends on the name."""
    return np.resize(np.frombuffer(name, np.uint8), num_bytes)


@pytest.fixture
def fd() -> Iterator[int]:
    """An empty file as the front end makes it."""
    made = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield made
    os.close(made)


def write(host: SharedHost, block: int, name: bytes) -> None:
    with host.writing((block,)):
        host.memory.numpy()[block * BLOCK : (block + 1) * BLOCK] = content(name)
    host.publish([name], [block])


def read(peer: PeerHost, name: bytes, num_bytes: int = BLOCK) -> bytes | None:
    """The block of this name."""
    (block,) = peer.find([name])
    target = bytearray(num_bytes)
    return bytes(target) if block >= 0 and peer.copy(block, name, memoryview(target)) else None


def opened(fd: int) -> PeerHost:
    peer = PeerHost.open(fd, BLOCK)
    assert peer is not None
    return peer


def test_a_block_is_found_by_its_name_until_it_is_written_again(fd: int) -> None:
    host = SharedHost(fd, BLOCKS, BLOCK)
    peer = opened(fd)
    assert read(peer, name_of(1)) is None
    write(host, 3, name_of(1))
    write(host, 5, name_of(2))
    assert peer.find([name_of(2), name_of(9), name_of(1)]) == [5, -1, 3]
    assert read(peer, name_of(1)) == content(name_of(1)).tobytes()
    with host.writing((3,)):
        assert read(peer, name_of(1)) is None
        assert not peer.copy(3, name_of(1), memoryview(bytearray(BLOCK)))
        host.publish([name_of(7)], [3])  # it keeps its secret while it is written
    assert peer.find([name_of(1), name_of(7)]) == [-1, -1]
    assert read(peer, name_of(2)) is not None


def test_a_write_during_a_copy_makes_it_a_miss(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host = SharedHost(fd, BLOCKS, BLOCK)
    write(host, 0, name_of(1))
    peer, copy = opened(fd), np.copyto

    def interrupted(target: np.ndarray, source: np.ndarray) -> None:
        copy(target[: BLOCK // 2], source[: BLOCK // 2])
        write(host, 0, name_of(2))
        copy(target[BLOCK // 2 :], source[BLOCK // 2 :])

    monkeypatch.setattr(np, "copyto", interrupted)
    assert read(peer, name_of(1)) is None


def test_a_file_of_another_size_or_layout_is_refused_and_not_read(fd: int) -> None:
    assert PeerHost.open(fd, BLOCK) is None  # not laid out yet
    SharedHost(fd, BLOCKS, BLOCK)
    for num_blocks, block_bytes in ((BLOCKS + 1, BLOCK), (BLOCKS, BLOCK // 2)):
        with pytest.raises(ConfigError, match="file for host blocks"):
            SharedHost(fd, num_blocks, block_bytes)
    assert PeerHost.open(fd, BLOCK * 2) is None
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 4096)  # nobody can cut off what others have mapped
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def test_the_next_owner_takes_all_names_away(fd: int) -> None:
    write(SharedHost(fd, BLOCKS, BLOCK), 3, name_of(1))
    peer = opened(fd)
    assert read(peer, name_of(1)) is not None  # its owner has gone; what is whole can be read
    after = SharedHost(fd, BLOCKS, BLOCK)
    assert read(peer, name_of(1)) is None
    write(after, 3, name_of(2))
    assert read(peer, name_of(2)) is not None


def owner(fd: int, first: int) -> subprocess.Popen[bytes]:
    """A process that overwrites blocks at random."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(fd), str(first)], pass_fds=(fd,), stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def test_no_byte_is_ever_wrong_while_a_process_overwrites_what_others_copy(fd: int) -> None:
    """Thousands of copies against a writer that never rests; then it is killed, and another takes its place."""
    found = missed = 0
    rng, peer = random.Random(1), None
    for first in (0, NAMES):
        names = [name_of(number) for number in range(first, first + NAMES)]
        expected = {name: content(name, BIG).tobytes() for name in names}
        writer = owner(fd, first)
        try:
            peer = peer or PeerHost.open(fd, BIG)
            assert peer is not None
            for _ in range(1500):
                name = rng.choice(names)
                data = read(peer, name, BIG)
                assert data is None or data == expected[name]
                found, missed = found + (data is not None), missed + (data is None)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
        assert {read(peer, name, BIG) or expected[name] for name in names} == set(expected.values())
    assert [read(peer, name_of(number), BIG) for number in range(NAMES)] == [None] * NAMES  # of the first life
    assert found > 50 and missed > 50


# -- a worker's reader -------------------------------------------------------------------------------------------------


class Readers:
    """Two workers with shared host blocks: each reads from the other."""

    def __init__(self, fds: list[int], formats: tuple[bytes, bytes] = (FORMAT, FORMAT)) -> None:
        self.hosts = [SharedHost(fd, BLOCKS, BLOCK) for fd in fds]
        self.drivers = []
        for worker, host in enumerate(self.hosts):
            memory, events = host.memory.numpy().reshape(BLOCKS, BLOCK), TierEvents()
            others = {1 - worker: fds[1 - worker]}
            buffer = [memoryview(row) for row in memory].__getitem__
            self.drivers.append(TierDriver(events, None, PeerReader(host, others, formats[worker], buffer, events)))

    def fill(self, worker: int, hashes: tuple[bytes, ...], blocks: tuple[int, ...]) -> None:
        """The worker holds these, and says so."""
        for block_hash, block in zip(hashes, blocks, strict=True):
            with self.hosts[worker].writing((block,)):
                self.block(worker, block)[:] = content(block_hash)
        self.drivers[worker].act(ShareBlocks(hashes, blocks))

    def block(self, worker: int, block: int) -> np.ndarray:
        return self.hosts[worker].memory.numpy()[block * BLOCK : (block + 1) * BLOCK]

    def loaded(self, worker: int) -> RunLoaded:
        """The next answer."""
        give_up = time.monotonic() + 10
        while not (events := self.drivers[worker].poll()):
            assert time.monotonic() < give_up
            self.drivers[worker].wait(0.1)
        (event,) = events
        assert isinstance(event, RunLoaded)
        return event

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for _ in range(2)]
    yield made
    for fd in made:
        os.close(fd)


HASHES = tuple(name_of(number) for number in range(5))


def test_a_load_gives_the_leading_blocks_that_the_peer_has(fds: list[int]) -> None:
    readers = Readers(fds)
    readers.fill(0, (*HASHES[:3], HASHES[4]), (7, 2, 9, 4))
    readers.drivers[1].act(LoadBlocks(1, HASHES, (0, 1, 2, 3, 4), peer=0))
    answer = readers.loaded(1)
    assert (answer.load_id, answer.num_blocks) == (1, 3) and answer.duration_ns > 0
    for block, block_hash in enumerate(HASHES[:3]):
        assert (readers.block(1, block) == content(block_hash)).all()
    readers.drivers[1].act(ShareBlocks(HASHES[:3], (0, 1, 2)))  # and now others find it there
    readers.drivers[0].act(LoadBlocks(5, HASHES[:2], (14, 15), peer=1))
    assert readers.loaded(0).num_blocks == 2
    readers.close()


@pytest.mark.parametrize("why", ["other format", "unknown peer", "never shared", "cancelled", "closed"])
def test_what_cannot_be_read_is_a_miss(fds: list[int], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = Readers(fds, (FORMAT, b"another" if why == "other format" else FORMAT))
    if why != "never shared":
        readers.fill(0, HASHES, (0, 1, 2, 3, 4))
    reader = readers.drivers[1]
    if why == "cancelled":
        gate, peer = threading.Event(), opened(fds[0])
        assert reader._peers is not None
        find = peer.find
        monkeypatch.setattr(peer, "find", lambda names: (gate.wait(10), find(names))[1])
        reader._peers._peers[0] = peer
    if why == "closed":
        assert reader._peers is not None
        reader._peers._is_closed = True
    reader.act(LoadBlocks(1, HASHES, (0, 1, 2, 3, 4), peer=7 if why == "unknown peer" else 0))
    if why == "cancelled":
        reader.act(CancelLoad(1))
        gate.set()
    reader.act(CancelLoad(2))  # of no load
    assert readers.loaded(1).num_blocks == 0
    readers.close()


def test_blocks_that_are_copied_down_have_no_name_before_they_are_shared(fd: int) -> None:
    kv = KVTensors(make_backend(num_layers=2), num_blocks=6, num_host_blocks=3, host_fd=fd)
    for layer in kv.layers:
        for cache in layer:
            cache.normal_()
    assert kv.shared_host is not None
    size = kv.host_bytes.shape[1]
    peer = PeerHost.open(fd, size)
    assert peer is not None
    kv.copy_to_host([(4, 0), (1, 2)])
    kv.shared_host.publish([name_of(1)], [2])
    target = bytearray(size)
    assert peer.find([name_of(1)]) == [2] and peer.copy(2, name_of(1), memoryview(target))
    assert bytes(target) == kv.host_bytes[2].tobytes()
    kv.copy_to_host([(5, 2)])
    assert peer.find([name_of(1)]) == [-1]
    before = [cache[5].clone() for layer in kv.layers for cache in layer]
    kv.copy_from_host([(2, 3)])
    assert all(
        torch.equal(cache[3], old)
        for cache, old in zip((cache for layer in kv.layers for cache in layer), before, strict=True)
    )


def test_a_file_that_cannot_be_used_leaves_the_host_blocks_to_the_worker(fd: int) -> None:
    SharedHost(fd, BLOCKS, BLOCK)
    kv = KVTensors(make_backend(num_layers=2), num_blocks=6, num_host_blocks=3, host_fd=fd)
    assert kv.shared_host is None and kv.host_bytes.shape[0] == 3
