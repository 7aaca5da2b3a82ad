"""The clock of every time stamp in this package, and the kernel's times of arrival on that clock.

On Linux the kernel says with received bytes when they came (SO_TIMESTAMPNS, socket(7)), by the wall clock. What has
passed since then is taken off the monotonic clock: a client that was busy stamps a token no later, and a correction of
the wall clock between two tokens moves neither.

The kernel starts to take these times a moment after the first socket asks for them; until then, and on other systems,
the time of reading stands in.
"""

import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence

from diptych.control.slo import NS_PER_MS, NS_PER_S

Clock = Callable[[], int]  # nanoseconds
now_ns: Clock = time.perf_counter_ns

ANCILLARY_BYTES = 64  # what recvmsg must have room for
_SO_TIMESTAMPNS = 35  # Python has no name for it
_TIMESPEC = struct.Struct("qq")  # seconds and nanoseconds of the wall clock
_MAX_AGE_NS = 10 * NS_PER_S  # an older arrival is not believed: the wall clock was set in between
_MAX_APART_NS = NS_PER_MS // 50  # between the readings of the two clocks; after longer ones both are read again
_MAX_READINGS = 4


def ask_for_arrival_times(opened: socket.socket) -> None:
    """Let the kernel attach the time of arrival to what this socket receives, where it can."""
    if sys.platform == "linux":
        opened.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def arrival_ns(
    ancillary: Sequence[tuple[int, int, bytes]], monotonic: Clock = now_ns, wall: Clock = time.time_ns
) -> int:
    """When bytes came that were received just now with this ancillary data (recvmsg), on the monotonic clock.

    The two clocks must be read together: if the thread lost its core in between, the age would be too large by as much.
    """
    now = monotonic()
    if not ancillary:
        return now
    seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2])
    came = seconds * NS_PER_S + nanoseconds
    age = wall() - came
    for _ in range(_MAX_READINGS - 1):
        if monotonic() - now <= _MAX_APART_NS:
            break
        now = monotonic()
        age = wall() - came
    return now - age if 0 < age < _MAX_AGE_NS else now
