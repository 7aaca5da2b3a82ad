"""A folder of segments, shared by several processes without a daemon: who may append, read and delete, and the cap.

A segment is two files: NAME.kv holds extents, and is allocated whole when it is made, so that the cap covers what will
be written; NAME.lock is locked (flock) by the process that appends, as long as it lives. Who reads a segment holds a
shared lock on its .kv. A segment is made and deleted under the lock of the folder, and deleted only when neither of its
files is locked. NAME begins with the digest of the format, so that caches of several models lie side by side under one
cap. Least recently used is by modification time: appending and reading set it.

The kernel gives up the locks of a process that ends, however it ends.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diptych.base.private_files import make_private_folder, open_private, write_private

SEGMENT, LOCK, DESCRIPTION = ".kv", ".lock", ".json"
FOLDER_LOCK = "folder.lock"
LOCK_WAIT_S = 5.0
LEAF_BYTES = 4096  # of a file system's map of a file


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """One segment as the folder shows it. used_ns: when it was last appended to or read."""

    path: Path
    num_bytes: int
    used_ns: int

    @property
    def format(self) -> str:
        """Hexadecimal digest of what its bytes mean."""
        return self.path.name.partition("-")[0]


class SegmentFolder:
    """The folder ``directory``, of which all files together never take more than ``cap_bytes``."""

    def __init__(self, directory: Path, cap_bytes: int) -> None:
        self.directory = directory
        self.cap_bytes = cap_bytes
        make_private_folder(directory)

    def segments(self, format_hex: str = "") -> list[SegmentFile]:
        """The segments of one format, or all, in order of their names."""
        found: list[SegmentFile] = []
        for entry in os.scandir(self.directory):
            if entry.name.endswith(SEGMENT) and entry.name.startswith(format_hex):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append(SegmentFile(Path(entry.path), taken_bytes(status), status.st_mtime_ns))
        return sorted(found, key=lambda segment: segment.path.name)

    def used_bytes(self) -> int:
        """What all files of the folder take."""
        return sum(size for _, size in self._sizes())

    def _most_bytes(self) -> int:
        """What they may come to take without growing."""
        return sum(bound_bytes(size) if name.endswith(SEGMENT) else size for name, size in self._sizes())

    def _sizes(self) -> Iterator[tuple[str, int]]:
        """Every file, and what it takes."""
        for entry in os.scandir(self.directory):
            with contextlib.suppress(FileNotFoundError):
                yield entry.name, taken_bytes(entry.stat())

    def make(self, format_hex: str, num_bytes: int) -> tuple[Path, int, int]:
        """A new segment: its path, the descriptor of its file, and that of its lock, which this process holds now.

        Deletes the least recently used ones to keep below the cap. Raises OSError: ENOSPC when neither they nor the
        disk give enough room.
        """
        with self.locked():
            if not self._make_room(num_bytes):
                raise OSError(errno.ENOSPC, f"{num_bytes} bytes do not fit under the cap of {self.cap_bytes}")
            name = f"{format_hex}-{time.time_ns():x}-{secrets.token_hex(4)}"
            path, lock_path = self.directory / (name + SEGMENT), self.directory / (name + LOCK)
            lock = open_private(lock_path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                try:
                    # All of it at once, under the folder's lock: the cap holds whatever other processes write
                    # meanwhile.
                    os.posix_fallocate(fd, 0, num_bytes)
                    # what is written is read once, to verify it: reading ahead would fetch, and zero, what is not
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
                except OSError:
                    os.close(fd)
                    path.unlink()
                    raise
            except OSError:
                os.close(lock)
                lock_path.unlink()
                raise
            return path, fd, lock

    def delete(self, path: Path) -> bool:
        """Delete a segment, if no process uses it. Its bytes are free afterwards."""
        with self.unused(path) as fd:
            if fd is None:
                return False
            path.unlink(missing_ok=True)
            path.with_suffix(LOCK).unlink(missing_ok=True)
            return True

    def trim(self) -> None:
        """Delete the least recently used segments until the folder is below its cap, and locks without a segment."""
        with self.locked():
            for path in self.directory.glob("*" + LOCK):
                if path.name != FOLDER_LOCK and not path.with_suffix(SEGMENT).exists():
                    path.unlink(missing_ok=True)
            self._make_room(0)

    def describe(self, format_hex: str, description: dict[str, object]) -> None:
        """Write down in words what a format is, for people. Nothing reads it but ``description``."""
        path = self.directory / (format_hex + DESCRIPTION)
        with self.locked():
            if not path.exists() and self._make_room(8192):
                write_private(path, json.dumps(description, indent=1).encode() + b"\n")

    def description(self, format_hex: str) -> dict[str, object]:
        """What was written down of a format; empty when there is nothing that can be read."""
        try:
            words = json.loads((self.directory / (format_hex + DESCRIPTION)).read_text())
        except (OSError, ValueError):
            return {}
        return words if isinstance(words, dict) else {}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder. Raises OSError (EAGAIN) when another process keeps it."""
        fd = open_private(self.directory / FOLDER_LOCK, os.O_RDWR | os.O_CREAT)
        try:
            give_up = time.monotonic() + LOCK_WAIT_S
            while not try_lock(fd, fcntl.LOCK_EX):
                if time.monotonic() > give_up:
                    raise OSError(errno.EAGAIN, f"{self.directory} is locked by another process")
                time.sleep(0.002)
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def unused(self, path: Path) -> Iterator[int | None]:
        """The descriptor of a segment that no process appends to or reads, and none will meanwhile; None if one does.
        The caller holds the lock of the folder."""
        with contextlib.ExitStack() as stack:
            try:
                lock = open_private(path.with_suffix(LOCK), os.O_RDWR | os.O_CREAT)
                stack.callback(os.close, lock)
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                stack.callback(os.close, fd)
            except FileNotFoundError:
                yield None
                return
            yield fd if try_lock(lock, fcntl.LOCK_EX) and try_lock(fd, fcntl.LOCK_EX) else None

    def _make_room(self, num_bytes: int) -> bool:
        def fits() -> bool:
            return self._most_bytes() + bound_bytes(num_bytes) <= self.cap_bytes

        if fits():
            return True
        least_recent = sorted(self.segments(), key=lambda segment: (segment.used_ns, segment.path.name))
        return any(self.delete(segment.path) and fits() for segment in least_recent)


def taken_bytes(status: os.stat_result) -> int:
    """What a file takes, also where some of it is not allocated yet."""
    return max(status.st_size, status.st_blocks * 512)


def bound_bytes(num_bytes: int) -> int:
    """What a file of this size takes at most, with the file system's map of it, which grows when what was allocated is
    written piece by piece: a leaf, and 12 bytes for each 4 KiB if no two lie side by side (ext4)."""
    return num_bytes + LEAF_BYTES + num_bytes // 256 if num_bytes else 0


def try_lock(fd: int, kind: int) -> bool:
    """Whether the lock could be had at once."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int | None]:
    """The descriptor of a segment that is not deleted meanwhile; None when it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        # The link count after the lock: the file may have been deleted between open and lock.
        is_there = try_lock(fd, fcntl.LOCK_SH) and os.fstat(fd).st_nlink > 0
        yield fd if is_there else None
    finally:
        os.close(fd)
