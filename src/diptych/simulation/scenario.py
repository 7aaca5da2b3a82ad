"""What to simulate: a fleet of equal workers, a workload, faults and a seed, in one frozen record."""

from dataclasses import dataclass, field, replace

from diptych.control.admission.admission_queue import AdmissionConfig, ServiceClassConfig
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.open_request import OnFailure
from diptych.control.config import EngineConfig
from diptych.control.errors import ConfigError
from diptych.control.router.routing import Disaggregate, PlacementConfig, RoutingName
from diptych.control.router.topology import LinkCost, LinkCosts
from diptych.control.step import StepFeatures
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.faults import Fault, Watch
from diptych.simulation.fleet.links import LINKS
from diptych.simulation.fleet.pools import Pools
from diptych.simulation.front_end import FrontEnd
from diptych.workload.spec import ClosedLoop, Workload

ENDLESS_NS = 2**60
OPEN_CLASS = ServiceClassConfig(ENDLESS_NS, ENDLESS_NS)
OPEN_ADMISSION = AdmissionConfig(OPEN_CLASS, OPEN_CLASS, OPEN_CLASS, max_queued=10**9)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """``simulate(Scenario(...))`` runs it.

    record_events: keep the whole event log (memory grows with the run). fast_forward: take decode steps in which
    nothing can change all at once; the log is the same either way. pools: prefill and decode on separate workers
    (then they say how many there are). warm_up: measured steps that the step-time model begins with, as a live worker's
    does (empty: the usual ones, at what the cost model says). front_end: what passes before a request reaches its
    worker; part of its queueing time. swap_block_ns: copying one block between device and host, one after the other.
    disaggregate, on_failure: as ``diptych serve`` has them. cluster: everything else that the front end's ClusterCore
    is told (None: nobody waits in the admission queue, and nobody is refused there). watch: how failures are noticed.
    """

    engine: EngineConfig
    cost: CostModel
    workload: Workload | ClosedLoop
    num_workers: int = 1
    routing: RoutingName = "least_loaded"
    faults: tuple[Fault, ...] = field(default_factory=tuple)
    seed: int = 0
    record_events: bool = False
    fast_forward: bool = True
    pools: Pools | None = None
    front_end: FrontEnd = field(default_factory=FrontEnd)
    swap_block_ns: int = 0
    warm_up: tuple[tuple[StepFeatures, int], ...] = ()
    disaggregate: Disaggregate = "auto"
    on_failure: OnFailure = "retry"
    cluster: ClusterConfig | None = None
    watch: Watch = field(default_factory=Watch)

    def __post_init__(self) -> None:
        if self.pools is not None:
            object.__setattr__(self, "num_workers", self.pools.num_workers)
        if self.num_workers < 1:
            raise ConfigError(f"num_workers is {self.num_workers}; it must be at least 1", param="num_workers")

    @property
    def cluster_config(self) -> ClusterConfig:
        """What the front end's ClusterCore is told."""
        base = self.cluster or ClusterConfig(admission=OPEN_ADMISSION)
        links = LinkCosts()
        if self.pools is not None:
            bytes_per_s, latency_ns = LINKS[self.pools.link]
            network = LinkCost(bytes_per_s, latency_ns)
            near_ns = LINKS["shared_memory"][1]
            links = LinkCosts(
                self.pools.kv_bytes_per_token, pool_latency_ns=near_ns, host=network, island=network, network=network
            )
        placement: PlacementConfig = replace(
            base.placement, routing=self.routing, disaggregate=self.disaggregate, links=links, seed=self.seed
        )
        return replace(base, placement=placement, on_failure=self.on_failure)
