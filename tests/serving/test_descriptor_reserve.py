"""File descriptors that are held for later."""

import contextlib
import os

from diptych.serving.fleet.descriptor_reserve import DescriptorReserve


def open_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed again
            os.fstat(int(name))
            found.add(int(name))
    return found


def test_a_reserve_takes_its_descriptors_and_gives_them_back() -> None:
    before = open_descriptors()
    reserve = DescriptorReserve(5)
    assert len(reserve) == 0
    reserve.fill()
    reserve.fill()
    assert len(reserve) == len(open_descriptors() - before) == 5
    reserve.release()
    assert len(reserve) == len(open_descriptors() - before) == 0


def test_a_process_that_is_started_does_not_inherit_them() -> None:
    reserve = DescriptorReserve(1)
    before = open_descriptors()
    reserve.fill()
    [descriptor] = open_descriptors() - before
    assert not os.get_inheritable(descriptor)
    reserve.release()


def test_a_reserve_that_cannot_be_filled_is_filled_later(limited: None) -> None:
    reserve = DescriptorReserve(5)
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    reserve.fill()
    assert len(reserve) == 0
    for descriptor in held[:3]:
        os.close(descriptor)
    reserve.fill()
    assert len(reserve) == 3
    for descriptor in held[3:]:
        os.close(descriptor)
    reserve.fill()
    assert len(reserve) == 5
    reserve.release()
