"""The priority of a thread beside others of its process."""

import os
import threading


def give_way(niceness: int) -> None:
    """This thread runs when the others leave time for it (Linux has a niceness for each thread): so much more than they
    have."""
    if hasattr(os, "setpriority"):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + niceness))
