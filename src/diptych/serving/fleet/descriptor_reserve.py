"""File descriptors that are held open for nothing, so that whatever needs some later finds them, even when this process
has reached its limit (``ulimit -n``) in the meantime."""

import contextlib
import os


class DescriptorReserve:
    """Up to ``size`` descriptors. ``release`` them right before they are needed, and ``fill`` the reserve again as soon
    as others were closed; between the two, without a wait, nothing else of this thread can take them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._descriptors: list[int] = []

    def __len__(self) -> int:
        return len(self._descriptors)

    def fill(self) -> None:
        """Open what is missing, as far as the limit allows."""
        with contextlib.suppress(OSError):  # there are no more: ``len`` says how many it has
            while len(self._descriptors) < self._size:
                self._descriptors.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def release(self) -> None:
        """Close them all."""
        while self._descriptors:
            os.close(self._descriptors.pop())
