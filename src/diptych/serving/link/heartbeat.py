"""Signs of life of a worker: a few numbers in a mapped file of the private directory, read without its help.

Owns the layout of that file, the thread that stamps it and the reader. A stopped process stops stamping; a dead loop
stops turning while the stamps continue. Needs no message, no lock, no torch.

    int64 little endian: LAYOUT, stamp_ns, num_turns, busy_since_ns, predicted_ns   (times of time.monotonic_ns)
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FILE_NAME = "heartbeat"
LAYOUT = 1
INTERVAL_S = 0.2
_FIELDS = struct.Struct("<5q")
_STAMP, _TURNS, _BUSY, _PREDICTED = 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class Pulse:
    """What the file said. num_turns: of the loop. busy_since_ns: when the turn began that runs now (0: it sleeps, or
    does not run yet); predicted_ns: what the step of that turn should take (0: no step yet)."""

    stamp_ns: int
    num_turns: int
    busy_since_ns: int
    predicted_ns: int

    def age_ns(self, now: int) -> int:
        """How long ago the process last stamped: it is stopped, or starved, when this is many intervals."""
        return max(0, now - self.stamp_ns)

    def overdue_ns(self, now: int) -> int:
        """How much longer than predicted the loop's present turn has taken (0: it sleeps, or is in time)."""
        return max(0, now - self.busy_since_ns - self.predicted_ns) if self.busy_since_ns else 0


def read_pulse(path: Path) -> Pulse | None:
    """The signs of life in this file; None while there is none yet, or when it is gone. Raises ValueError for a file of
    another layout. The numbers are read one by one: two of them may come from neighbouring turns."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _FIELDS.size:
        return None
    layout, *values = _FIELDS.unpack_from(data)
    if layout == 0:
        return None
    if layout != LAYOUT:
        raise ValueError(f"{path} has layout {layout}; this program reads {LAYOUT}")
    return Pulse(*values)


class Heartbeat:
    """The worker's side. ``path`` None: the numbers stay in this process (a worker without a front end's directory)."""

    def __init__(self, path: Path | None = None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._map: mmap.mmap | bytearray = bytearray(_FIELDS.size)
        if path is not None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(descriptor, _FIELDS.size)
            self._map = mmap.mmap(descriptor, _FIELDS.size)
            os.close(descriptor)
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._words = memoryview(self._map).cast("q")
        self._words[_STAMP] = clock()
        self._words[0] = LAYOUT
        if self._thread is not None:
            self._thread.start()

    def begin_turn(self, now: int) -> None:
        """The loop turns once more."""
        words = self._words
        words[_PREDICTED] = 0
        words[_BUSY] = now
        words[_TURNS] += 1

    def begin_step(self, predicted_ns: int) -> None:
        """This turn executes a step that should take ``predicted_ns``."""
        self._words[_PREDICTED] = predicted_ns

    def rest(self) -> None:
        """The loop sleeps until something comes."""
        self._words[_BUSY] = 0

    def close(self) -> None:
        """Stop stamping."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            self._words[_STAMP] = self._clock()
