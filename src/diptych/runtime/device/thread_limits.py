"""How many threads may compute, on which CPUs, and at which priority.

Imports no torch, so that a wrong number is refused at once.
"""

import os
import sys
import threading
from collections.abc import Iterable

from diptych.base.processor import Processor
from diptych.control.errors import ConfigError

SWITCH_INTERVAL_S = 0.0005


def switch_often() -> None:
    """A thread of this process that computes in Python holds the others up for SWITCH_INTERVAL_S at most (by default 5
    ms): one that checks a schema, say, and the loop that hands on tokens."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def allowed_threads(
    num_threads: int | None, cores: Iterable[int] | None, processor: Processor
) -> tuple[tuple[int, ...], int]:
    """(CPUs, number of threads) of a process. num_threads None: one for each of ``cores``, or else for each physical
    core. Raises ConfigError when a CPU is not available or there are more threads than CPUs."""
    chosen = processor.usable if cores is None else tuple(sorted(set(cores)))
    if not chosen or not set(chosen) <= set(processor.usable):
        names = [",".join(map(str, cpus)) for cpus in (chosen, processor.usable)]
        raise ConfigError(f"cores is {names[0]}; this process may use {names[1]}", param="cores")
    usual = processor.num_threads if cores is None else len(chosen)
    count = usual if num_threads is None else num_threads
    if not 1 <= count <= len(chosen):
        raise ConfigError(f"threads is {count}; between 1 and {len(chosen)}, the number of CPUs", param="threads")
    return chosen, count


def lower_priority(niceness: int) -> None:
    """This thread runs when the others leave time for it (Linux has a niceness for each thread): so much more than they
    have."""
    if hasattr(os, "setpriority"):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + niceness))
