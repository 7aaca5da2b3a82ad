"""Large CPU memory on huge pages: reading weights and KV at memory speed is a quarter faster when fewer pages are
walked. Private tensors, and files in memory (memfd) that several processes map.

Huge pages are asked for and never insisted on: where the system does not offer them, nothing changes but speed.
"""

import ctypes
import functools
import sys
import threading
import weakref

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.device.thread_limits import lower_priority
from diptych.runtime.kv_cache.kv_geometry import HUGE_PAGE_BYTES

PROT_NONE, PROT_READ_WRITE = 0, 3
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS = 1, 2, 0x10, 0x20
MADV_HUGEPAGE, MADV_POPULATE_WRITE, MADV_COLLAPSE = 14, 23, 25
POPULATE_BYTES = 64 << 20  # at a time, beside other work
POPULATE_NICENESS = 10
MAP_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mmap.restype = ctypes.c_void_p
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def large_empty(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised 1-d CPU tensor whose inner pages may be huge."""
    tensor = torch.empty(num_elements, dtype=dtype)
    start = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = (tensor.data_ptr() + tensor.nbytes - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    library = _libc()
    if library is not None and length > 0:
        library.madvise(start, length, MADV_HUGEPAGE)  # advice: a refusal is no error
    return tensor


def map_file(fd: int, num_bytes: int, *, is_shared: bool) -> torch.Tensor:
    """The first ``num_bytes`` of a file in memory as a 1-d uint8 tensor that begins at a whole huge page.

    is_shared: what is written is seen by every process that maps the file; otherwise it stays with this process, and
    what is not written is still shared memory. The tensor (and every view of it) keeps the mapping, not the descriptor.
    Raises ConfigError when the file cannot be mapped.
    """
    library = _libc()
    if library is None:
        raise ConfigError(f"memory is shared between workers on linux only, not on {sys.platform}", param="shared")
    length = num_bytes + HUGE_PAGE_BYTES
    base = library.mmap(None, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if base == MAP_FAILED:
        raise ConfigError(f"no room for a mapping of {num_bytes} bytes (errno {ctypes.get_errno()})", param="shared")
    start = -(-base // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    kind = MAP_SHARED if is_shared else MAP_PRIVATE
    mapped = library.mmap(start, num_bytes, PROT_READ_WRITE, kind | MAP_FIXED, fd, 0)
    if mapped == MAP_FAILED:
        code = ctypes.get_errno()
        library.munmap(base, length)
        raise ConfigError(f"descriptor {fd} cannot be mapped (errno {code})", param="shared")
    buffer = (ctypes.c_byte * num_bytes).from_address(start)
    weakref.finalize(buffer, library.munmap, base, length).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8)


def zero_pages(num_bytes: int) -> torch.Tensor:
    """Zeros in private CPU memory, as a 1-d uint8 tensor that begins at a whole huge page."""
    tensor = torch.zeros(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
    first = -tensor.data_ptr() % HUGE_PAGE_BYTES
    return tensor[first : first + num_bytes]


def populate_beside(region: torch.Tensor) -> threading.Thread | None:
    """``populate`` all of a region on a thread that gives way to others, so that nothing waits for it and whatever is
    written there later need not wait for memory. None where there is nothing to do, or no way to do it."""
    if _libc() is None or not len(region):
        return None

    def run() -> None:
        lower_priority(POPULATE_NICENESS)
        for start in range(0, len(region), POPULATE_BYTES):
            populate(region, start, min(start + POPULATE_BYTES, len(region)))

    thread = threading.Thread(target=run, name="populate", daemon=True)
    thread.start()
    return thread


def populate(region: torch.Tensor, start: int, end: int) -> None:
    """Have the pages of bytes [start, end) of a mapped file in memory, in huge pages where that is possible.

    ``region``: 1-d uint8, beginning at a whole huge page. No byte changes, so others may use the range meanwhile.
    Neighbouring ranges share the huge page on their border: it is made by the call for the later one.
    """
    library = _libc()
    assert library is not None and region.data_ptr() % HUGE_PAGE_BYTES == 0
    first, last = (byte // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES for byte in (start, end))
    if last > first:
        # a collapse needs one page to start from; unlike MADV_HUGEPAGE, it works where shared memory has small pages
        # by default (madvise(2))
        region[first:last:HUGE_PAGE_BYTES].sum()
        library.madvise(region.data_ptr() + first, last - first, MADV_COLLAPSE)
    library.madvise(region.data_ptr() + first, end - first, MADV_POPULATE_WRITE)
