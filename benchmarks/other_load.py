"""How much of the machine others used while something was measured: a measurement on a busy machine is none."""

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class OtherLoad:
    """From its making on: cores used by processes that this one did not start (Linux; elsewhere it says 0).

    Processes that ended in between count for whoever waited for them.
    """

    def __init__(self) -> None:
        self._start = _busy()

    def cores(self) -> float:
        """Mean number of cores that others kept busy."""
        total, idle, own = (now - then for now, then in zip(_busy(), self._start, strict=True))
        return max(0.0, (total - idle - own) / max(total, 1e-9)) * (os.cpu_count() or 1)


def _busy() -> tuple[float, float, float]:
    """Seconds of all cores, seconds idle, and seconds of this process and its descendants."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0, 0.0, 0.0
    fields = [int(value) for value in stat.read_text().splitlines()[0].split()[1:9]]
    seconds: dict[int, float] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            values = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)] = int(values[1])
        seconds[int(entry.name)] = sum(map(int, values[11:15])) / TICKS
    own = sum(time for process, time in seconds.items() if _is_ours(process, parents))
    return sum(fields) / TICKS, (fields[3] + fields[4]) / TICKS, own


def _is_ours(process: int, parents: dict[int, int]) -> bool:
    while process in parents:
        if process == os.getpid():
            return True
        process = parents[process]
    return False
