"""A file of weights in memory without reading it: a page costs memory only once it is touched, and can be given back.

Writes to the views stay in this process.
"""

import mmap
import platform
import sys
from pathlib import Path

from diptych.control.errors import ConfigError

# Without a reservation Linux also maps a file that is larger than the memory of the machine, of which little is touched
# at a time. The mmap module has no name for the flag.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0
_FLAGS = mmap.MAP_PRIVATE | _MAP_NORESERVE


class MappedFile:
    """The views that it gives keep the map alive."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError."""
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, flags=_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file", param="model") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be mapped ({error})", param="model") from None
        self._view = memoryview(self._map)

    def __len__(self) -> int:
        """Bytes."""
        return len(self._view)

    def view(self, start: int, end: int) -> memoryview:
        """Bytes [start, end)."""
        return self._view[start:end]

    def release(self, start: int, end: int) -> None:
        """Give back the memory of the whole pages within [start, end); later reads fetch them again."""
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0 and (advice := getattr(mmap, "MADV_DONTNEED", None)) is not None:
            self._map.madvise(advice, start, length)
