"""What the weights of a checkpoint are, by their bytes and not by their name: so that KV on disk is never read under
other weights.

All bytes of its files are digested, once: the result is kept beside the cache under the identity of each file (device,
inode, size, times of modification and change).
"""

import json
import os
from collections.abc import Sequence
from hashlib import sha1
from pathlib import Path

from diptych.base.private_files import write_private

FILE_NAME = "weights.json"
CHUNK_BYTES = 1 << 22
MAX_KEPT = 64  # files


def weights_digest(files: Sequence[Path], directory: Path) -> str:
    """Hexadecimal. directory: where digests of files are kept. Raises OSError for a file that cannot be read."""
    kept = _read(directory / FILE_NAME)
    whole, found = sha1(usedforsecurity=False), {}
    for path in sorted(files, key=lambda path: path.name):
        status = path.stat()
        identity = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
        digest = kept.get(identity) or _digest(path)
        found[identity] = digest
        whole.update(digest.encode())
    if not found.items() <= kept.items():
        _write(directory / FILE_NAME, dict([*kept.items(), *found.items()][-MAX_KEPT:]))
    return whole.hexdigest()


def _digest(path: Path) -> str:
    digest = sha1(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read(path: Path) -> dict[str, str]:
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) and all(isinstance(value, str) for value in kept.values()) else {}


def _write(path: Path, kept: dict[str, str]) -> None:
    """Whole or not at all; another process may do the same at the same time."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        write_private(part, json.dumps(kept).encode())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
