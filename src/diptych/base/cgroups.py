"""What the control groups of this process grant it: CPU time and memory, in both versions of the kernel's files.

A container's limits are those of its groups: /proc/meminfo and the number of CPUs are still the machine's. Every level
of the hierarchy counts, since a limit holds for all groups below it. Where no file can be read, there is no limit.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
UNKNOWN_MEMORY_BYTES = 4 * 2**30  # where the kernel says nothing
UNLIMITED_BYTES = 2**60  # version 1 has a number near 2^63 where there is no limit


def text_of(path: Path) -> str:
    """The content of a small file; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def folders(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """The groups of this process that a controller ("cpu", "memory") may limit, each before the one above it."""
    base = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = base / controllers if controllers else base
        if controllers and not top.is_dir():
            top = base / controller
        own = PurePosixPath(path.lstrip("/"))
        for folder in (own, *own.parents):  # a container may see only the upper end of its path, or only the lower
            yield top / folder


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs whose time this process is granted, the smallest of all levels; None without a limit."""
    return min(filter(None, map(_quota, folders("cpu", root))), default=None)


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """Memory that this process and its neighbours in its groups may have together; None without a limit."""
    return min((limit for limit, _ in _memory(root)), default=None)


def available_memory_bytes(root: Path = ROOT) -> int:
    """Memory that can be had without swapping, by the kernel's estimate for the machine and by what is left in each
    group with a limit (pages of files count as left, as in the estimate). 4 GiB where nothing is known."""
    lines = text_of(root / "proc/meminfo").splitlines()
    machine = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    left = [max(0, limit - used) for limit, used in _memory(root)]
    return min(machine + left, default=UNKNOWN_MEMORY_BYTES)


def _quota(folder: Path) -> float | None:
    """CPU quota of one control group, in cores: microseconds granted divided by those of the period."""
    words = text_of(folder / "cpu.max").split()
    words = words or [text_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    limit, period = map(_number, words) if len(words) == 2 else (0, 0)
    return limit / period if limit and period else None


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be taken back) of each group that has a limit."""
    for folder in folders("memory", root):
        limits = [_number(text_of(folder / name)) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        found = [limit for limit in limits if 0 < limit < UNLIMITED_BYTES]
        if found:
            used = _number(text_of(folder / "memory.current") or text_of(folder / "memory.usage_in_bytes"))
            yield min(found), max(0, used - _file_bytes(folder))


def _file_bytes(folder: Path) -> int:
    """Pages of files: a model that was just downloaded and checked fills memory with them, and the kernel gives them to
    whoever asks."""
    rows = dict(row for line in text_of(folder / "memory.stat").splitlines() if len(row := line.split()) == 2)
    return sum(_number(rows.get(f"total_{name}", rows.get(name, ""))) for name in ("inactive_file", "active_file"))


def _number(text: str) -> int:
    """0 for "max", -1 and what is no number."""
    return int(text) if text.isdigit() else 0
