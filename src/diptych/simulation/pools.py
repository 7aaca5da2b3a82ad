"""How a fleet is split into workers that prefill, decode or do both, and which of them share memory.

Owns the numbers of the workers: those that prefill first, then those that decode, then those that do both.
"""

from dataclasses import dataclass, replace

from diptych.control.config import ReplicaConfig
from diptych.control.errors import ConfigError
from diptych.control.router.workers import Role, WorkerInfo
from diptych.simulation.links import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """link: one of simulation.links.LINKS; every worker has one for each direction. kv_bytes_per_token: of the whole
    model, as it travels. prefill: settings of the workers that only prefill (None: those of the others). num_hosts:
    worker i is on host i % num_hosts, and the workers of a host borrow blocks of each other instead of sending them
    (0: every worker is on a host of its own; with the link "shared_memory" all are on one).
    """

    num_prefill: int
    num_decode: int
    kv_bytes_per_token: int
    link: str = "ib400"
    prefill: ReplicaConfig | None = None
    num_both: int = 0
    num_hosts: int = 0

    def __post_init__(self) -> None:
        Link.named(self.link)
        for name, least in (
            ("num_prefill", 0), ("num_decode", 0), ("num_both", 0), ("num_hosts", 0), ("kv_bytes_per_token", 1)
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}", param=name)
        for name in ("num_prefill", "num_decode"):
            if not getattr(self, name) + self.num_both:
                raise ConfigError(
                    f"{name} is 0 and num_both is 0; somebody must do that work: at least 1 of either", param=name
                )
        if self.link == "shared_memory":
            object.__setattr__(self, "num_hosts", 1)

    @property
    def num_workers(self) -> int:
        """Of all roles."""
        return self.num_prefill + self.num_decode + self.num_both

    def role(self, worker: int) -> Role:
        """What a worker is for."""
        if worker < self.num_prefill:
            return "prefill"
        return "decode" if worker < self.num_prefill + self.num_decode else "both"


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a fleet: as the front end knows it, and its settings."""

    info: WorkerInfo
    config: ReplicaConfig


def fleet(replica: ReplicaConfig, num_workers: int, pools: Pools | None) -> list[Member]:
    """All workers. Those that share memory number their blocks one after the other."""
    members = []
    ends: dict[int, int] = {}  # host -> blocks of the workers so far
    for worker in range(num_workers):
        if pools is None:
            cache = replica.cache
            members.append(Member(WorkerInfo(worker, "both", cache.num_blocks, cache.block_size), replica))
            continue
        role = pools.role(worker)
        config = pools.prefill if pools.prefill is not None and role == "prefill" else replica
        host = worker % pools.num_hosts if pools.num_hosts else worker
        pool = host if pools.num_hosts else None
        if pool is not None:
            first_block = ends.get(host, 0)
            ends[host] = first_block + config.cache.num_blocks
            config = replace(config, cache=replace(config.cache, first_block=first_block))
        cache = config.cache
        members.append(
            Member(WorkerInfo(worker, role, cache.num_blocks, cache.block_size, f"host{host}", pool), config)
        )
    return members
