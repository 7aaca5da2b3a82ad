"""Directories that only this user can enter, for sockets and settings of one worker; locked while their owner lives.

Makes them, and removes those whose owner has ended; never one whose owner is alive.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

DIRECTORY_PREFIX, ORPHAN_AGE_S = "diptych-", 60.0
MAX_DIRECTORY_CHARACTERS = 90


def private_directory() -> Path:
    """A fresh directory that only this user can enter (0700), with a path short enough for a unix socket."""
    remove_orphans(Path(tempfile.gettempdir()))
    directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
    if len(str(directory)) > MAX_DIRECTORY_CHARACTERS:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir="/tmp"))
    return directory


def lock_directory(directory: Path) -> int:
    """A descriptor that holds a lock on the directory while this process lives; the worker does not inherit it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def locked_directory() -> tuple[Path, int]:
    """A fresh private directory and the descriptor of its lock. Raises OSError, and then leaves nothing behind."""
    directory = private_directory()
    try:
        return directory, lock_directory(directory)
    except OSError:
        directory.rmdir()
        raise


def remove_orphans(parent: Path) -> None:
    """Remove private directories that a front end left behind because it was killed together with its workers: those
    of this user, older than a minute, on which no process holds the lock."""
    for directory in parent.glob(f"{DIRECTORY_PREFIX}*"):
        with contextlib.suppress(OSError):  # another front end removes it at the same time
            status = directory.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if not is_ours or time.time() - status.st_mtime < ORPHAN_AGE_S or not (directory / "options.json").exists():
                continue
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(descriptor)
