"""A device whose memory is the host's, and which notes what was asked of it."""

from dataclasses import dataclass, field

import torch


@dataclass
class FakeEvent:
    """Says whether somebody has waited for it."""

    is_waited_for: bool = False

    def synchronize(self) -> None:
        self.is_waited_for = True


@dataclass
class FakeMemory:
    """A DeviceMemory. events: one for each copy, in their order."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    events: list[FakeEvent] = field(default_factory=list)
    num_allocations: int = 0

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        self.num_allocations += 1
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    def record_event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]
