"""Which multiprocessors of a GPU a worker computes on: all of them, or those of a CUDA green context.

The CUDA counterpart of ``threads``. A green context limits how many multiprocessors a process uses. Which ones they are
is the choice of the driver, and two processes may get the same ones.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from diptych.control.compute_share import ComputeShare
from diptych.control.errors import ConfigError

SMALLEST = 8  # multiprocessors of a green context: the driver gives out multiples of 8 (compute capability 9)


class GreenContext(Protocol):
    """What is used of torch.cuda.green_contexts.GreenContext."""

    def set_context(self) -> None:
        """Compute on its multiprocessors from now on, on this thread."""
        ...

    def pop_context(self) -> None:
        """Compute on what was used before."""
        ...


Create = Callable[[int], GreenContext]  # with this number of multiprocessors


class Multiprocessors:
    """The multiprocessors of one GPU, changed while a worker serves (see ComputeDevice). create: None where PyTorch or
    the driver has no green contexts. on_change: what was captured for the multiprocessors of before is of no use."""

    def __init__(self, total: int, create: Create | None, on_change: Callable[[], None]) -> None:
        self._total = total
        self._create = create
        self._on_change = on_change
        self._count = total
        self._context: GreenContext | None = None

    @property
    def share(self) -> ComputeShare:
        """The present share; none where the GPU cannot be divided."""
        return ComputeShare(num_sms=self._count if self._create else 0)

    @property
    def num_units(self) -> int:
        """Multiprocessors."""
        return self._count

    def resize(self, share: ComputeShare) -> None:
        """Compute on ``share``'s multiprocessors from the next step on. Raises ConfigError when the GPU cannot be
        divided, has fewer, or the driver refuses; nothing has changed then."""
        if self._create is None:
            raise ConfigError("num_sms: PyTorch or the driver here has no CUDA green contexts", param="num_sms")
        if not SMALLEST <= share.num_sms <= self._total:
            raise ConfigError(
                f"num_sms is {share.num_sms}; between {SMALLEST} and {self._total}, what the GPU has", param="num_sms"
            )
        try:
            context = None if share.num_sms == self._total else self._create(share.num_sms)
        except RuntimeError as error:
            raise ConfigError(f"num_sms is {share.num_sms}: {str(error).splitlines()[0]}", param="num_sms") from error
        if self._context is not None:
            self._context.pop_context()
        if context is not None:
            context.set_context()
        self._context, self._count = context, share.num_sms
        self._on_change()


def multiprocessors_of(device: torch.device, on_change: Callable[[], None]) -> Multiprocessors:
    """The multiprocessors of a GPU."""
    total: int = torch.cuda.get_device_properties(device).multi_processor_count
    return Multiprocessors(total, _green_contexts(device), on_change)


def _green_contexts(device: torch.device) -> Create | None:
    """PyTorch's green contexts of a GPU; None where it has none (before 2.9, or built for an older CUDA)."""
    if find_spec("torch.cuda.green_contexts") is None:
        return None
    module: Any = import_module("torch.cuda.green_contexts")
    if not module.SUPPORTED:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return lambda count: module.GreenContext.create(num_sms=count, device_id=index)
