"""Which CPUs and how many threads a worker computes with. Changes the process: between two steps, on their thread.

There is one OpenMP pool (torch's); the native kernels run in it. By default it has one thread for each core: the
kernels fill a core's execution units, so an SMT sibling adds nothing and takes half of the cache. More threads than
CPUs make every parallel region wait for the scheduler of the operating system, and are refused.
"""

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from diptych.base.processor import Processor, read_processor
from diptych.control.compute_share import ComputeShare
from diptych.runtime.device.thread_limits import allowed_threads
from diptych.runtime.kernels.native import load_native

logger = logging.getLogger(__name__)

TASKS = Path("/proc/self/task")  # a folder for each thread of this process


@dataclass(frozen=True, slots=True)
class ThreadSettings:
    """What was set: the CPUs of this process and the threads of its pool."""

    cores: tuple[int, ...]
    num_threads: int
    processor: Processor

    @property
    def processor_words(self) -> str:
        """The processor, with the number of its cores that have a thread."""
        return self.processor.describe(self.num_cores)

    @property
    def num_cores(self) -> int:
        """Cores that have a thread."""
        return min(self.num_threads, len(self.processor.cores_of(self.cores)))

    @property
    def words(self) -> str:
        """The processor and the threads."""
        return f"{self.processor_words}, {self.num_threads} thread{'s' if self.num_threads > 1 else ''}"


def configure_threads(
    num_threads: int | None = None,
    cores: Iterable[int] | None = None,
    *,
    bind: bool = False,
    processor: Processor | None = None,
) -> ThreadSettings:
    """Pin the process to the CPUs ``cores`` (default: where it may run now) and size the pool: one thread for each of
    ``cores``, or else for each physical core (processor.num_threads).

    bind: also keep each thread of the pool, the caller's included, on a CPU of its own, where the CPUs were named or
    every core has a thread; with fewer, the operating system finds cores that are free. For a process that does nothing
    else: on a busy machine, two threads that share a core make every step many times slower.

    Raises ConfigError when a CPU is not available or there are more threads than CPUs; warns of threads that must share
    a core or a quota.
    """
    processor = processor or read_processor()
    chosen, count = allowed_threads(num_threads, cores, processor)
    if num_threads is not None:
        _warn(count, chosen, processor)
    if cores is not None:
        _pin_process(chosen)
    torch.set_num_threads(count)
    is_placed = cores is not None or count >= len(processor.cores_of(chosen))
    if bind and is_placed and count > 1 and (library := load_native()) is not None:
        places = (ctypes.c_int64 * count)(*processor.spread(chosen)[:count])
        library.functions.diptych_bind_threads(ctypes.addressof(places), count)
    return ThreadSettings(chosen, count, processor)


class ThreadPool:
    """The CPUs and threads of a process that serves, changed while it does (see ComputeDevice)."""

    def __init__(self, settings: ThreadSettings) -> None:
        self._settings = settings

    @property
    def share(self) -> ComputeShare:
        """The present share."""
        return ComputeShare(self._settings.cores, self._settings.num_threads)

    @property
    def num_units(self) -> int:
        """Cores that have a thread."""
        return self._settings.num_cores

    def resize(self, share: ComputeShare) -> None:
        """Compute on ``share``'s CPUs and threads from the next step on; results stay the same, bit for bit. Raises
        ConfigError as ``configure_threads`` does, and then nothing has changed."""
        settings = self._settings
        self._settings = configure_threads(share.num_threads, share.cpus, bind=True, processor=settings.processor)


class BorrowedThreads:
    """The threads of a model inside of a program that is not its own. Made before the model is loaded, with
    ``bind=False``. In ``with``, they are as many as were set when it was loaded; outside, as many as the program has.
    """

    def __init__(self) -> None:
        self._outer = [torch.get_num_threads()]
        self._own = self._outer[0]
        self._before = dict(_affinities())
        self._pinned: set[int] | None = None

    def loaded(self, cores: Iterable[int] | None) -> None:
        """What is set now is the model's. cores: the CPUs that were named for it, to which the program is kept."""
        self._pinned = None if cores is None else set(cores)
        self.__exit__()

    def __enter__(self) -> None:
        self._outer.append(torch.get_num_threads())
        torch.set_num_threads(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = torch.get_num_threads()
        torch.set_num_threads(self._outer.pop())

    def give_back(self) -> None:
        """Threads that are kept to named CPUs may run again where they could; those made since, where the calling
        thread could."""
        pinned, self._pinned = self._pinned, None
        ours = self._before.get(threading.get_native_id())
        for thread, cpus in _affinities() if pinned else ():
            wanted = self._before.get(thread, ours)
            if cpus == pinned and wanted:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    os.sched_setaffinity(thread, wanted)


def _affinities() -> Iterator[tuple[int, set[int]]]:
    """Each thread of this process, and the CPUs that it may run on."""
    for thread in TASKS.iterdir() if TASKS.is_dir() and hasattr(os, "sched_getaffinity") else ():
        with contextlib.suppress(ProcessLookupError):
            yield int(thread.name), os.sched_getaffinity(int(thread.name))


def _pin_process(cpus: Iterable[int]) -> None:
    """All threads of this process may run on these CPUs, also those that it will make. Linux pins threads, not
    processes: a new thread inherits from the one that makes it."""
    if not hasattr(os, "sched_setaffinity"):
        return
    for thread in TASKS.iterdir() if TASKS.is_dir() else ():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cpus)
    os.sched_setaffinity(0, cpus)


def _warn(count: int, chosen: tuple[int, ...], processor: Processor) -> None:
    num_cores = len(processor.cores_of(chosen))
    if count > num_cores:
        logger.warning("threads is %d on %d cores: SMT siblings share a core, which is rarely faster", count, num_cores)
    if processor.quota is not None and count > max(1.0, processor.quota):
        logger.warning(
            "threads is %d; the control group grants the time of %g CPUs, so threads will be stopped in the middle of "
            "a step",
            count, processor.quota,
        )  # fmt: skip
