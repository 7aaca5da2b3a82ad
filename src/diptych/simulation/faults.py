"""Faults: scripted, or random ones drawn from one seed."""

import random
from dataclasses import dataclass
from typing import Literal, get_args

from diptych.control.errors import ConfigError

FaultKind = Literal[
    "crash",
    "hang",
    "slow",
    "link_loss",
    "delay",
    "reorder",
    "duplicate",
    "repeat",
    "link_down",
    "isolate",
    "front_end_crash",
]
Channel = Literal["control", "kv"]
Direction = Literal["both", "to", "from"]
WORKER_FAULTS: tuple[FaultKind, ...] = ("crash", "hang", "slow")
MESSAGE_FAULTS: tuple[FaultKind, ...] = ("link_loss", "delay", "reorder", "duplicate")
TRANSFER_FAULTS: tuple[FaultKind, ...] = ("link_down",)
FAULTS = WORKER_FAULTS + MESSAGE_FAULTS + TRANSFER_FAULTS  # that random_faults may draw
CHANNEL_FAULTS: tuple[FaultKind, ...] = (*MESSAGE_FAULTS, "repeat")  # of the messages of any channel
ALL_FAULTS: tuple[FaultKind, ...] = (*FAULTS, "repeat", "isolate", "front_end_crash")
NEED_JOINED: tuple[FaultKind, ...] = ("isolate", "front_end_crash")  # workers that outlive their connection
KV_FAULTS: tuple[FaultKind, ...] = (*CHANNEL_FAULTS, "slow")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one worker, from ``at_ns`` for ``duration_ns``.

    crash: the worker's state is gone; it is back, empty, after the duration. hang: it takes no message and ends no
    step in the meantime (and is killed when that is longer than its heartbeat may fail). slow: its steps take
    ``factor`` times as long. link_down: no KV leaves it or comes to it. isolate: its connection to the front end is
    cut, and what is on its way there is lost; the process goes on, is given up after the heartbeat, drops its attempts,
    and is back with its cache when the fault is over. front_end_crash: not of the worker; the front end dies, and
    another begins after the duration, to which workers come back as after isolate (see front_end_life.py).

    Messages are, by link_loss, held back until the end (a connection that retransmits); by delay, late by up to
    ``factor`` milliseconds; by reorder, late by random amounts, so that they overtake each other; by duplicate,
    delivered twice; by repeat, again, late by up to ``factor`` milliseconds, after newer ones.

    channel: between the worker and the front end ("control"), or between the worker and its ``peer`` (None: every other
    worker) ("kv", where slow divides the bandwidth by ``factor``, and a link_loss for longer than Watch.resume_ns
    breaks the transfers). direction: what comes to the worker, what comes from it, or both.
    """

    kind: FaultKind
    worker: int
    at_ns: int
    duration_ns: int
    factor: float = 1.0
    channel: Channel = "control"
    direction: Direction = "both"
    peer: int | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("kind", self.kind, ALL_FAULTS),
            ("channel", self.channel, get_args(Channel)),
            ("direction", self.direction, get_args(Direction)),
        ):
            if value not in known:
                raise ConfigError(f"fault {name} is {value!r}; one of {', '.join(known)}", param=name)
        if self.worker < 0 or self.at_ns < 0 or self.duration_ns < 1:
            raise ConfigError(
                f"fault of worker {self.worker} at {self.at_ns} ns for {self.duration_ns} ns; worker and time must "
                "be at least 0, the duration at least 1",
                param="faults",
            )
        if self.kind == "slow" and self.factor < 1:
            raise ConfigError(f"factor is {self.factor}; a slow worker's is at least 1", param="factor")
        self._check_channel()

    def _check_channel(self) -> None:
        if self.channel == "kv" and self.kind not in KV_FAULTS:
            raise ConfigError(f"kind is {self.kind}; on the channel kv one of {', '.join(KV_FAULTS)}", param="channel")
        if self.peer is not None and (self.channel != "kv" or self.peer < 0 or self.peer == self.worker):
            raise ConfigError(
                f"peer of worker {self.worker} is {self.peer} on the channel {self.channel}; another worker, on the "
                "channel kv",
                param="peer",
            )
        if self.direction != "both" and self.channel == "control" and self.kind not in CHANNEL_FAULTS:
            raise ConfigError(
                f"direction of {self.kind} is {self.direction}; only messages have one: {', '.join(CHANNEL_FAULTS)}",
                param="direction",
            )

    @property
    def is_of_control_messages(self) -> bool:
        """Whether it befalls what the front end and the worker say to each other."""
        return self.channel == "control" and self.kind in CHANNEL_FAULTS

    @property
    def end_ns(self) -> int:
        """Time at which the fault is over."""
        return self.at_ns + self.duration_ns

    def befalls(self, source: int, target: int) -> bool:
        """Whether it befalls what travels from one worker to another."""
        if self.channel != "kv":
            return False
        if self.worker == source:
            return self.peer in (None, target) and self.direction != "to"
        return self.worker == target and self.peer in (None, source) and self.direction != "from"


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
