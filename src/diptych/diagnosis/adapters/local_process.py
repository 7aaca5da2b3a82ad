"""What the kernel says of a server that runs on this machine: how long its threads waited for a core.

Reads /proc; says nothing (None) where that is not Linux, not local, or belongs to another user.
"""

from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
LISTENING = "0A"


def processes_behind(port: int, proc: Path = PROC) -> tuple[int, ...]:
    """The process that listens on this port of this machine, and all that it has started."""
    inodes = {
        fields[9]
        for table in ("tcp", "tcp6")
        for fields in _rows(proc / "net" / table)
        if len(fields) > 9 and fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port
    }
    if not inodes:
        return ()
    owners = [pid for pid in _pids(proc) if _holds(proc / str(pid) / "fd", inodes)]
    parents = {pid: parent for pid in _pids(proc) if (parent := _parent(proc, pid)) is not None}
    found = set(owners)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return tuple(sorted(found))


def cpu_waits_ns(pids: Iterable[int], proc: Path = PROC) -> dict[tuple[int, str], int]:
    """Run-queue wait by (process, thread): how long it was ready to run and had no core (the second field of
    schedstat)."""
    waits = {}
    for pid in pids:
        try:
            for task in (proc / str(pid) / "task").iterdir():
                waits[pid, task.name] = int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError, ValueError):  # it has ended, or the kernel counts nothing
            continue
    return waits


def longest_wait_ns(before: dict[tuple[int, str], int], after: dict[tuple[int, str], int]) -> int:
    """The run-queue wait of the thread that waited longest between the two readings."""
    return max((value - before[thread] for thread, value in after.items() if thread in before), default=0)


def _rows(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text().splitlines()[1:]]
    except OSError:
        return []


def _pids(proc: Path) -> list[int]:
    try:
        return [int(path.name) for path in proc.iterdir() if path.name.isdigit()]
    except OSError:
        return []


def _holds(descriptors: Path, inodes: set[str]) -> bool:
    try:
        return any(
            (name := str(path.readlink())).startswith("socket:[") and name[8:-1] in inodes
            for path in descriptors.iterdir()
        )
    except OSError:
        return False


def _parent(proc: Path, pid: int) -> int | None:
    try:
        return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None
