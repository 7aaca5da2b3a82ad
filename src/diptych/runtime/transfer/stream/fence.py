"""The fence around the blocks of one transfer.

Two threads hold a transfer: the worker's may end it at any moment, the connector's moves bytes of its blocks. The
connector's thread holds ``lock`` while it reads or writes the blocks, and does neither once ``is_closed`` is set. The
flag is set with the lock held: a system call that was moving bytes has then returned, and no other begins.
"""

import threading


class Fence:
    """Knows nothing of the transfer."""

    __slots__ = ("is_closed", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_closed = False
