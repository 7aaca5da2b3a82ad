"""What to simulate: a fleet, a workload, faults and a seed, in one frozen record."""

from dataclasses import dataclass, field, replace

from diptych.control.admission.admission_config import AdmissionConfig, ServiceClassConfig
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.compute_share import ComputeShare
from diptych.control.config import EngineConfig, SchedulerConfig
from diptych.control.errors import ConfigError
from diptych.control.router.routing import RoutingConfig, RoutingName
from diptych.control.router.topology import LinkCost, LinkCosts, Role
from diptych.control.step import StepFeatures
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.faults import NEED_JOINED, Fault, Watch
from diptych.simulation.fleet.links import LINKS
from diptych.simulation.fleet.pools import LOCAL_LINK, Pools
from diptych.simulation.fleet.simulated_disk import DiskModel
from diptych.simulation.fleet.simulated_drafts import SimulatedDrafts
from diptych.simulation.serving_engine import FrontEnd
from diptych.workload.spec import ClosedLoop, Workload

_ENDLESS_NS = 2**60
_OPEN_CLASS = ServiceClassConfig(_ENDLESS_NS, _ENDLESS_NS)
ADMIT_ALL = AdmissionConfig(_OPEN_CLASS, _OPEN_CLASS, _OPEN_CLASS, max_queued=10**9)


def load_balancer(routing: RoutingName = "round_robin") -> ClusterConfig:
    """A front end without an admission queue that takes workers in turn: what many load balancers do, and what
    published measurements of several workers had in front of them."""
    return ClusterConfig(routing=RoutingConfig(routing), admission=ADMIT_ALL, max_prefills_in_flight_per_worker=0)


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """A change of a worker from ``at_ns`` on: it is meant for other work, schedules by other settings, is drained or
    used again, or computes on another share (None: as before). Where workers give units to each other, the giver comes
    first."""

    at_ns: int
    worker: int
    role: Role | None = None
    scheduler: SchedulerConfig | None = None
    is_draining: bool | None = None
    share: ComputeShare | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """``simulate(Scenario(...))`` runs it.

    cluster: the settings of the front end's ClusterCore (default: as ``diptych serve``; links, objectives are
    filled in). record_events: keep the whole event log (memory grows with the run). fast_forward: take decode steps in
    which nothing can change all at once; the log is the same either way (lanes of a pipeline take step after step).
    pools: workers that differ in role, settings or cost (then they say how many there are; engine and cost are those of
    pools that have none of their own). warm_up: measured steps that the step-time model begins with, as a live worker's
    does (empty: the usual ones, at what the cost model says). front_end: what passes before a request reaches the
    cluster; part of its queueing time. swap_block_ns: copying one block between device and host, one after the other.
    disk: below the host blocks of each worker whose settings say that it has one, unless its pool has its own.
    watch: how failures are noticed. shares: what each worker computes on at first, for which its cost model holds; on
    other shares steps take longer or shorter in inverse proportion to the units (empty: of whole devices).
    explain_misses: find out what every prefill was spent on. drafts: of tokens to come (None: steps compute one token
    of a stream). depth: 2 where workers plan a decode step while the one before it is computed, as those on GPUs do:
    then what comes meanwhile is planned one step later.
    """

    engine: EngineConfig
    cost: CostModel
    workload: Workload | ClosedLoop
    num_workers: int = 1
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    faults: tuple[Fault, ...] = ()
    worker_changes: tuple[WorkerChange, ...] = ()
    seed: int = 0
    record_events: bool = False
    fast_forward: bool = True
    pools: Pools | None = None
    front_end: FrontEnd = field(default_factory=FrontEnd)
    swap_block_ns: int = 0
    disk: DiskModel | None = None
    warm_up: tuple[tuple[StepFeatures, int], ...] = ()
    watch: Watch = field(default_factory=Watch)
    shares: tuple[ComputeShare, ...] = ()
    drafts: SimulatedDrafts | None = None
    explain_misses: bool = False
    depth: int = 1

    def __post_init__(self) -> None:
        changes = ((change.role, change.is_draining) for change in self.worker_changes)
        if self.pools is None and any(change != (None, None) for change in changes):
            message = "a worker can change its role or be drained only in a fleet with pools"
            raise ConfigError(message, param="worker_changes")
        if self.pools is not None:
            object.__setattr__(self, "num_workers", self.pools.num_workers)
        if self.depth not in (1, 2):
            raise ConfigError(f"depth is {self.depth}; 1 or 2", param="depth")
        if self.num_workers < 1:
            raise ConfigError(f"num_workers is {self.num_workers}; it must be at least 1", param="num_workers")
        for fault in self.faults:
            if fault.kind in NEED_JOINED and self.pools is not None and self.pools.num_domains:
                message = f"worker {fault.worker} cannot be isolated: it shares memory, so its front end is on its host"
                if fault.kind == "front_end_crash":
                    message = "the front end cannot die alone: workers that share memory are its children"
                raise ConfigError(message, param="faults")
        if len(self.shares) not in (0, self.num_workers):
            raise ConfigError(f"{len(self.shares)} shares for {self.num_workers} workers", param="shares")
        if not self.shares and any(change.share is not None for change in self.worker_changes):
            raise ConfigError("a worker can change its share only where shares are given", param="worker_changes")

    @property
    def cluster_config(self) -> ClusterConfig:
        """``cluster`` with the links between these workers and their objectives."""
        links = LinkCosts()
        if self.pools is not None:
            bandwidth, latency_ns = LINKS[self.pools.link]
            network = LinkCost(bandwidth * min(pool.nics for pool in self.pools.pools), latency_ns)
            links = LinkCosts(
                self.pools.kv_bytes_per_token,
                memory_latency_ns=LINKS["shared_memory"][1],
                host=LinkCost(*LINKS[LOCAL_LINK]) if self.pools.num_hosts else network,
                network=network,
                far=_beyond(network, self.pools.uplink),
                windows=tuple([group.window_tokens for group in self.engine.cache.groups]),
            )
        routing = replace(self.cluster.routing, links=links)
        return replace(self.cluster, routing=routing, slo=self.engine.slo)


def _beyond(network: LinkCost, uplink: str) -> LinkCost:
    """A path between racks."""
    if not uplink:
        return network
    bandwidth, latency_ns = LINKS[uplink]
    return LinkCost(min(network.bytes_per_s, bandwidth), network.latency_ns + 2 * latency_ns)
