"""Which cores and how many threads a worker computes with. Changes the process: call it once, before the first step.

There is one OpenMP pool (torch's); the native kernels run in it. More threads than cores make every parallel region
wait for the scheduler of the operating system.
"""

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.native import load_native


@dataclass(frozen=True, slots=True)
class ThreadSettings:
    """What was set: the cores of this process and the threads of its pool."""

    cores: tuple[int, ...]
    num_threads: int


def available_cores() -> tuple[int, ...]:
    """The cores that this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def configure_threads(
    num_threads: int | None = None, cores: Iterable[int] | None = None, *, bind: bool = False
) -> ThreadSettings:
    """Pin the process to ``cores`` (default: where it may run now) and size the pool (default: one thread a core).

    bind: also keep each thread of the pool, the caller's included, on a core of its own. For a process that does
    nothing else: on a busy machine, two threads that share a core make every step many times slower.

    Raises ConfigError when a core is not available or there are more threads than cores.
    """
    allowed = available_cores()
    chosen = allowed if cores is None else tuple(sorted(set(cores)))
    if not chosen or not set(chosen) <= set(allowed):
        raise ConfigError(f"cores is {chosen}; this process may use {allowed}", param="cores")
    count = len(chosen) if num_threads is None else num_threads
    if not 1 <= count <= len(chosen):
        raise ConfigError(f"threads is {count}; between 1 and {len(chosen)}, the number of cores", param="threads")
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, chosen)
    torch.set_num_threads(count)
    if bind and count > 1 and (library := load_native()) is not None:
        places = (ctypes.c_int64 * count)(*chosen[:count])
        library.functions.diptych_bind_threads(ctypes.addressof(places), count)
    return ThreadSettings(chosen, count)
