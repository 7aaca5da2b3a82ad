"""Times of arrival by the kernel's clock, as times of the monotonic clock."""

import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from diptych.bench.clock import ANCILLARY_BYTES, arrival_ns, ask_for_arrival_times, now_ns
from diptych.control.slo import NS_PER_MS, NS_PER_S

WALL = 1_700_000_000 * NS_PER_S  # minus the monotonic clock


def stamped(monotonic_ns: int) -> list[tuple[int, int, bytes]]:
    """What the kernel says of bytes that came at that time of the monotonic clock."""
    return [(socket.SOL_SOCKET, 35, struct.pack("qq", *divmod(WALL + monotonic_ns, NS_PER_S)))]


def clocks(times: Iterator[int]) -> tuple[Callable[[], int], Callable[[], int]]:
    """A monotonic clock and a wall clock; each reading is the next of these times."""
    return lambda: next(times), lambda: WALL + next(times)


def ticking(start_ns: int, step_ns: int = 50) -> Iterator[int]:
    """Times of which each is a step after the last."""
    return iter(range(start_ns, start_ns + 1000 * step_ns, step_ns))


@pytest.mark.parametrize("waited_ns", [1, 999, NS_PER_MS, 3 * NS_PER_S])
def test_a_token_that_waited_is_stamped_with_its_arrival(waited_ns: int) -> None:
    came = 7 * NS_PER_S
    found = arrival_ns(stamped(came), *clocks(ticking(came + waited_ns)))
    assert abs(found - came) <= 50


def test_without_the_kernels_time_it_is_that_of_reading() -> None:
    assert arrival_ns([], *clocks(ticking(123))) == 123


@pytest.mark.parametrize("came_ns", [-11 * NS_PER_S, 5 * NS_PER_S], ids=["long ago", "in the future"])
def test_a_time_that_cannot_be_is_not_believed(came_ns: int) -> None:
    assert arrival_ns(stamped(came_ns), *clocks(ticking(4 * NS_PER_S))) == 4 * NS_PER_S


def test_a_thread_that_loses_its_core_between_the_two_clocks_reads_them_again() -> None:
    came, lost = 1000, 4 * NS_PER_MS
    times = iter([2000, 2000 + lost, 2050 + lost, 2100 + lost, 2150 + lost, 2200 + lost])
    found = arrival_ns(stamped(came), *clocks(times))
    assert abs(found - came) <= 50


def test_clocks_that_take_long_to_read_are_not_read_for_ever() -> None:
    found = arrival_ns(stamped(0), *clocks(ticking(NS_PER_S, NS_PER_MS)))
    assert abs(found) <= NS_PER_MS


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel says when something came")
def test_the_kernel_says_when_something_came() -> None:
    """The receiver reads 50 ms after the sender has sent; the time of arrival is before that. Not at every try: the
    kernel begins to take times a moment after it was asked to, and may deliver late on a busy machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as sender:
        sender.connect(listening.getsockname())
        receiver, _ = listening.accept()
        with receiver:
            ask_for_arrival_times(receiver)
            for _ in range(100):
                before = now_ns()
                sender.sendall(b"x")
                time.sleep(0.05)
                read = now_ns()
                _, ancillary, _, _ = receiver.recvmsg(16, ANCILLARY_BYTES)
                arrival = arrival_ns(ancillary)
                assert arrival > before - NS_PER_MS
                if arrival < read:
                    return
    pytest.fail("no time of arrival was before the time of reading")
