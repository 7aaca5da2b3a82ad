"""Writing a file, and comparing it with memory, past the page cache (O_DIRECT): what a worker stores is read back once,
to verify it, and seldom soon again, so that copies into the cache and out of it would be most of what a store costs.

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

CHUNK_BYTES = 1 << 20  # of one read or write


class UncachedFile:
    """fd: the file at ``path``, open for reading and writing; it stays the caller's. Not thread-safe."""

    def __init__(self, path: Path, fd: int) -> None:
        self._fd = fd
        self._chunk: Buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._direct = -1
        with contextlib.suppress(OSError):
            self._direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is left out."""
        return self._direct >= 0

    def close(self) -> None:
        """Of what this has opened."""
        if self.is_direct:
            os.close(self._direct)
            self._direct = -1

    def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write buffers of one length, one after the other, from a whole page on. What lies behind them in their last
        page may become zeros. They are on disk when this returns. Raises OSError when that cannot be completed."""
        if self.is_direct:
            with self._unless_refused():
                self._write_direct(buffers, offset)
        if not self.is_direct:
            write_fully(self._fd, buffers, offset)
        os.fdatasync(self._fd)
        if not self.is_direct:
            num_bytes = _whole_pages(_num_bytes(buffers))
            os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)  # so that the disk is read

    def holds(self, buffers: Sequence[Buffer], offset: int) -> bool:
        """Whether what ``write`` has written there is on disk, byte by byte. Raises OSError when the disk does not
        read."""
        if self.is_direct:
            with self._unless_refused():
                return self._is_equal(self._direct, buffers, offset)
        return self._is_equal(self._fd, buffers, offset)

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
        for start, end in _chunks(buffers):
            filled = 0
            for piece in _pieces(buffers, start, end):
                self._chunk[filled : filled + len(piece)] = piece
                filled += len(piece)
            pages = _whole_pages(filled)
            self._chunk[filled:pages] = bytes(pages - filled)
            write_fully(self._direct, [self._chunk[:pages]], offset + start)

    def _is_equal(self, fd: int, buffers: Sequence[Buffer], offset: int) -> bool:
        for start, end in _chunks(buffers):
            if not read_fully(fd, self._chunk[: _whole_pages(end - start)], offset + start):
                return False
            compared = 0
            for piece in _pieces(buffers, start, end):
                found = self._chunk[compared : compared + len(piece)]
                if bytearray(found) != piece:  # two memoryviews would be compared item by item
                    return False
                compared += len(piece)
        return True


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


def _num_bytes(buffers: Sequence[Buffer]) -> int:
    return len(buffers) * len(buffers[0])


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _chunks(buffers: Sequence[Buffer]) -> Iterator[tuple[int, int]]:
    """Ranges of what the buffers hold together."""
    total = _num_bytes(buffers)
    for start in range(0, total, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, total)


def _pieces(buffers: Sequence[Buffer], start: int, end: int) -> Iterator[Buffer]:
    """Bytes [start, end) of buffers of one length, in pieces that lie in one buffer each."""
    while start < end:
        number, first = divmod(start, len(buffers[0]))
        piece = buffers[number][first : first + end - start]
        yield piece
        start += len(piece)
