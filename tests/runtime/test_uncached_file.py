"""Files past the page cache: what was written is there, whatever its length and whatever the file system refuses."""

import errno
import fcntl
import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diptych.runtime.tiers import uncached_file
from diptych.runtime.tiers.extent_format import PAGE_BYTES
from diptych.runtime.tiers.uncached_file import UncachedFile

CHUNK = 2 * PAGE_BYTES
FILE_BYTES = 64 * PAGE_BYTES
FIRST = 3 * PAGE_BYTES  # where is written
LENGTHS = [(1, 1), (1, PAGE_BYTES), (3, PAGE_BYTES), (4, 3000), (2, CHUNK), (3, CHUNK + 5), (5, 7 * PAGE_BYTES - 1)]


def buffers(count: int, length: int) -> list[memoryview]:
    rng = random.Random(count * length)
    return [memoryview(rng.randbytes(length)) for _ in range(count)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncached_file, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"\xff" * FILE_BYTES)
    return path


@pytest.fixture
def file(path: Path) -> Iterator[UncachedFile]:
    fd = os.open(path, os.O_RDWR)
    file = UncachedFile(path, fd)
    yield file
    file.close()
    os.close(fd)


def check(file: UncachedFile, path: Path, parts: list[memoryview]) -> None:
    """Writes, reads back, and looks at every byte of the file."""
    file.write(parts, FIRST)
    data, offset = b"".join(parts), FIRST
    for part in parts:
        assert file.read(len(part), offset) == part
        offset += len(part)
    found = path.read_bytes()
    assert found[FIRST:offset] == data
    assert set(found[:FIRST]) == {0xFF}
    end = FIRST - (-len(data) // PAGE_BYTES) * PAGE_BYTES
    assert set(found[end:]) == {0xFF} and len(found) == FILE_BYTES


def limited(call: Callable[..., int], at_most: int) -> Callable[..., int]:
    """A system call that transfers a part of what it is asked for."""

    def short(fd: int, data: object, offset: int) -> int:
        if isinstance(data, list):
            return call(fd, [data[0][:at_most]], offset)
        assert isinstance(data, memoryview)
        return call(fd, data[:at_most], offset)

    return short


def refusing(call: Callable[..., int], code: int, after: int) -> Callable[..., int]:
    """A system call that fails on descriptors without page cache, when ``after`` of them have passed."""
    calls = 0

    def refuse(fd: int, data: object, offset: int) -> int:
        nonlocal calls
        if is_direct(fd):
            calls += 1
            if calls > after:
                raise OSError(code, os.strerror(code))
        return call(fd, data, offset)

    return refuse


def refuse_direct_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system that cannot leave out the page cache."""
    whole_open = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid argument")
        return whole_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize(("count", "length"), LENGTHS)
def test_buffers_of_any_length_are_written_whole_and_nothing_else_is(
    file: UncachedFile, path: Path, count: int, length: int
) -> None:
    check(file, path, buffers(count, length))


@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize(("count", "length"), LENGTHS)
def test_buffers_in_memory_that_can_be_written_are_taken_from_where_they_lie_or_copied(
    file: UncachedFile, path: Path, count: int, length: int, shift: int
) -> None:
    memory = memoryview(mmap.mmap(-1, shift + count * length))
    parts = [memory[shift + number * length :][:length] for number in range(count)]
    for part, content in zip(parts, buffers(count, length), strict=True):
        part[:] = content
    check(file, path, parts)


@pytest.mark.parametrize(("count", "length"), LENGTHS)
def test_a_file_system_that_cannot_open_without_cache_is_written_with_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, count: int, length: int
) -> None:
    refuse_direct_files(monkeypatch)
    with path.open("r+b", buffering=0) as opened:
        file = UncachedFile(path, opened.fileno())
        assert not file.is_direct
        check(file, path, buffers(count, length))


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_a_file_system_that_refuses_later_is_used_with_its_cache_from_then_on(
    file: UncachedFile, path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    monkeypatch.setattr(os, name, refusing(getattr(os, name), errno.EINVAL, after))
    check(file, path, buffers(3, CHUNK))
    assert not file.is_direct
    check(file, path, buffers(4, CHUNK))


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_a_disk_that_fails_is_an_error(file: UncachedFile, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if not file.is_direct:
        pytest.skip("this file system has no direct input and output")
    monkeypatch.setattr(os, name, refusing(getattr(os, name), errno.EIO, 1))
    with pytest.raises(OSError, match="Input/output error"):
        file.write(buffers(3, CHUNK), FIRST)
        for number in range(3):
            file.read(CHUNK, FIRST + number * CHUNK)
    assert file.is_direct


@pytest.mark.parametrize("at_most", [100, 512, PAGE_BYTES])
@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_short_writes_and_reads_go_on_where_they_ended(
    file: UncachedFile, path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at_most: int
) -> None:
    monkeypatch.setattr(os, name, limited(getattr(os, name), at_most))
    check(file, path, buffers(3, 5000))


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_ends_early_gives_what_is_before_its_end(file: UncachedFile, path: Path, direct: bool) -> None:
    file.write(parts := buffers(3, PAGE_BYTES), FIRST)
    if not direct:
        file.close()
    os.truncate(path, FIRST + 2 * PAGE_BYTES)
    assert file.read(PAGE_BYTES, FIRST + PAGE_BYTES) == parts[1]
    assert file.read(PAGE_BYTES, FIRST + 2 * PAGE_BYTES) is None
    assert file.read(2, FIRST + 2 * PAGE_BYTES - 1) is None


def test_what_another_process_has_changed_is_read_from_the_disk_as_it_is(file: UncachedFile, path: Path) -> None:
    file.write(buffers(3, 5000), FIRST)
    with path.open("r+b") as other:
        other.seek(FIRST + 7000)
        other.write(b"other")
    assert file.read(5, FIRST + 7000) == b"other"


def test_what_was_written_is_seen_through_the_page_cache_also_where_it_held_something_else(
    file: UncachedFile, path: Path
) -> None:
    with path.open("rb") as other:
        other.read()
        file.write(parts := buffers(3, 5000), FIRST)
        other.seek(FIRST)
        assert other.read(15_000) == b"".join(parts)
