"""The compute units of a machine that one worker uses: a resource that can move between workers like memory.

A *unit* is what a step's time is divided by: on a processor a core that has a thread, on a GPU a multiprocessor.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComputeShare:
    """What a worker computes on. On a processor: the CPUs ``cpus`` and ``num_threads`` threads on them (0: the worker
    computes elsewhere). On a GPU: ``num_sms`` of its multiprocessors (0: not on a GPU, or on one that cannot be
    divided)."""

    cpus: tuple[int, ...] = ()
    num_threads: int = 0
    num_sms: int = 0

    @property
    def num_units(self) -> int:
        """Threads or multiprocessors; 0 when it is not known."""
        return self.num_threads or self.num_sms

    def __str__(self) -> str:
        """The share in words: "CPUs 0-3, 4 threads" or "66 multiprocessors"."""
        if self.num_threads:
            return f"CPUs {cpu_ranges(self.cpus)}, {self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{self.num_sms} multiprocessors" if self.num_sms else "an undivided device"


def cpu_ranges(cpus: tuple[int, ...]) -> str:
    """The shortest list of CPUs: (0, 1, 2, 8) is "0-2,8"."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and cpu == ranges[-1][-1] + 1:
            ranges[-1][1:] = [cpu]
        else:
            ranges.append([cpu])
    return ",".join("-".join(map(str, ends)) for ends in ranges)
