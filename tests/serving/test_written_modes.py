"""What a process writes is its user's alone, however open the umask is: prompts and answers are in it."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from batch_files import numbered, started

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.errors import ConfigError
from diptych.runtime.tiers.segment_folder import SegmentFolder
from diptych.serving.answers.stream_journal import StreamJournal
from diptych.serving.api import access_log
from diptych.serving.fleet.private_directory import locked_directory
from diptych.serving.link.heartbeat import Heartbeat
from diptych.serving.link.recorder import record_cluster

OTHERS, GROUP = stat.S_IRWXO, stat.S_IRWXG


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Nothing is taken away from the modes that are asked for."""
    before = os.umask(0)
    yield
    os.umask(before)


def heartbeat(folder: Path) -> None:
    Heartbeat(folder / "heartbeat").close()


def recording(folder: Path) -> None:
    record_cluster(folder / "recording.jsonl", ClusterConfig()).close()


def batches(folder: Path) -> None:
    store, _ = started(folder / "batches", numbered(3))
    store.close()


def journal(folder: Path) -> None:
    made = StreamJournal(folder / "streams")
    made._append(folder / "streams" / f"cmpl-{'0' * 32}", b"x")


def segments(folder: Path) -> None:
    made = SegmentFolder(folder / "tier", 1 << 24)
    path, file, lock = made.make("ab", 1 << 16)
    os.close(file)
    os.close(lock)
    path.with_suffix(".lock").unlink(missing_ok=True)
    made.delete(path)
    _, file, lock = made.make("ab", 1 << 16)
    os.close(file)
    os.close(lock)


def reachable(folder: Path) -> Iterator[Path]:
    """Files and folders that others can get to: what lies in a folder that is closed to them cannot be."""
    for path in folder.iterdir():
        yield path
        if path.is_dir() and path.stat().st_mode & (OTHERS | GROUP):
            yield from reachable(path)


@pytest.mark.parametrize("make", [heartbeat, recording, batches, journal, segments], ids=lambda make: make.__name__)
def test_others_can_neither_read_nor_enter_what_is_written(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    found = list(reachable(tmp_path))
    assert found
    assert [path for path in found if path.stat().st_mode & (OTHERS | GROUP)] == []


@pytest.mark.parametrize("make", [batches, segments, journal], ids=lambda make: make.__name__)
def test_nor_would_they_if_the_folder_were_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Files that the process opens itself, not those of its database, have a mode of their own."""
    make(tmp_path)
    opened = [path for path in tmp_path.rglob("*") if path.is_file() and path.name.endswith(("lock", ".kv", "0" * 32))]
    assert opened
    assert [path for path in opened if path.stat().st_mode & (OTHERS | GROUP)] == []


def test_the_access_log_may_be_read_by_its_group_and_by_no_others(tmp_path: Path) -> None:
    os.close(access_log.open_log(str(tmp_path / "log")))
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o640


def test_a_directory_of_a_worker_is_closed_to_others() -> None:
    directory, lock = locked_directory()
    try:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        os.close(lock)
        directory.rmdir()


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o770, 0o777, 0o755])
def test_streams_are_not_recorded_where_others_can_get_in(mode: int, tmp_path: Path) -> None:
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams").chmod(mode)
    with pytest.raises(ConfigError):
        StreamJournal(tmp_path / "streams")
