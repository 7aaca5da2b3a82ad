"""Directories of workers: private, and removed when nobody owns them any more."""

import os
from pathlib import Path

from diptych.serving.fleet.private_directory import lock_directory, remove_orphans


def make(parent: Path, name: str, age_s: float) -> Path:
    directory = parent / name
    directory.mkdir(mode=0o700)
    (directory / "options.json").write_text("{}")
    then = os.stat(directory).st_mtime - age_s
    os.utime(directory, (then, then))
    return directory


def test_only_old_directories_without_an_owner_are_removed(tmp_path: Path) -> None:
    orphan, young = make(tmp_path, "diptych-orphan", 100), make(tmp_path, "diptych-young", 0)
    owned, other = make(tmp_path, "diptych-owned", 100), make(tmp_path, "something-else", 100)
    empty = tmp_path / "diptych-empty"
    empty.mkdir()
    lock = lock_directory(owned)
    remove_orphans(tmp_path)
    assert not orphan.exists()
    assert young.exists() and owned.exists() and other.exists() and empty.exists()
    os.close(lock)
    remove_orphans(tmp_path)
    assert not owned.exists()
