"""The pools of a fleet: groups of equal replicas with a role, settings, a cost model and pipeline stages of their own,
and what lies between them.

A worker of the front end is one *lane*: a replica without a pipeline is one worker, a replica of p stages is p of them,
which take turns on the stages. Owns the numbers of the workers: pool after pool, replica after replica, lane after
lane.
"""

from dataclasses import dataclass

from diptych.control.config import EngineConfig
from diptych.control.errors import ConfigError
from diptych.control.router.topology import Role
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.fleet.links import Link
from diptych.simulation.fleet.simulated_disk import DiskModel

LOCAL_LINK = "shared_memory"  # between workers of one host whose blocks lie in memories of their own: one core copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """``replicas`` equal replicas of ``stages`` pipeline stages.

    engine, cost: of one lane, whose KV cache is its share of the replica's; the cost model prices a whole pass (None:
    those of the scenario). nics: network cards of a replica, each of which carries the link's bandwidth in each
    direction. layout: how the KV of a token is cut (ways of tensor parallelism, stages); a receiver with another layout
    than the sender cuts it anew, at ``relayout_bytes_per_s`` (0: in no time). swap_block_ns: None: the scenario's.
    copy_block_ns: copying one block to another within the memory of a host. model_copy: pools with other weights have
    another number, and hand nothing over to each other.
    """

    name: str
    role: Role
    replicas: int = 1
    stages: int = 1
    engine: EngineConfig | None = None
    cost: CostModel | None = None
    nics: int = 1
    layout: tuple[int, int] = (1, 1)
    relayout_bytes_per_s: int = 0
    swap_block_ns: int | None = None
    disk: DiskModel | None = None
    copy_block_ns: int = 0
    model_copy: int = 0

    def __post_init__(self) -> None:
        for name, least in (("replicas", 0), ("stages", 1), ("nics", 1), ("relayout_bytes_per_s", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} of pool {self.name} is {getattr(self, name)}; at least {least}", param=name)

    @property
    def num_workers(self) -> int:
        """Lanes of all its replicas."""
        return self.replicas * self.stages


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is: its pool, and its replica, counted over the whole fleet."""

    pool: Pool
    replica: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """A fleet of pools. ``named``: the pools; or, in short, up to three equal ones of num_prefill, num_decode and
    num_both replicas (``prefill``: settings of the first, None: those of the others).

    link: one of simulation.links.LINKS; every network card is one for each direction. kv_bytes_per_token: of the whole
    model, as it travels. num_hosts: replica i is on host i % num_hosts, and the workers of a host borrow blocks of each
    other instead of sending them (0: every replica is on a host of its own; with the link "shared_memory" all are on
    one). shares_memory: whether they do (False: the KV is copied, as between workers that have joined the fleet).
    num_racks: host i is in rack i % num_racks (0: there are none). uplink: a link between a rack and the others, for
    each direction ("": no limit). stall_ns: how much longer the step lasts in which a worker takes over KV that came,
    or ends a prompt whose KV leaves, for each of them.
    """

    kv_bytes_per_token: int
    num_prefill: int = 0
    num_decode: int = 0
    num_both: int = 0
    link: str = "ib400"
    prefill: EngineConfig | None = None
    num_hosts: int = 0
    num_racks: int = 0
    uplink: str = ""
    shares_memory: bool = True
    stall_ns: int = 0
    named: tuple[Pool, ...] = ()

    def __post_init__(self) -> None:
        Link.named(self.link)
        for name, least in (
            ("num_prefill", 0), ("num_decode", 0), ("num_both", 0), ("num_hosts", 0), ("num_racks", 0),
            ("kv_bytes_per_token", 1), ("stall_ns", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}", param=name)
        if self.link == "shared_memory":
            object.__setattr__(self, "num_hosts", 1)
        self._check_places()
        if self.named and (self.num_prefill or self.num_decode or self.num_both or self.prefill):
            raise ConfigError("named pools say how many workers there are, and of which settings", param="named")
        self._check_roles()
        layouts = {pool.layout for pool in self.pools}
        if self.num_domains and len(layouts) > 1:
            raise ConfigError("workers that borrow blocks of each other cut the KV in the same way", param="num_hosts")

    def _check_places(self) -> None:
        if self.uplink:
            Link.named(self.uplink)
        if self.uplink and not self.num_racks:
            raise ConfigError(f"uplink is {self.uplink} and num_racks is 0; racks have uplinks", param="uplink")
        if not self.shares_memory and not self.num_hosts:
            raise ConfigError("shares_memory is False and num_hosts is 0; no two workers are on a host", param="hosts")

    def _check_roles(self) -> None:
        pools = self.pools
        names = [pool.name for pool in pools]
        if len(set(names)) < len(names):
            raise ConfigError(f"two pools have one name: {', '.join(names)}", param="named")
        of_role = {role: sum(pool.replicas for pool in pools if pool.role == role) for role in ("prefill", "decode")}
        num_both = sum(pool.replicas for pool in pools if pool.role == "both")
        for role, count in of_role.items():
            if not count and not num_both:
                raise ConfigError(
                    f"num_{role} is 0 and num_both is 0; no worker could do that work: at least 1 of either",
                    param=f"num_{role}",
                )

    @property
    def pools(self) -> tuple[Pool, ...]:
        """All of them, in the order of their workers."""
        if self.named:
            return self.named
        return (
            Pool(name="prefill", role="prefill", replicas=self.num_prefill, engine=self.prefill),
            Pool(name="decode", role="decode", replicas=self.num_decode),
            Pool(name="both", role="both", replicas=self.num_both),
        )

    @property
    def num_domains(self) -> int:
        """Memories that several workers share."""
        return self.num_hosts if self.shares_memory else 0

    def host_of(self, replica: int) -> int:
        """Where a replica is."""
        return replica % self.num_hosts if self.num_hosts else replica

    def rack_of(self, replica: int) -> int:
        """The rack of its host (0 where there are none)."""
        return self.host_of(replica) % self.num_racks if self.num_racks else 0

    @property
    def num_workers(self) -> int:
        """Lanes of all pools."""
        return sum(pool.num_workers for pool in self.pools)

    def places(self) -> list[Place]:
        """Where each worker is."""
        places: list[Place] = []
        first = 0
        for pool in self.pools:
            places += [Place(pool, first + lane // pool.stages) for lane in range(pool.num_workers)]
            first += pool.replicas
        return places

    def role(self, worker: int) -> Role:
        """The role of a worker."""
        for pool in self.pools:
            if worker < pool.num_workers:
                return pool.role
            worker -= pool.num_workers
        raise IndexError(f"there are {self.num_workers} workers")
