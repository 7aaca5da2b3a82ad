"""The garbage collector of a process that serves: everything stops while it looks for objects that hold each other in
circles, and what was loaded at the start is most of what it looks through."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (1_000, 10, 100)  # new objects until the young are looked at; such turns until the older are, and the old


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause the collector, unless ``leave_alone_what_is_loaded`` ends the pause before. For the start of a process: it
    imports and builds what stays, and a sixth of the time of its imports went into looking for garbage there."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def leave_alone_what_is_loaded() -> None:
    """What there is now stays for as long as the process lives: it is not looked through again, and the old seldom.
    (A full look through a server's modules takes 0.1 s, and under load there was one every quarter of a minute. What
    requests leave is freed without: see Generation.close.)"""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()
