"""A disk tier as people see it: what is in its folder, whether all of it is sound. Needs no model and no torch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diptych.runtime.tiers.disk_store import DROPPED, mark_dropped
from diptych.runtime.tiers.extent_format import PAGE_BYTES, ExtentHeader, checksum, unpack_header
from diptych.runtime.tiers.segment_folder import SegmentFile, SegmentFolder, reading
from diptych.runtime.tiers.uncached_file import read_fully


@dataclass(slots=True)
class FormatSummary:
    """The segments of one format. description: what was written down of it. used_ns: when any of it was last used."""

    format: str
    description: dict[str, object]
    num_segments: int = 0
    num_extents: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    used_ns: int = 0

    @property
    def num_tokens(self) -> int:
        """Whose KV it holds; 0 where the format is not described."""
        size = self.description.get("block_size", 0)
        return self.num_blocks * size if isinstance(size, int) else 0


@dataclass(slots=True)
class Verification:
    """num_damaged: blocks whose checksum does not match. num_unreadable_bytes: behind the last whole header of their
    segments, where nothing is found."""

    num_blocks: int = 0
    num_damaged: int = 0
    num_unreadable_bytes: int = 0


def summaries(folder: SegmentFolder) -> list[FormatSummary]:
    """Every format in the folder, the largest first."""
    found: dict[str, FormatSummary] = {}
    for segment in folder.segments():
        summary = found.setdefault(segment.format, FormatSummary(segment.format, folder.description(segment.format)))
        summary.num_segments += 1
        summary.num_bytes += segment.num_bytes
        summary.used_ns = max(summary.used_ns, segment.used_ns)
        for _, _, header in extents(segment.path):
            summary.num_extents += 1
            summary.num_blocks += sum(block_hash != DROPPED for block_hash, _ in header.entries)
    return sorted(found.values(), key=lambda summary: (-summary.num_bytes, summary.format))


def extents(path: Path) -> Iterator[tuple[int, int, ExtentHeader]]:
    """(descriptor, offset, header) of each extent of a segment, as far as headers are whole."""
    with reading(path) as fd:
        if fd is None:
            return
        size, start = os.fstat(fd).st_size, 0
        while start < size:
            header = unpack_header(os.pread(fd, PAGE_BYTES, start))
            if header is None or start + header.num_bytes > size:
                return
            yield fd, start, header
            start += header.num_bytes


def verify(folder: SegmentFolder, segment: SegmentFile) -> Verification:
    """Read all of a segment. Damaged extents are dropped. The modification time stays: this is no use."""
    found = Verification()
    end = 0
    damaged: list[int] = []
    for fd, start, header in extents(segment.path):
        end = start + header.num_bytes
        buffer = memoryview(bytearray(header.block_bytes))
        is_sound = True
        for index, (block_hash, expected) in enumerate(header.entries):
            if block_hash == DROPPED:
                continue
            found.num_blocks += 1
            offset = start + PAGE_BYTES + index * header.block_bytes
            if not read_fully(fd, buffer, offset) or checksum(block_hash, buffer) != expected:
                found.num_damaged += 1
                is_sound = False
        if not is_sound:
            damaged.append(start)
    for start in damaged:
        mark_dropped(segment.path, start)
    with reading(segment.path) as open_fd:
        if open_fd is not None:
            found.num_unreadable_bytes = _num_not_zero(open_fd, end)
    if damaged:
        os.utime(segment.path, ns=(segment.used_ns, segment.used_ns))
    return found


def _num_not_zero(fd: int, start: int) -> int:
    """Bytes from the first one on that was written (a segment in use ends in zeros)."""
    size, offset = os.fstat(fd).st_size, start
    while chunk := os.pread(fd, 1 << 20, offset):
        if chunk.count(0) < len(chunk):
            return size - offset
        offset += len(chunk)
    return 0


def clear(folder: SegmentFolder, format_hex: str = "") -> tuple[int, int]:
    """Delete the segments of one format, or all. Returns (bytes freed, segments that are in use and stay)."""
    freed, num_in_use = 0, 0
    with folder.locked():
        for segment in folder.segments(format_hex):
            if folder.delete(segment.path):
                freed += segment.num_bytes
            else:
                num_in_use += 1
    return freed, num_in_use
