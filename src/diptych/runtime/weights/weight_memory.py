"""Where the weights of a model lie once they are loaded.

Owns the contract and the ordinary answer, memory of this process. The other answer is shared_weights.py. Never reads a
checkpoint and never packs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from diptych.runtime.device.memory import large_empty

SLAB_BYTES = 1 << 26  # small weights lie side by side in slabs: alone they would be too small for huge pages
ALIGNMENT = 64  # of tensors: a vector register

Fill = Callable[[torch.Tensor], object]


class WeightMemory(Protocol):
    """Memory for the tensors that stay after loading. Everything that is loaded asks for them in the same order."""

    is_filled: bool  # the tensors hold their values already: loading reads nothing and packs nothing

    def new(self, shape: Sequence[int], dtype: torch.dtype, fill: Fill) -> torch.Tensor:
        """A tensor to keep. ``fill`` writes its values, unless they are there."""
        ...

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that stays as it is: itself, or its place in this memory. Where ``is_filled``, only its shape and
        dtype are looked at."""
        ...


class PrivateMemory:
    """A WeightMemory in memory of this process alone."""

    is_filled = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slab = torch.empty(0, dtype=torch.uint8)  # what is left of the newest one

    def new(self, shape: Sequence[int], dtype: torch.dtype, fill: Fill) -> torch.Tensor:
        if self._device.type == "cpu":
            tensor = self._cut(math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)
        else:
            tensor = torch.empty(*shape, dtype=dtype, device=self._device)
        fill(tensor)
        return tensor

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _cut(self, num_bytes: int) -> torch.Tensor:
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._slab):
            slab = large_empty(max(SLAB_BYTES, size) + ALIGNMENT, torch.uint8)
            slab = slab[-slab.data_ptr() % ALIGNMENT :]
            if size >= SLAB_BYTES:  # the rest of the older slab is still good for small ones
                return slab[:num_bytes]
            self._slab = slab
        cut, self._slab = self._slab[:num_bytes], self._slab[size:]
        return cut


CPU_MEMORY = PrivateMemory(torch.device("cpu"))
