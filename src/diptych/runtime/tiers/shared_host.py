"""Host blocks that the other workers of a machine may read: a file in memory (memfd) for each worker, which it alone
writes.

head | generation of each block | name of each block | the blocks

Lock-free: readers validate with a generation counter (a seqlock). The owner raises a block's generation before it
writes there (odd: being written), takes its name away, and raises the generation again afterwards; what the block holds
is named when it is known. A reader copies a block that has the name it looks for, and believes the copy only if the
generation is even and the same before and after. So a block that is overwritten meanwhile, or whose owner ends in the
middle, is a miss.

The file comes from the front end (serving/fleet), empty, and stays when its owner ends: others go on reading what is
whole. A process that takes it over first takes all names away. Sizes are sealed, so that no mapping ever ends early.

Needs a processor that shows the stores of one core to others in their order: the front end makes no files elsewhere.
Copies with non-temporal stores do not keep to it; a fence stands on both sides of them.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from diptych.control.errors import ConfigError
from diptych.runtime.device.memory import map_file
from diptych.runtime.tiers.extent_format import Buffer

MAGIC = b"DPTYHOST"
HEAD = struct.Struct("<8sQQ")  # magic, number of blocks, bytes of a block
NAME_BYTES = 16
PAGE_BYTES = 4096
UNNAMED = 0  # both halves of a name

Numbers = npt.NDArray[np.uint64]


class _Layout:
    """Offsets in a file of ``num_blocks`` blocks."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.generations = PAGE_BYTES
        self.names = self.generations + 8 * num_blocks
        end = self.names + NAME_BYTES * num_blocks
        self.blocks = -(-end // PAGE_BYTES) * PAGE_BYTES
        self.num_bytes = self.blocks + num_blocks * block_bytes


class SharedHost:
    """The owner's side. memory: the bytes of all blocks, as a 1-d tensor; it lies in ``mapped``, which is the file.

    Raises ConfigError for a file that cannot be mapped, or that was laid out for other blocks.
    """

    def __init__(self, fd: int, num_blocks: int, block_bytes: int) -> None:
        layout = _Layout(num_blocks, block_bytes)
        size = os.fstat(fd).st_size
        if not size:
            os.ftruncate(fd, layout.num_bytes)
            # A file that shrank would end every process that reads it with a bus error.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        elif size != layout.num_bytes:
            raise ConfigError(
                f"the file for host blocks has {size} bytes; {num_blocks} blocks of {block_bytes} bytes take "
                f"{layout.num_bytes}",
                param="host_bytes",
            )
        mapped = map_file(fd, layout.num_bytes, is_shared=True)
        head = mapped.numpy()[: HEAD.size]
        found, wanted = head.tobytes(), HEAD.pack(MAGIC, num_blocks, block_bytes)
        if found not in (wanted, bytes(HEAD.size)):
            raise ConfigError("the file for host blocks is laid out for others", param="host_bytes")
        whole = mapped.numpy()
        self._generations: Numbers = whole[layout.generations : layout.names].view(np.uint64)
        names_end = layout.names + NAME_BYTES * num_blocks
        self._names: Numbers = whole[layout.names : names_end].view(np.uint64).reshape(num_blocks, 2)
        self._lock = threading.Lock()
        self.mapped: torch.Tensor = mapped
        self.memory: torch.Tensor = mapped[layout.blocks :]
        with self.writing(range(num_blocks)):  # whatever an earlier owner has left
            pass
        head[:] = np.frombuffer(wanted, np.uint8)

    @contextlib.contextmanager
    def writing(self, blocks: Sequence[int]) -> Iterator[None]:
        """Let these blocks (each once) be written within the context; they have no names afterwards."""
        index = np.asarray(blocks, np.intp)
        # Odd, then nameless, then fenced, all before the first byte: a reader that knew the name sees the generation
        # change.
        self._generations[index] |= np.uint64(1)
        self._names[index] = UNNAMED
        _fence(self._lock)
        try:
            yield
        finally:
            _fence(self._lock)
            self._generations[index] += np.uint64(1)

    def publish(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """``blocks[i]`` holds what is called ``names[i]``, until it is written. A block that is being written keeps its
        secret."""
        generations = self._generations
        for name, block in zip(names, blocks, strict=True):
            if not int(generations[block]) & 1:
                generations[block] |= np.uint64(1)
                _fence(self._lock)
                self._names[block] = np.frombuffer(name, np.uint64)
                _fence(self._lock)
                generations[block] += np.uint64(1)


class PeerHost:
    """The blocks of another worker, to be read."""

    def __init__(self, mapped: mmap.mmap, num_blocks: int, block_bytes: int) -> None:
        layout = _Layout(num_blocks, block_bytes)
        whole = np.frombuffer(mapped, np.uint8)
        self._generations: Numbers = whole[layout.generations : layout.names].view(np.uint64)
        names_end = layout.names + NAME_BYTES * num_blocks
        self._names: Numbers = whole[layout.names : names_end].view(np.uint64).reshape(num_blocks, 2)
        self._blocks = whole[layout.blocks :].reshape(num_blocks, block_bytes)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, fd: int, block_bytes: int) -> "PeerHost | None":
        """None while its owner has not made it, or where its blocks have another size."""
        size = os.fstat(fd).st_size
        if size < PAGE_BYTES:
            return None
        mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        magic, num_blocks, found_bytes = HEAD.unpack(mapped[: HEAD.size])
        if magic != MAGIC or found_bytes != block_bytes or _Layout(num_blocks, block_bytes).num_bytes != size:
            mapped.close()
            return None
        return cls(mapped, num_blocks, block_bytes)

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The block of each name; -1 where there is none."""
        wanted = np.sort(np.frombuffer(b"".join(names), np.uint64).reshape(-1, 2)[:, 0])
        first = self._names[:, 0]
        nearest = np.minimum(np.searchsorted(wanted, first), len(wanted) - 1)
        blocks = {self._names[block].tobytes(): int(block) for block in np.flatnonzero(wanted[nearest] == first)}
        return [blocks.get(name, -1) for name in names]

    def copy(self, block: int, name: bytes, target: Buffer) -> bool:
        """Copy a block; whether all of it is what is called ``name``."""
        # Generation, name, bytes, generation: a write that begins anywhere in between changes the last one.
        before = int(self._generations[block])
        if before & 1:
            return False
        _fence(self._lock)
        if self._names[block].tobytes() != name:
            return False
        np.copyto(np.frombuffer(target, np.uint8), self._blocks[block])
        _fence(self._lock)
        return int(self._generations[block]) == before


def _fence(lock: threading.Lock) -> None:
    """No load or store of this thread passes it: taking a lock is one locked instruction at least."""
    with lock:
        pass
