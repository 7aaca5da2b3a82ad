"""Where the weights of a model lie once they are loaded: the one question that loading asks of its surroundings.

Owns the contract and the ordinary answer, memory of this process. The other answer is shared_weights.py. Never reads a
checkpoint and never packs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from diptych.runtime.memory import large_empty

Fill = Callable[[torch.Tensor], object]


class WeightMemory(Protocol):
    """Memory for the tensors that stay after loading. Everything that is loaded asks for them in the same order."""

    is_filled: bool  # the tensors hold their values already: whoever loads reads nothing and packs nothing

    def new(self, shape: Sequence[int], dtype: torch.dtype, fill: Fill) -> torch.Tensor:
        """A tensor to keep. ``fill`` writes its values, unless they are there."""
        ...

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that stays as it is: itself, or its place in this memory. Where ``is_filled``, only its shape and
        dtype are looked at."""
        ...


class PrivateMemory:
    """See WeightMemory: memory of this process."""

    is_filled = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self, shape: Sequence[int], dtype: torch.dtype, fill: Fill) -> torch.Tensor:
        """See WeightMemory."""
        if self._device.type == "cpu":
            tensor = large_empty(math.prod(shape), dtype).view(*shape)
        else:
            tensor = torch.empty(*shape, dtype=dtype, device=self._device)
        fill(tensor)
        return tensor

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """See WeightMemory."""
        return tensor


CPU_MEMORY = PrivateMemory(torch.device("cpu"))
