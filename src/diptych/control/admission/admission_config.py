"""Settings of the admission queue: its service classes, and how many requests wait."""

from dataclasses import dataclass, field

from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S


@dataclass(frozen=True, slots=True)
class ServiceClassConfig:
    """One service class. max_wait_ns: shed at once when the predicted queue time is longer. max_queue_ns: refused after
    waiting this long. queue_percent: shed when the queue is this full. promote_ns: a class whose oldest request has
    waited this long gets a share of the dispatches (0: never)."""

    max_wait_ns: int
    max_queue_ns: int
    queue_percent: int = 100
    promote_ns: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_wait_ns", 1), ("max_queue_ns", 1), ("queue_percent", 1), ("promote_ns", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}", param=name)
        if self.queue_percent > 100:
            raise ConfigError(f"queue_percent is {self.queue_percent}; it must be at most 100", param="queue_percent")


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """max_queued: requests that wait in all. max_queued_per_tenant: of one tenant (0: no limit of its own)."""

    interactive: ServiceClassConfig = field(
        default_factory=lambda: ServiceClassConfig(120 * NS_PER_S, 300 * NS_PER_S, 100)
    )
    standard: ServiceClassConfig = field(
        default_factory=lambda: ServiceClassConfig(60 * NS_PER_S, 300 * NS_PER_S, 80, 10 * NS_PER_S)
    )
    batch: ServiceClassConfig = field(
        default_factory=lambda: ServiceClassConfig(3600 * NS_PER_S, 24 * 3600 * NS_PER_S, 50)
    )
    max_queued: int = 4096
    max_queued_per_tenant: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_queued", 1), ("max_queued_per_tenant", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}", param=name)
