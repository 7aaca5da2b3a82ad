"""KV blocks on disk, by their chain hash: an index over the segments of one format, appending, reading, verifying.

Thread-safe. The index is rebuilt from headers: what is not behind a whole header does not exist. A header is written
only after the blocks behind it were written, synced, read back from the disk and found equal to their checksums. What
does not match its checksum when it is read is a miss, and its extent is dropped.
"""

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diptych.base.byte_size import size_words
from diptych.control.errors import ConfigError
from diptych.runtime.tiers.extent_format import (
    MAX_BLOCKS,
    PAGE_BYTES,
    Buffer,
    ExtentHeader,
    checksum,
    extent_bytes,
    header_of,
    unpack_header,
)
from diptych.runtime.tiers.segment_folder import SegmentFolder, reading
from diptych.runtime.tiers.uncached_file import UncachedFile, read_fully, write_fully

SEGMENT_BYTES = 64 << 20
MIN_SEGMENTS = 4  # that the cap has room for
DROPPED = bytes(16)  # in place of the hashes of an extent that was found damaged


@dataclass(slots=True)
class StoreCounts:
    """Counts of one process. damaged: blocks that did not match their checksum, on reading or right after writing."""

    stored_blocks: int = 0
    loaded_blocks: int = 0
    damaged_blocks: int = 0


@dataclass(slots=True)
class _Segment:
    """What is known of one: extents up to ``end`` are in the index. hashes: by offset of their extent."""

    path: Path
    end: int = 0
    extents: dict[int, ExtentHeader] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    segment: _Segment
    extent: int  # its offset in the file
    offset: int  # of the block
    checksum: bytes


def least_bytes(block_bytes: int) -> int:
    """What a folder must be allowed to hold at least, for blocks of this size."""
    return MIN_SEGMENTS * (extent_bytes(1, block_bytes) * 256 // 255 + 3 * PAGE_BYTES) + 4 * PAGE_BYTES


class DiskStore:
    """The blocks of one format (``digest``: 16 bytes) in a folder. block_bytes: of each.

    Raises ConfigError when the folder cannot be used, or when the cap is too small for a few blocks.
    """

    def __init__(
        self,
        directory: Path,
        cap_bytes: int,
        digest: bytes,
        block_bytes: int,
        description: dict[str, object] | None = None,
    ) -> None:
        self._digest = digest
        self._format_hex = digest.hex()
        self._block_bytes = block_bytes
        least = least_bytes(block_bytes)
        if cap_bytes < least:
            raise ConfigError(
                f"kv_disk_gb gives {size_words(cap_bytes)}; blocks of {size_words(block_bytes)} need at least "
                f"{size_words(least)}",
                param="kv_disk_gb",
            )
        largest = extent_bytes(MAX_BLOCKS, block_bytes)
        share = (cap_bytes - 4 * PAGE_BYTES) // MIN_SEGMENTS  # of it goes what the file system keeps of a segment
        whole = min(max(SEGMENT_BYTES, largest), (share - PAGE_BYTES) * 255 // 256)
        self._segment_bytes = whole // PAGE_BYTES * PAGE_BYTES
        self.counts = StoreCounts()
        self._mutex = threading.Lock()  # of the index
        self._segments: dict[str, _Segment] = {}
        self._places: dict[bytes, _Place] = {}
        self._added: dict[bytes, None] = {}  # changes of the index since they were last taken
        self._removed: dict[bytes, None] = {}
        self._open: _Segment | None = None  # the one that this process appends to
        self._fd = self._lock = -1
        self._file: UncachedFile | None = None  # of the open segment
        try:
            self.folder = SegmentFolder(directory, cap_bytes)
            self.folder.trim()
            self.folder.describe(self._format_hex, description or {})
            self.refresh()
            self._cut_unused()
        except OSError as error:
            raise ConfigError(f"kv_disk is {str(directory)!r}: {error.strerror}", param="kv_disk") from None

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._places

    @property
    def max_run(self) -> int:
        """Blocks of the longest extent that fits into a segment."""
        return max(1, min(MAX_BLOCKS, (self._segment_bytes - PAGE_BYTES) // self._block_bytes))

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """(added, removed) since the last call; removed ones go first."""
        with self._mutex:
            changes = tuple(self._added), tuple(self._removed)
            self._added.clear()
            self._removed.clear()
            return changes

    # -- reading ------------------------------------------------------------------------------------------------------

    def load(
        self, hashes: Sequence[bytes], buffers: Sequence[Buffer], is_cancelled: Callable[[], bool] = lambda: False
    ) -> int:
        """Read blocks into buffers of ``block_bytes``, in order, up to the first that cannot be had. Returns how many
        were read and match their checksums. Raises OSError when the disk does not read."""
        count = 0
        while count < len(hashes):
            place = self._places.get(hashes[count])
            if place is None or is_cancelled():
                break
            run = self._run(place.segment, hashes[count:])
            num_read = self._read(place.segment, run, hashes[count:], buffers[count:], is_cancelled)
            count += num_read
            if num_read < len(run):
                break
        self.counts.loaded_blocks += count
        return count

    def _run(self, segment: _Segment, hashes: Sequence[bytes]) -> list[_Place]:
        """The places of the leading blocks that lie in this segment."""
        run: list[_Place] = []
        for block_hash in hashes:
            place = self._places.get(block_hash)
            if place is None or place.segment is not segment:
                break
            run.append(place)
        return run

    def _read(
        self,
        segment: _Segment,
        run: Sequence[_Place],
        hashes: Sequence[bytes],
        buffers: Sequence[Buffer],
        is_cancelled: Callable[[], bool],
    ) -> int:
        with reading(segment.path) as fd:
            # Another process has evicted it.
            if fd is None:
                self._forget_segment(segment)
                return 0
            with contextlib.suppress(OSError):  # only the order of eviction depends on it
                os.utime(segment.path)
            for number, (place, block_hash, buffer) in enumerate(zip(run, hashes, buffers, strict=False)):
                if is_cancelled():
                    return number
                # The checksum covers the hash, so that sound bytes at a wrong place are found out, too.
                if not read_fully(fd, buffer, place.offset) or checksum(block_hash, buffer) != place.checksum:
                    self._drop_extent(place)
                    return number
        return len(run)

    # -- appending ----------------------------------------------------------------------------------------------------

    def store(self, hashes: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Write a run of a chain as one extent, or as several; what is there already is left out. Returns how many of
        the blocks are on disk afterwards. Raises OSError when the disk does not write. To be called by one thread."""
        num_there = 0
        run: list[int] = []
        for index in range(len(hashes) + 1):
            is_new = index < len(hashes) and hashes[index] not in self._places
            num_there += index < len(hashes) and not is_new
            if run and (not is_new or len(run) == self.max_run):
                num_there += self._append([hashes[i] for i in run], [buffers[i] for i in run])
                run = []
            if is_new:
                run.append(index)
        return num_there

    def _append(self, hashes: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        header = header_of(self._digest, hashes, buffers)
        if self._open is None or self._file is None or not self._has_room(self._open.end + header.num_bytes):
            self._close_segment()
            path, self._fd, self._lock = self.folder.make(self._format_hex, self._segment_bytes)
            self._open = _Segment(path)
            self._file = UncachedFile(path, self._fd)
            with self._mutex:
                self._segments[path.name] = self._open
            self.refresh()  # others may have been deleted for it
        segment, start = self._open, self._open.end
        # Blocks first, header last: a process that scans the segment meanwhile finds no extent that is not whole.
        self._file.write(buffers, start + PAGE_BYTES)
        if not self._is_written(self._file, header, start + PAGE_BYTES):
            self.counts.damaged_blocks += len(hashes)
            self._close_segment()  # another place may be sound
            return 0
        write_fully(self._fd, [memoryview(header.pack())], start)
        self.counts.stored_blocks += len(hashes)
        with self._mutex:
            self._insert(segment, start, header)
        return len(hashes)

    def _has_room(self, end: int) -> bool:
        """Whether the open segment can grow to ``end`` within what was allocated for it. Who truncates or deletes it
        under us gives that back, and others may have it by now: growing again would exceed the cap."""
        status = os.fstat(self._fd)
        return end <= self._segment_bytes <= status.st_size and status.st_nlink > 0

    def _is_written(self, file: UncachedFile, header: ExtentHeader, offset: int) -> bool:
        for block_hash, expected in header.entries:
            block = file.read(self._block_bytes, offset)
            if block is None or checksum(block_hash, block) != expected:
                return False
            offset += self._block_bytes
        return True

    def _close_segment(self) -> None:
        """Append nothing more to the open segment; its unused rest is given back."""
        if self._open is None:
            return
        if self._file is not None:
            self._file.close()
        try:
            if os.fstat(self._fd).st_size > self._open.end:
                os.ftruncate(self._fd, self._open.end)
        finally:
            os.close(self._fd)
            os.close(self._lock)
            self._open = self._file = None

    def close(self) -> None:
        """The segment that this process appends to is complete."""
        self._close_segment()

    # -- the index ----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take in what other processes have appended and deleted."""
        files = {segment.path.name: segment for segment in self.folder.segments(self._format_hex)}
        with self._mutex:
            known = list(self._segments.items())
        for name, segment in known:
            if name not in files:
                self._forget_segment(segment)
        for name, file in files.items():
            with self._mutex:
                segment = self._segments.setdefault(name, _Segment(file.path))
            if segment is not self._open and segment.end < file.num_bytes:
                self._scan(segment)

    def _scan(self, segment: _Segment) -> None:
        """Take in the extents behind those that are known."""
        with reading(segment.path) as fd:
            if fd is None:
                return
            size = os.fstat(fd).st_size
            while segment.end < size:
                header = unpack_header(os.pread(fd, PAGE_BYTES, segment.end))
                if header is None or segment.end + header.num_bytes > size:
                    return
                if header.format != self._digest or header.block_bytes != self._block_bytes:
                    return
                with self._mutex:
                    self._insert(segment, segment.end, header)

    def _cut_unused(self) -> None:
        """Give back what processes that ended had allocated and not written."""
        with self.folder.locked():
            for segment in list(self._segments.values()):
                with self.folder.unused(segment.path) as fd:
                    if fd is not None and (status := os.fstat(fd)).st_size > segment.end:
                        os.ftruncate(fd, segment.end)
                        os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
                if not segment.end and self.folder.delete(segment.path):
                    self._forget_segment(segment)

    def _insert(self, segment: _Segment, start: int, header: ExtentHeader) -> None:
        segment.extents[start] = header
        segment.end = start + header.num_bytes
        for index, (block_hash, expected) in enumerate(header.entries):
            if block_hash not in self._places and block_hash != DROPPED:
                offset = start + PAGE_BYTES + index * self._block_bytes
                self._places[block_hash] = _Place(segment, start, offset, expected)
                self._removed.pop(block_hash, None)
                self._added[block_hash] = None

    def _drop_extent(self, place: _Place) -> None:
        """Some of it is damaged: none of it is read again, by any process."""
        header = place.segment.extents.get(place.extent)
        if header is None:
            return
        self.counts.damaged_blocks += len(header.entries)
        with self._mutex:
            del place.segment.extents[place.extent]
            self._remove(place.segment, place.extent, header)
        mark_dropped(place.segment.path, place.extent)

    def _forget_segment(self, segment: _Segment) -> None:
        with self._mutex:
            self._segments.pop(segment.path.name, None)
            for start, header in segment.extents.items():
                self._remove(segment, start, header)
            segment.extents.clear()

    def _remove(self, segment: _Segment, start: int, header: ExtentHeader) -> None:
        for block_hash, _ in header.entries:
            place = self._places.get(block_hash)
            if place is not None and place.segment is segment and place.extent == start:
                del self._places[block_hash]
                self._added.pop(block_hash, None)
                self._removed[block_hash] = None


def mark_dropped(path: Path, start: int) -> None:
    """Overwrite the hashes of an extent, so that it is found no more, and those behind it still are."""
    with contextlib.suppress(OSError):  # found again, it fails its checksum again
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            header = unpack_header(os.pread(fd, PAGE_BYTES, start))
            if header is not None:
                entries = tuple((DROPPED, expected) for _, expected in header.entries)
                os.pwrite(fd, ExtentHeader(header.format, header.block_bytes, entries).pack(), start)
        finally:
            os.close(fd)
