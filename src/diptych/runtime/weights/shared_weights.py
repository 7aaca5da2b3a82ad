"""Weights in a file in memory (memfd) that all CPU workers of a host map: loaded and packed once, by the first of them.

The file holds a header of one page and then the tensors, in the order in which loading asks for them. The first worker
takes a lock, lays the file out, fills it, and writes the header's mark last: a file without a mark belongs to a writer
that is at work or dead, and the lock, which ends with its process, tells which. The writer, too, computes with a
mapping like all the others: pages that no process can change, and that cost memory once.

Owns the format and the election. Never knows what a tensor means.
"""

import fcntl
import gc
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from diptych.runtime.device.memory import map_file, populate
from diptych.runtime.kernels.native import ABI
from diptych.runtime.kv_cache.kv_geometry import HUGE_PAGE_BYTES
from diptych.runtime.models.model_config import ModelConfig
from diptych.runtime.weights.checkpoint import Checkpoint
from diptych.runtime.weights.weight_memory import ALIGNMENT, Fill, PrivateMemory, WeightMemory

HEADER_BYTES = 4096
MARK = b"diptych weights 1\n"

Loaded = TypeVar("Loaded")


class _Region:
    """A WeightMemory with tensors one after the other in ``file``, or nowhere (None: only ``num_bytes`` is wanted)."""

    def __init__(self, file: torch.Tensor | None, *, is_filled: bool) -> None:
        self.is_filled = is_filled
        self.num_bytes = HEADER_BYTES
        self._file = file
        self._placed: dict[int, torch.Tensor] = {}

    def new(self, shape: Sequence[int], dtype: torch.dtype, fill: Fill) -> torch.Tensor:
        start, size = self.num_bytes, math.prod(shape) * dtype.itemsize
        self.num_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        if self._file is None:
            tensor = torch.empty(*shape, dtype=dtype, device="meta")
        else:
            tensor = self._file[start : start + size].view(dtype).view(*shape)
        if not self.is_filled:
            fill(tensor)
        self._placed[id(tensor)] = tensor
        return tensor

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._placed:
            return tensor
        return self.new(tensor.shape, tensor.dtype, lambda target: target.copy_(tensor))


def weights_key(config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, ops_name: str) -> str:
    """What the bytes of a loaded model depend on: its config, its files, the dtype, and who packs."""
    statuses = [(str(path), path.stat()) for path in checkpoint.files]
    files = [(path, status.st_ino, status.st_size, status.st_mtime_ns) for path, status in statuses]
    words = json.dumps([repr(config), files, str(dtype), ops_name, ABI])
    return hashlib.sha256(words.encode()).hexdigest()


def load_shared(fd: int, key: str, load: Callable[[WeightMemory], Loaded]) -> tuple[Loaded, str]:
    """(what ``load`` gives over the shared weights, a note for people or "").

    Writes the file when no process has, else waits until it is written and reads nothing. When it holds the weights of
    another key, loads into memory of this process. ``load`` is called up to three times and must ask for the same
    tensors each time. It keeps no tensor of a call that has raised or whose result is dropped.
    """
    if _written_key(fd) is None:
        with _locked(fd):
            if _written_key(fd) is None:  # no other process wrote it while this one waited
                _write(fd, key, load)
    if _written_key(fd) != key:
        return load(
            PrivateMemory(torch.device("cpu"))
        ), "the shared weights are those of another model or dtype: loaded its own"
    region = _Region(map_file(fd, os.fstat(fd).st_size, is_shared=False), is_filled=True)
    return load(region), ""


def _write(fd: int, key: str, load: Callable[[WeightMemory], Loaded]) -> None:
    layout = _Region(None, is_filled=True)
    load(layout)
    size = -(-layout.num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    os.ftruncate(fd, 0)  # what a writer that died has left
    os.ftruncate(fd, size)
    file = map_file(fd, size, is_shared=True)
    populate(file, 0, size)
    region = _Region(file, is_filled=False)
    load(region)
    assert region.num_bytes == layout.num_bytes, "loading asked for other tensors the second time"
    del file, region
    gc.collect()  # the mapping ends here, even if a model refers to itself: a file mapped for writing cannot be sealed
    os.pwrite(fd, key.encode(), len(MARK))
    os.pwrite(fd, MARK, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)


def _written_key(fd: int) -> str | None:
    """The key of a file that was written to its end; None for any other."""
    header = os.pread(fd, HEADER_BYTES, 0)
    if not header.startswith(MARK):
        return None
    return header[len(MARK) :].rstrip(b"\0").decode()


@contextmanager
def _locked(fd: int) -> Iterator[None]:
    """Alone with the file. A record lock: it belongs to this process although the descriptor is shared."""
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
