"""Files and folders of texts, tokens, KV and keys: readable by their owner alone, and by one server at a time.

Everything of that kind is created here, whatever the umask. A file that is there and that others may read or write is
narrowed, with a line in the log; where that is not possible it is refused. Locks are flock: they are those of the file,
by whichever path it is reached, and the kernel gives them up when their process ends, however it ends.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
import stat
from collections.abc import Sequence
from pathlib import Path

from diptych.control.errors import ConfigError

logger = logging.getLogger(__name__)

OWNER = 0o600
_SQLITE_BESIDE = ("-wal", "-shm", "-journal")  # what SQLite makes beside a database, with the mode of the database


def open_private(path: Path, flags: int, mode: int = OWNER, most: int = OWNER) -> int:
    """A descriptor of this file, which is created with ``mode`` where ``flags`` (os.O_RDWR ...) say so. Of a regular
    file that is there, other users lose what ``most`` does not give them. Raises OSError, EPERM where they cannot."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        _narrow(descriptor, path, most)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _narrow(descriptor: int, path: Path, most: int) -> None:
    status = os.fstat(descriptor)
    has = stat.S_IMODE(status.st_mode)
    wanted = has & (most | 0o700)
    if stat.S_ISREG(status.st_mode) and wanted != has:
        os.fchmod(descriptor, wanted)
        logger.warning("%s was open to other users (mode %03o); it has mode %03o now", path, has, wanted)


def write_private(path: Path, data: bytes) -> None:
    """A file of these bytes alone. Raises OSError."""
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)


def make_private_folder(path: Path) -> None:
    """This folder, and those above it that are missing, for their owner alone (0700). One that is there stays as it is:
    others may enter it (see ``warn_of_visitors``). Raises OSError."""
    for folder in (*reversed(path.parents), path):
        with contextlib.suppress(FileExistsError):
            if folder == path or not folder.exists():
                folder.mkdir(mode=0o700)
    if not path.is_dir():
        raise NotADirectoryError(20, os.strerror(20), str(path))


def warn_of_visitors(path: Path, option: str) -> None:
    """A line in the log where others can enter a folder: they see the names of its files, which are private themselves,
    and where they may write, they can delete them."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        logger.warning("%s is %s, which other users can enter (mode %03o): chmod 700 it", option, path, mode)


def lock_of(path: Path, option: str, *, is_database: bool = False) -> int:
    """A descriptor that holds the lock of this private file, which is created where it is missing, until it is closed.
    Raises OSError, and ConfigError when another server has the lock. is_database: of SQLite, whose own locks end when
    any descriptor of the file is closed: close this one last."""
    descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(os.fstat(descriptor))
        os.close(descriptor)
        shown = path if is_database else path.parent
        process = "" if holder is None else f" (process {holder})"
        raise ConfigError(f"{option} is {shown}, which another server uses{process}", param=option) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _holder(status: os.stat_result) -> int | None:
    """The process that has the lock of a file, as far as the kernel says so."""
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError, ValueError):  # then the message names no process
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 4711 fe:00:2293995 0 EOF
            if len(words) > 5 and words[1] == "FLOCK" and words[5] == place and int(words[4]) > 0:
                return int(words[4])
    return None


def private_database(path: Path, schema: Sequence[str], held: int | None = None) -> sqlite3.Connection:
    """An SQLite database of this owner's alone, with what SQLite puts beside it, for any thread, without implicit
    transactions. schema: statements to begin with. held: the descriptor of its lock. Raises OSError and
    sqlite3.Error."""
    real = Path(os.path.realpath(path))  # beside which SQLite puts its files
    if held is None:
        os.close(open_private(real, os.O_RDWR | os.O_CREAT))
    for suffix in _SQLITE_BESIDE:
        with contextlib.suppress(FileNotFoundError):
            os.close(open_private(real.with_name(real.name + suffix), os.O_RDWR))
    database = sqlite3.connect(real, check_same_thread=False, isolation_level=None)
    try:
        for statement in schema:
            database.execute(statement)
    except sqlite3.Error:
        database.close()
        raise
    return database
