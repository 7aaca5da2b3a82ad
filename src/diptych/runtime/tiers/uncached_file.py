"""Writing a file and reading it back past the page cache (O_DIRECT): what a worker stores is read once, to verify it,
and seldom soon again, so that copies into the cache and out of it would be most of what a store costs.

Where the file system or the disk does not take that (EINVAL), all goes through the page cache.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from diptych.runtime.tiers.extent_format import PAGE_BYTES, Buffer

CHUNK_BYTES = 1 << 20  # of one write, where buffers are copied for it


class UncachedFile:
    """fd: the file at ``path``, open for reading and writing; it stays the caller's. Not thread-safe."""

    def __init__(self, path: Path, fd: int) -> None:
        self._fd = fd
        self._memory = memoryview(b"")
        self._direct = -1
        with contextlib.suppress(OSError):  # a file system without it: ``is_direct`` says so
            self._direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is left out."""
        return self._direct >= 0

    def close(self) -> None:
        """Close the file descriptor."""
        if self.is_direct:
            os.close(self._direct)
            self._direct = -1

    def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write buffers one after the other, from a whole page on. What lies behind them in their last page may become
        zeros. They are on disk when this returns. Raises OSError when that cannot be completed."""
        if self.is_direct:
            with self._unless_refused():
                self._write_direct(buffers, offset)
        if not self.is_direct:
            write_fully(self._fd, buffers, offset)
        os.fdatasync(self._fd)
        if not self.is_direct:
            num_bytes = sum(len(buffer) for buffer in buffers)
            os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)  # so that the disk is read

    def read(self, num_bytes: int, offset: int) -> Buffer | None:
        """What is on disk there, until the next call; None where the file ends before. Raises OSError when the disk
        does not read."""
        first = offset // PAGE_BYTES * PAGE_BYTES
        pages = self._pages(offset + num_bytes - first)
        is_whole = False
        if self.is_direct:
            with self._unless_refused():
                is_whole = read_fully(self._direct, pages, first)
        if not self.is_direct:
            is_whole = read_fully(self._fd, pages, first)
        return pages[offset - first :][:num_bytes] if is_whole else None

    @contextlib.contextmanager
    def _unless_refused(self) -> Iterator[None]:
        """Leave the page cache out no longer where the file system refuses that."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.close()

    def _write_direct(self, buffers: Sequence[Buffer], offset: int) -> None:
        if all(_is_aligned(buffer) for buffer in buffers):
            write_fully(self._direct, buffers, offset)
            return
        chunk, filled = self._pages(CHUNK_BYTES), 0
        for buffer in buffers:
            while len(buffer):
                piece, buffer = buffer[: CHUNK_BYTES - filled], buffer[CHUNK_BYTES - filled :]
                chunk[filled : filled + len(piece)] = piece
                filled += len(piece)
                if filled == CHUNK_BYTES:
                    write_fully(self._direct, [chunk], offset)
                    offset, filled = offset + CHUNK_BYTES, 0
        if filled:
            end = _whole_pages(filled)
            chunk[filled:end] = bytes(end - filled)
            write_fully(self._direct, [chunk[:end]], offset)

    def _pages(self, num_bytes: int) -> Buffer:
        """Whole pages of memory for ``num_bytes`` bytes, the same ones at each call."""
        end = _whole_pages(num_bytes)
        if len(self._memory) < end:
            self._memory = memoryview(mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return self._memory[:end]


def read_fully(fd: int, buffer: Buffer, offset: int) -> bool:
    """Fill the buffer from the file; False when the file ends before."""
    while len(buffer):
        count = os.preadv(fd, [buffer], offset)
        if count == 0:
            return False
        buffer, offset = buffer[count:], offset + count
    return True


def write_fully(fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write buffers one after the other. Raises OSError when that cannot be completed."""
    for buffer in buffers:
        while len(buffer):
            count = os.pwrite(fd, buffer, offset)
            buffer, offset = buffer[count:], offset + count


def _is_aligned(buffer: Buffer) -> bool:
    """Whether the disk can take it from where it lies: whole pages. (Nothing says where memory lies that cannot be
    written.)"""
    if buffer.readonly or len(buffer) % PAGE_BYTES:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % PAGE_BYTES == 0


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
