"""How long this process was ready to run while no core was free, as Linux counts it for each thread."""

from pathlib import Path

TASKS = Path("/proc/self/task")


def cpu_wait_ns(tasks: Path = TASKS) -> int:
    """Nanoseconds of the thread that waited longest: a step is as late as its last thread. 0 where the kernel does not
    count it. Reads a line for each thread (some 10 us each). The second field of schedstat, see proc(5)."""
    longest = 0
    try:
        for task in tasks.iterdir():
            try:
                longest = max(longest, int((task / "schedstat").read_text().split()[1]))
            except (OSError, IndexError):  # the thread has ended meanwhile, or nothing is counted
                continue
    except OSError:
        return 0
    return longest
