"""Files of prompts, answers and KV: theirs alone who made them, and one server's at a time."""

import logging
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.base.private_files import (
    lock_of,
    make_private_folder,
    open_private,
    private_database,
    warn_of_visitors,
    write_private,
)
from diptych.control.errors import ConfigError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    os.close(open_private(tmp_path / "a", os.O_WRONLY | os.O_CREAT))
    write_private(tmp_path / "b", b"words")
    os.close(open_private(tmp_path / "log", os.O_WRONLY | os.O_CREAT, 0o640, 0o660))
    assert [mode(tmp_path / name) for name in ("a", "b", "log")] == [0o600, 0o600, 0o640]
    assert (tmp_path / "b").read_bytes() == b"words"


@pytest.mark.parametrize(
    ("before", "most", "after"),
    [
        (0o666, 0o600, 0o600),
        (0o644, 0o600, 0o600),
        (0o640, 0o600, 0o600),
        (0o660, 0o660, 0o660),
        (0o666, 0o660, 0o660),
    ],
)
def test_a_file_that_was_open_to_others_is_narrowed_and_said(
    before: int, most: int, after: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"kept")
    path.chmod(before)
    os.close(open_private(path, os.O_RDWR, most=most))
    assert (mode(path), path.read_bytes()) == (after, b"kept")
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        [f"{path} was open to other users (mode {before:03o}); it has mode {after:03o} now"] * (before != after)
    )
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        os.close(open_private(path, os.O_RDWR, most=most))
    assert not caplog.records


def test_a_file_that_cannot_be_narrowed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, wanted: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / "file").touch(0o666)
    monkeypatch.setattr(os, "fchmod", refuse)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PermissionError):
        open_private(tmp_path / "file", os.O_RDWR)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_what_is_no_file_keeps_its_mode(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o666)
    os.close(open_private(tmp_path / "pipe", os.O_RDWR))
    assert mode(tmp_path / "pipe") == 0o666


def test_folders_are_made_for_their_owner_alone_and_what_is_there_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wide").mkdir(0o777)
    make_private_folder(tmp_path / "wide" / "a" / "b")
    make_private_folder(tmp_path / "wide" / "a" / "b")
    assert [mode(tmp_path / name) for name in ("wide", "wide/a", "wide/a/b")] == [0o777, 0o700, 0o700]
    warn_of_visitors(tmp_path / "wide" / "a", "kv_disk")
    assert not caplog.records
    warn_of_visitors(tmp_path / "wide", "kv_disk")
    assert "other users can enter (mode 777)" in caplog.text
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        make_private_folder(tmp_path / "file")
    with pytest.raises(OSError):
        make_private_folder(tmp_path / "file" / "below")


def test_what_sqlite_puts_beside_a_database_is_private_too(tmp_path: Path) -> None:
    schema = ("PRAGMA journal_mode = WAL", "CREATE TABLE IF NOT EXISTS t (x)")
    (tmp_path / "link").symlink_to(tmp_path / "real.db")
    for _ in range(2):
        database = private_database(tmp_path / "link", schema)
        database.execute("INSERT INTO t VALUES (1)")
        files = {path.name: mode(path) for path in tmp_path.iterdir() if not path.is_symlink()}
        assert files == dict.fromkeys(("real.db", "real.db-wal", "real.db-shm"), 0o600)
        for path in tmp_path.iterdir():
            path.chmod(0o666)  # as an older version left them
        copy = tmp_path / "real.db-wal"
        kept = copy.read_bytes()
        database.close()
        copy.write_bytes(kept)  # of a server that was killed
        copy.chmod(0o666)
    (tmp_path / "no.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(sqlite3.Error):
        private_database(tmp_path / "no.db", schema)


LOCKER = """
import sys, time
from pathlib import Path
from diptych.base.private_files import lock_of
lock = lock_of(Path(sys.argv[1]), "responses", is_database=True)
print("locked", flush=True)
time.sleep(600)
"""


def test_a_lock_is_the_files_by_whichever_path_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    process = subprocess.Popen([sys.executable, "-c", LOCKER, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"locked\n"
        (tmp_path / "link").symlink_to(path)
        (tmp_path / "elsewhere").symlink_to(path.parent)
        os.link(path, tmp_path / "hard")
        for other in (path, tmp_path / "link", tmp_path / "elsewhere" / "file", tmp_path / "hard"):
            with pytest.raises(ConfigError) as caught:
                lock_of(other, "responses", is_database=True)
            assert caught.value.param == "responses"
            assert caught.value.message in (
                f"responses is {other}, which another server uses (process {process.pid})",
                f"responses is {other}, which another server uses",  # where the kernel does not say by whom
            )
        with pytest.raises(ConfigError, match=rf"batch_dir is {path.parent}, which another server uses"):
            lock_of(path, "batch_dir")
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(lock_of(path, "responses", is_database=True))
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_lock_of_a_database_outlives_the_work_on_it(tmp_path: Path) -> None:
    """SQLite's own locks end when any descriptor of the file is closed: ours is not closed while they are used."""
    path = tmp_path / "responses.db"
    lock = lock_of(path, "responses", is_database=True)
    database = private_database(path, ("PRAGMA journal_mode = WAL", "CREATE TABLE t (x)"), lock)
    database.execute("BEGIN IMMEDIATE")
    beside = sqlite3.connect(path, timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        beside.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(ConfigError):
        lock_of(path, "responses", is_database=True)
    beside.close()
    database.close()
    os.close(lock)
