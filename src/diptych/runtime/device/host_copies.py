"""Copies between the host and a GPU that nothing waits for: arrays of a step in one, results of a step in another.

On a CPU the device's memory is the host's, and nothing is copied. Must be used on the thread that computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16  # bytes: kernels load whole vectors from arrays that begin so
BUFFERS = 2  # that are filled in turn: while one is copied, the next is written


class Event(Protocol):
    """A point in the order of a device's work."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        ...


class DeviceMemory(Protocol):
    """What is asked of a device besides computing."""

    device: torch.device

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device reads and writes by itself, uint8 [num_bytes]."""
        ...

    def record_event(self) -> Event:
        """A point behind all work that was given to the device so far."""
        ...


class CudaMemory:
    """DeviceMemory of a GPU, on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def record_event(self) -> Event:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        recorded: Event = event
        return recorded


def memory_of(device: torch.device) -> DeviceMemory | None:
    """None where the device computes in the host's memory."""
    return None if device.type == "cpu" else CudaMemory(device)


class _Buffer:
    """Page-locked memory that grows, and when it may be written again."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.copied: Event | None = None

    def of_size(self, num_bytes: int, device: DeviceMemory) -> torch.Tensor:
        """The first ``num_bytes`` bytes, once the copy of before is done."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        if self.memory is None or len(self.memory) < num_bytes:
            self.memory = device.page_locked(max(num_bytes, 2 * len(self.memory) if self.memory is not None else 4096))
        return self.memory[:num_bytes]


@dataclass(frozen=True, slots=True)
class Copied:
    """Arrays on a device. memory: the bytes of all of them, each at its offset; None on a CPU, where they are those of
    the host."""

    tensors: list[torch.Tensor]
    memory: torch.Tensor | None = None
    offsets: tuple[int, ...] = ()

    def packed(self, count: int) -> torch.Tensor | None:
        """The bytes of the first ``count`` tensors, uint8."""
        if self.memory is None:
            return None
        return self.memory[: self.offsets[count]] if count < len(self.offsets) else self.memory


class ToDevice:
    """Brings the arrays of a step to the device, all in one copy that the host does not wait for. copies: whether
    anything is copied at all."""

    def __init__(self, memory: DeviceMemory | None) -> None:
        self._memory = memory
        self._buffers = [_Buffer() for _ in range(BUFFERS)]
        self.copies = memory is not None

    def copy(self, arrays: Sequence[npt.NDArray[Any]]) -> Copied:
        """The arrays on the device, in their order, each at a multiple of ALIGNMENT bytes. They may be written again
        when this returns, but on a CPU, where they are not copied."""
        if self._memory is None:
            return Copied([torch.from_numpy(array) for array in arrays])
        offsets: list[int] = []
        size = 0
        for array in arrays:
            offsets.append(size)
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        buffer = self._buffers[0]
        self._buffers = [*self._buffers[1:], buffer]
        staged = buffer.of_size(size, self._memory)
        host = staged.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            part = host[offset : offset + array.nbytes]
            np.copyto(part.view(array.dtype).reshape(array.shape), array)
        on_device = torch.empty(size, dtype=torch.uint8, device=self._memory.device)
        on_device.copy_(staged, non_blocking=True)
        buffer.copied = self._memory.record_event()
        tensors = [
            on_device[offset : offset + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]
        return Copied(tensors, on_device, tuple(offsets))


class FromDevice:
    """Brings one small tensor to the host. The host waits when it reads it."""

    def __init__(self, tensor: torch.Tensor, memory: DeviceMemory | None) -> None:
        self._copied: Event | None = None
        self._host = tensor
        if memory is not None:
            size = tensor.numel() * tensor.element_size()
            self._host = memory.page_locked(size).view(tensor.dtype).view(tensor.shape)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = memory.record_event()

    def numpy(self) -> npt.NDArray[Any]:
        """The tensor in host memory, once it is there."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._host.numpy()


_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.bool_): torch.bool,
}
