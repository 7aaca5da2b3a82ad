"""Random faults against the disk tier's store: is ever a wrong block given back?

Each round does one of: kill -9 of a process in the middle of storing, or of loading; a torn write (zeros, or other
bytes, in place of what was written); a flipped bit; a truncated file; a full disk; a deleted file; two stores on
one folder at once. Then everything that the index promises is read, and each block that is given back is compared with
what belongs under its hash. The cap is checked after every round, temporary files included.

    python benchmarks/tiers.py faults --faults 10000 [--directory DIR] [--seed 1]

With a small tmpfs as DIR the disk is full by itself, too. Needs no model and no torch.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from diptych.runtime.tiers.disk_store import DiskStore

BLOCK = 20_000  # bytes
FORMAT = b"a format of test"
CAP = 8_000_000
CHAINS, LENGTH = 40, 30


def hash_of(chain: int, index: int) -> bytes:
    return chain.to_bytes(8, "little") + (index + 1).to_bytes(8, "little")


def content(block_hash: bytes) -> bytes:
    return random.Random(block_hash).randbytes(BLOCK)


def chain_hashes(chain: int) -> list[bytes]:
    return [hash_of(chain, index) for index in range(LENGTH)]


class Faults:
    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.blocks = {h: content(h) for chain in range(CHAINS) for h in chain_hashes(chain)}
        self.store = self.opened()

    def opened(self) -> DiskStore:
        return DiskStore(self.directory, CAP, FORMAT, BLOCK)

    def put(self, store: DiskStore, chain: int) -> None:
        hashes = chain_hashes(chain)[: self.rng.randrange(1, LENGTH + 1)]
        try:
            store.store(hashes, [memoryview(self.blocks[h]) for h in hashes])
        except OSError:
            self.counts["stores refused by the disk"] += 1

    def check(self, store: DiskStore, chains: list[int]) -> None:
        """Every block that is given back is the right one."""
        for chain in chains:
            hashes = chain_hashes(chain)
            buffers = [bytearray(BLOCK) for _ in hashes]
            try:
                count = store.load(hashes, [memoryview(buffer) for buffer in buffers])
            except OSError:
                self.counts["loads refused by the disk"] += 1
                continue
            self.counts["blocks read"] += count
            for block_hash, buffer in zip(hashes[:count], buffers, strict=False):
                if bytes(buffer) != self.blocks[block_hash]:
                    self.counts["WRONG BLOCKS"] += 1

    def segment(self) -> Path | None:
        found = sorted(self.directory.glob("*.kv"))
        return self.rng.choice(found) if found else None

    def child(self, work: str) -> None:
        """A process that stores or loads is killed after a moment."""
        pid = os.fork()
        if pid == 0:
            try:
                store = self.opened()
                while True:
                    if work == "store":
                        self.put(store, self.rng.randrange(CHAINS))
                    else:
                        self.check(store, [self.rng.randrange(CHAINS)])
            finally:
                os._exit(1)
        time.sleep(self.rng.random() * 0.012)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def damage(self, kind: str) -> None:
        path = self.segment()
        size = path.stat().st_size if path else 0
        if path is None or not size:
            return
        at = self.rng.randrange(size)
        if kind == "truncated file":
            os.truncate(path, at)
        elif kind == "deleted file":
            path.unlink()
        else:
            with path.open("r+b") as file:
                file.seek(at)
                old = file.read(1 if kind == "flipped bit" else self.rng.randrange(1, 50_000))
                file.seek(at)
                if kind == "flipped bit":
                    file.write(bytes([old[0] ^ 1 << self.rng.randrange(8)]))
                else:
                    other = self.rng.choice(list(self.blocks.values()))
                    file.write(self.rng.choice([bytes(len(old)), (other * 3)[: len(old)]]))

    def full_disk(self) -> None:
        """The disk has no room for another segment."""
        allocate = os.posix_fallocate

        def refuse(*_: object) -> None:
            raise OSError(28, "no space left on device")

        os.posix_fallocate = refuse
        try:
            for _ in range(3):
                self.put(self.store, self.rng.randrange(CHAINS))
        finally:
            os.posix_fallocate = allocate

    def round(self) -> None:
        kinds = ("killed store", "killed load", "torn write", "flipped bit", "truncated file", "full disk",
                 "deleted file", "two stores")  # fmt: skip
        kind = self.rng.choice(kinds)
        self.counts[kind] += 1
        if kind == "killed store":
            self.child("store")
        elif kind == "killed load":
            self.child("load")
        elif kind == "full disk":
            self.full_disk()
        elif kind == "two stores":
            other = self.opened()
            for _ in range(3):
                self.put(self.store, self.rng.randrange(CHAINS))
                self.put(other, self.rng.randrange(CHAINS))
            self.check(other, [self.rng.randrange(CHAINS) for _ in range(3)])
            other.close()
        else:
            self.damage(kind)
        self.put(self.store, self.rng.randrange(CHAINS))
        self.check(self.store, [self.rng.randrange(CHAINS) for _ in range(4)])
        if self.rng.random() < 0.3:
            self.counts["damaged blocks found"] += self.store.counts.damaged_blocks
            self.store.close()
            self.store = self.opened()
        else:
            self.store.refresh()
        self.check(self.store, [self.rng.randrange(CHAINS) for _ in range(4)])
        if self.store.folder.used_bytes() > CAP:
            self.counts["CAP EXCEEDED"] += 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--seed", type=int, default=1)


def main(asked: argparse.Namespace) -> None:
    directory = asked.directory or Path(tempfile.mkdtemp(prefix="tier-faults-"))
    begun = time.monotonic()
    faults = Faults(directory, asked.seed)
    try:
        for _ in range(asked.faults):
            faults.round()
    finally:
        faults.store.close()
        if asked.directory is None:
            shutil.rmtree(directory)
    print(f"{asked.faults:,} faults in {time.monotonic() - begun:.0f} s")
    for name, count in faults.counts.most_common():
        print(f"  {name}: {count:,}")
    wrong, over = faults.counts["WRONG BLOCKS"], faults.counts["CAP EXCEEDED"]
    print(f"wrong blocks: {wrong}; rounds in which the cap was exceeded: {over}")
    raise SystemExit(bool(wrong or over))
