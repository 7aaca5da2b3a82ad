"""Faults: scripted, or random ones drawn from one seed."""

import random
from dataclasses import dataclass
from typing import Literal

from diptych.control.errors import ConfigError

FaultKind = Literal["crash", "hang", "slow", "link_loss", "delay", "reorder", "duplicate", "link_down"]
WORKER_FAULTS: tuple[FaultKind, ...] = ("crash", "hang", "slow")
MESSAGE_FAULTS: tuple[FaultKind, ...] = ("link_loss", "delay", "reorder", "duplicate")
TRANSFER_FAULTS: tuple[FaultKind, ...] = ("link_down",)
FAULTS = WORKER_FAULTS + MESSAGE_FAULTS + TRANSFER_FAULTS


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one worker, from ``at_ns`` for ``duration_ns``.

    crash: the worker's state is gone; it is back, empty, after the duration. hang: it takes no message and ends no
    step in the meantime (and is killed when that is longer than its heartbeat may fail). slow: its steps take
    ``factor`` times as long. Messages between it and the front end are, in both directions, by link_loss, held back
    until the end (a connection that retransmits); by delay, late by up to ``factor`` milliseconds; by reorder, late by
    random amounts, so that they overtake each other; by duplicate, delivered twice. link_down: no KV leaves it or
    comes to it.
    """

    kind: FaultKind
    worker: int
    at_ns: int
    duration_ns: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise ConfigError(f"fault kind is {self.kind!r}; one of {', '.join(FAULTS)}", param="kind")
        if self.worker < 0 or self.at_ns < 0 or self.duration_ns < 1:
            raise ConfigError(
                f"fault of worker {self.worker} at {self.at_ns} ns for {self.duration_ns} ns; worker and time must "
                "be at least 0, the duration at least 1",
                param="faults",
            )
        if self.kind == "slow" and self.factor < 1:
            raise ConfigError(f"factor is {self.factor}; a slow worker's is at least 1", param="factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How the front end notices. detection_ns: from the end of a process until the front end knows of it. heartbeat_ns:
    a worker that hangs for longer is killed. resume_ns: how long the ends of a broken KV connection try to resume it.
    max_lost_tokens: up to this many of each stream's newest tokens are lost with a worker, unsent."""

    detection_ns: int = 10_000_000
    heartbeat_ns: int = 10_000_000_000
    resume_ns: int = 2_000_000_000
    max_lost_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (("detection_ns", 1), ("heartbeat_ns", 1), ("resume_ns", 1), ("max_lost_tokens", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}", param=name)


def random_faults(
    seed: int,
    *,
    num_workers: int,
    until_ns: int,
    count: int,
    kinds: tuple[FaultKind, ...] = WORKER_FAULTS + MESSAGE_FAULTS,
    mean_duration_ns: int = 5_000_000_000,
) -> tuple[Fault, ...]:
    """``count`` faults at uniform times of random workers; equal arguments give equal faults."""
    rng = random.Random(seed)
    faults = []
    for _ in range(count):
        kind = kinds[rng.randrange(len(kinds))]
        worker = rng.randrange(num_workers)
        at_ns = rng.randrange(max(1, until_ns))
        duration_ns = 1 + rng.randrange(2 * mean_duration_ns)
        factor = 1.0 + rng.randrange(1, 90) / 10
        faults.append(Fault(kind, worker, at_ns, duration_ns, factor))
    return tuple(sorted(faults, key=lambda fault: (fault.at_ns, fault.worker, fault.kind)))
