"""Settings of the planner."""

from dataclasses import dataclass
from typing import Literal, get_args

from diptych.control.config import PresetName
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S

PlanMode = Literal["auto", "advise", "off"]
MAX_CANDIDATES = 24


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """Equal workers of an unequal fleet. shapes: that they may have."""

    name: str
    shapes: tuple[PresetName, ...]


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """mode: carry changes out, or only show them. Times in nanoseconds.

    tick_ns: between two observations. window_ns: recorded arrivals that the twin replays, at most ``max_replayed`` of
    them, again and again for at least ``least_replay_ns``. horizon_ns: how far ahead the rate is forecast. margin: of
    the requests asked for, how many more must be served in time for a change to win, ``wins`` times running; smaller
    gains, of at least ``least_gain`` each time, add up to as much. tolerance:
    share of the goodput that a fleet with fewer workers may lose. cooldown_ns: between two changes. stale_ns: age at
    which a worker's load report counts as lost. min_arrivals: below it, the window says nothing. max_candidates:
    configurations that one question compares, the present one included. twin_share: of one core, for the twin in the
    long run; twin_burst_ns: processor time by which it may be ahead of that. max_workers: how many there may be (0: as
    many as there are). shapes: of workers that decode. pools: that have other shapes.
    """

    mode: PlanMode = "advise"
    tick_ns: int = 5 * NS_PER_S
    window_ns: int = 60 * NS_PER_S
    horizon_ns: int = 20 * NS_PER_S
    least_replay_ns: int = 20 * NS_PER_S
    margin: float = 0.05
    wins: int = 2
    least_gain: float = 0.02
    tolerance: float = 0.01
    cooldown_ns: int = 20 * NS_PER_S
    stale_ns: int = 15 * NS_PER_S
    min_arrivals: int = 20
    max_replayed: int = 600
    max_candidates: int = 8
    twin_share: float = 0.1
    twin_burst_ns: int = 10 * NS_PER_S
    max_workers: int = 0
    shapes: tuple[PresetName, ...] = ("chunked",)
    pools: tuple[PlannedPool, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in get_args(PlanMode):
            raise ConfigError(f"plan is {self.mode!r}; {', '.join(get_args(PlanMode))}", param="plan")
        for name, least in (
            ("tick_ns", 1), ("window_ns", 1), ("horizon_ns", 0), ("wins", 1), ("cooldown_ns", 0), ("stale_ns", 1),
            ("min_arrivals", 1), ("max_replayed", 1), ("max_candidates", 2), ("max_workers", 0),
            ("twin_burst_ns", 0), ("least_replay_ns", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}", param=name)
        if self.max_candidates > MAX_CANDIDATES:
            message = f"max_candidates is {self.max_candidates}; it must be at most {MAX_CANDIDATES}"
            raise ConfigError(message, param="max_candidates")
        for name, most in (("margin", 1.0), ("least_gain", 1.0), ("tolerance", 1.0), ("twin_share", 1.0)):
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; above 0, at most {most:g}", param=name)
        if not all((self.shapes, *(pool.shapes for pool in self.pools))):
            raise ConfigError("shapes is empty; at least one", param="shapes")
