"""What to simulate: a fleet of equal replicas, a workload, faults and a seed, in one frozen record."""

from dataclasses import dataclass, field
from typing import Literal

from diptych.control.config import ReplicaConfig
from diptych.control.errors import ConfigError
from diptych.control.step import StepFeatures
from diptych.simulation.costs.interface import CostModel
from diptych.simulation.faults import MESSAGE_FAULTS, WORKER_FAULTS, Fault
from diptych.simulation.front_end import FrontEnd
from diptych.simulation.pools import Pools
from diptych.simulation.workload.spec import ClosedLoop, Workload

RoutingName = Literal["kv_aware", "round_robin", "least_loaded", "power_of_two"]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """``simulate(Scenario(...))`` runs it.

    record_events: keep the whole event log (memory grows with the run). fast_forward: take decode steps in which
    nothing can change all at once; the log is the same either way. pools: prefill and decode on separate replicas
    (then they say how many there are). warm_up: measured steps that the step-time model begins with, as a live worker's
    does (empty: the usual ones, at what the cost model says). front_end: what passes before a request reaches its
    replica; part of its queueing time. swap_block_ns: copying one block between device and host, one after the other.
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
    pools: Pools | None = None
    front_end: FrontEnd = field(default_factory=FrontEnd)
    swap_block_ns: int = 0
    warm_up: tuple[tuple[StepFeatures, int], ...] = ()

    def __post_init__(self) -> None:
        if self.pools is not None:
            object.__setattr__(self, "num_replicas", self.pools.num_prefill + self.pools.num_decode)
            if any(fault.kind in MESSAGE_FAULTS for fault in self.faults):
                raise ConfigError(
                    f"faults of messages are not simulated with pools; only {WORKER_FAULTS}", param="faults"
                )
        if self.num_replicas < 1:
            raise ConfigError(f"num_replicas is {self.num_replicas}; it must be at least 1", param="num_replicas")
