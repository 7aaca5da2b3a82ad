"""What the end of a worker process says: was it killed from outside, or did it die of what it was computing?

Owns the reading of exit statuses and of the kernel's count of processes that it killed for their memory. Must never
end a process itself.
"""

import signal
from dataclasses import dataclass
from pathlib import Path

from diptych.base.cgroups import ROOT, folders, text_of
from diptych.control.errors import DiptychError

CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
)  # what a process does to itself


@dataclass(frozen=True, slots=True)
class Loss:
    """The end of a worker process. crashed: it may have died of a request (see ``is_crash``). failed_core: its core, or
    what drives it, has failed by a defect, and left this recording ("": none). is_elsewhere: on another host; the end
    of this process would not mend it."""

    error: DiptychError
    crashed: bool
    failed_core: bool = False
    recording: str = ""
    is_elsewhere: bool = False


def is_crash(status: int, *, killed_by_us: bool, oom_kills: int) -> bool:
    """Whether what the process was computing may have killed it.

    status: the exit status, negative for a signal. oom_kills: how many processes the kernel has killed for their memory
    since this one was started. A plain SIGKILL from outside, or ours, says nothing about the requests.
    """
    if status >= 0:
        return status > 0
    if -status == signal.SIGKILL:
        return oom_kills > 0 and not killed_by_us
    return -status in CRASHES


def in_words(status: int, *, killed_because: str = "", oom_kills: int = 0) -> str:
    """The end of a process for people."""
    if killed_because:
        return f"killed: {killed_because}"
    if status == -signal.SIGKILL and oom_kills:
        return "killed by the kernel: out of memory"
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def count_oom_kills(root: Path = ROOT) -> int:
    """Processes of this process's cgroup that the kernel has killed for their memory (0 where nothing counts them)."""
    for folder in folders("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            count = _read_count(folder / name)
            if count is not None:
                return count
    return 0


def _read_count(file: Path) -> int | None:
    rows = [line.split() for line in text_of(file).splitlines()]
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == "oom_kill"), None)
