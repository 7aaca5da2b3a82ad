"""What to simulate: a fleet of equal replicas, a workload, faults and a seed, in one frozen record."""

from dataclasses import dataclass, field
from typing import Literal

from diptych.control.config import ReplicaConfig
from diptych.control.errors import ConfigError
from diptych.simulation.costs.interface import CostModel
from diptych.simulation.faults import Fault
from diptych.simulation.workload.spec import ClosedLoop, Workload

RoutingName = Literal["round_robin", "least_loaded", "power_of_two"]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """``simulate(Scenario(...))`` runs it.

    record_events: keep the whole event log (memory grows with the run). fast_forward: take decode steps in which
    nothing can change all at once; the log is the same either way.
    """

    replica: ReplicaConfig
    cost: CostModel
    workload: Workload | ClosedLoop
    num_replicas: int = 1
    routing: RoutingName = "least_loaded"
    faults: tuple[Fault, ...] = field(default_factory=tuple)
    seed: int = 0
    record_events: bool = False
    fast_forward: bool = True

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigError(f"num_replicas is {self.num_replicas}; it must be at least 1", param="num_replicas")
