"""The file that a failed core leaves behind: what it was given last, and where its code failed.

A recording as ``diptych serve --record`` writes it, with two more fields in its header: ``failure`` (core, error, place
in the code) and ``dropped`` (rows before the first one that were not kept any more). Where nothing was dropped,
``diptych replay`` decides it again, up to the failure. Owns names, mode and number of these files; they hold neither
texts nor keys, and hashes of blocks are replaced by others that nobody can compute from a prompt.
"""

import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from diptych import __version__
from diptych.base.private_files import make_private_folder
from diptych.control.recent_rows import RecentRows, Row

logger = logging.getLogger(__name__)

MAX_BYTES = 8 * 2**20  # of a file
MAX_FILES = 16  # in a folder; the oldest go
MAX_FRAMES = 64
PREFIX = "diptych-failure-"
PLAIN_FORMAT, PLAIN_VERSION = "diptych failure", 1  # of a file without rows


def default_folder() -> Path:
    """Where recordings go when no log is a file: a folder of this user alone."""
    return Path(tempfile.gettempdir()) / f"diptych-failures-{os.getuid()}"


def folder_of(options_folder: str) -> Path:
    """The folder of an option that may be empty."""
    return Path(options_folder) if options_folder else default_folder()


def error_words(error: BaseException) -> str:
    """The error in one line of bounded length, without control characters."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return "".join(character if character.isprintable() else " " for character in text)[:300]


def leave_alone(folder: Path, core: str, error: BaseException) -> str:
    """Write what is known of the failure of something that is given no recorded inputs: the error and its places."""
    return write_failure(folder, core, error, None, {"format": PLAIN_FORMAT, "version": PLAIN_VERSION}, lambda row: row)


def places(error: BaseException) -> list[str]:
    """Where it was raised: "file:line function" of each frame, the innermost last. No values."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        file = "/".join(Path(code.co_filename).parts[-3:])
        frames.append(f"{file}:{trace.tb_lineno} {code.co_qualname}")
        trace = trace.tb_next
    return frames[-MAX_FRAMES:]


def write_failure(
    folder: Path,
    core: str,
    error: BaseException,
    recent: RecentRows | None,
    header: Mapping[str, Any],
    encode: Callable[[Row], Row],
) -> str:
    """Write what is known of a failure; returns the path, or "" when it cannot be written (which is logged). header,
    encode: of a recording of this core."""
    try:
        return str(_write(folder, core, error, recent, header, encode))
    except Exception as failure:  # of a full disk, of a row that cannot be encoded: the failure itself counts more
        logger.error("the failure of %s cannot be recorded: %s", core, error_words(failure))
        return ""


def _write(
    folder: Path,
    core: str,
    error: BaseException,
    recent: RecentRows | None,
    header: Mapping[str, Any],
    encode: Callable[[Row], Row],
) -> Path:
    lines, num_dropped = _lines(recent, encode)
    failure = {
        "core": core,
        "error": error_words(error),
        "notes": [note[:300] for note in getattr(error, "__notes__", ())],
        "places": places(error),
        "time_s": int(time.time()),
    }
    first = {"diptych": __version__, **header, "dropped": num_dropped, "failure": failure}
    data = b"\n".join([msgspec.json.encode(first), *lines]) + b"\n"
    _make(folder)
    _remove_oldest(folder)
    name = re.sub(r"[^a-z0-9]+", "-", core.lower()).strip("-")
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    for number in range(100):
        path = folder / f"{PREFIX}{name}-{stamp}-{os.getpid()}-{number}.jsonl"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            continue
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        return path
    raise FileExistsError(f"100 recordings of {core} within a second")


def _lines(recent: RecentRows | None, encode: Callable[[Row], Row]) -> tuple[list[bytes], int]:
    """The rows as lines, and how many are missing before the first."""
    if recent is None:
        return [], 0
    rows, num_dropped = recent.kept()
    lines = [msgspec.json.encode(row) for row in _blinded(rows, encode)]
    size = sum(len(line) + 1 for line in lines)
    first = 0
    while size > MAX_BYTES:
        size -= len(lines[first]) + 1
        first += 1
    return lines[first:], num_dropped + first


def _blinded(rows: list[Row], encode: Callable[[Row], Row]) -> list[Any]:
    """Rows as data, with other hashes in place of theirs, equal where theirs are. Digests of decisions stay: no hash of
    a block takes part in them."""
    key = os.urandom(32)
    found = []
    for row in rows:
        encoded = list(encode(row))
        is_plan = encoded[0] == "begin"
        shown = msgspec.to_builtins(encoded, builtin_types=(bytes,), str_keys=True)
        end = 0 if is_plan else len(shown) if isinstance(encoded[0], str) else 3  # behind: digest, summary
        found.append([_blind(value, key) for value in shown[:end]] + shown[end:])
    return found


def _blind(value: Any, key: bytes) -> Any:
    if isinstance(value, bytes):
        return blake2b(value, digest_size=min(64, len(value)) or 1, key=key).digest()
    if isinstance(value, dict):
        return {name: {} if name == "metadata" else _blind(entry, key) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_blind(entry, key) for entry in value]
    return value


def _make(folder: Path) -> None:
    """Raises OSError for the default folder when it is another user's."""
    make_private_folder(folder)
    if folder == default_folder():
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise PermissionError(f"{folder} is not this user's alone")


def _remove_oldest(folder: Path) -> None:
    files = sorted(folder.glob(f"{PREFIX}*.jsonl"), key=lambda path: path.lstat().st_mtime_ns)
    for path in files[: max(0, len(files) - MAX_FILES + 1)]:
        path.unlink(missing_ok=True)
