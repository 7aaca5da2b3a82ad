"""The options of each worker of a fleet: its role, its cores, its share of the memory, and how KV moves.

Owns the translation of one EngineOptions and FleetOptions into one EngineOptions per worker. Makes the shared memory
where there is some; must never start a process.
"""

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import prefill_scheduler
from diptych.control.errors import ConfigError
from diptych.control.router.topology import LinkCosts
from diptych.processor import Processor, read_processor
from diptych.runtime.kv_geometry import KVGeometry, read_kv_geometry
from diptych.runtime.transfer import CONNECTORS
from diptych.serving.fleet.fleet_options import CoreShare, FleetOptions, check_codec, divide_cores
from diptych.serving.fleet.shared_memory import SharedMemory, create_shared_memory, default_num_blocks
from diptych.serving.link.engine_options import EngineOptions, PoolShare, WorkerPlace, parse_cores

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """One entry of ``options`` per worker that there may be. memory: None when each has its own. cluster: how the front
    end decides. The owner of the plan closes it."""

    options: tuple[EngineOptions, ...]
    cluster: ClusterConfig
    memory: SharedMemory | None = None

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """File descriptors that every worker inherits."""
        return self.memory.fds if self.memory else ()

    def close(self) -> None:
        """Let go of the shared memory."""
        if self.memory is not None:
            self.memory.close()


def plan_fleet(options: EngineOptions, fleet: FleetOptions, processor: Processor | None = None) -> FleetPlan:
    """The options of each worker on ``processor`` (None: this machine's). Raises ConfigError, also for what a worker
    would refuse when it loads."""
    roles = fleet.slots
    cores = _core_shares(options, fleet, processor or read_processor())
    cluster = replace(fleet.cluster, slo=options.slo)
    if len(roles) == 1:
        return FleetPlan((_on_cores(options, cores[0]),), cluster)
    transfer = _transfer(options, fleet)
    kind = CONNECTORS[transfer]
    geometry = read_kv_geometry(options.model, options.device.dtype, options.memory.block_size)
    memory = _shared_memory(options, geometry, len(roles)) if kind.shares_pool else None
    secret = secrets.token_bytes(SECRET_BYTES)
    told = []
    for number, role in enumerate(roles):
        place = WorkerPlace(
            number=number,
            role=role,
            pool=_share(memory, number),
            weights_fd=memory.weights_fd if memory else None,
            transfer=transfer,
            codec=fleet.kv_codec if kind.packs else "none",
            secret=secret,
            publishes_blocks=cluster.routing.routing == "kv_aware",
        )
        record = None if options.record is None else _numbered(Path(options.record), number)
        scheduler = prefill_scheduler(options.scheduler, options.slo) if role == "prefill" else options.scheduler
        own = _on_cores(options, cores[number % len(cores)])
        told.append(msgspec.structs.replace(own, place=place, record=record, scheduler=scheduler))
    links = LinkCosts(bytes_per_token=geometry.block_bytes // geometry.block_size)
    cluster = replace(cluster, routing=replace(cluster.routing, links=links))
    return FleetPlan(tuple(told), cluster, memory)


def _core_shares(options: EngineOptions, fleet: FleetOptions, processor: Processor) -> tuple[CoreShare | None, ...]:
    """Of each worker. CPUs that were named get a thread each. Under a quota of time nothing is pinned: other groups of
    the host would be pinned to the same CPUs."""
    named, num_workers = options.device.cores, len(fleet.roles)  # those that are added share the cores of others
    if named:
        shares = divide_cores(processor.cores_of(parse_cores(named)), num_workers, fleet.cores_per_worker)
        return tuple(share and replace(share, num_threads=None) for share in shares)
    if processor.is_limited_by_quota and fleet.cores_per_worker is None and num_workers > 1:
        return (CoreShare(None, max(1, processor.num_threads // num_workers)),) * num_workers
    return divide_cores(processor.cores_of(processor.usable), num_workers, fleet.cores_per_worker)


def _transfer(options: EngineOptions, fleet: FleetOptions) -> str:
    """The connector that was asked for, or the first that serves the device. Raises ConfigError when it does not, and
    for a codec that it does not have."""
    device, name = options.device.device, fleet.transfer
    if name == "auto":
        may_be_gpu = device == "cuda" or (device == "auto" and Path("/dev/nvidiactl").exists())
        serving = (name for name, kind in CONNECTORS.items() if kind.serves_cuda or not may_be_gpu)
        name = next(name for name in serving if CONNECTORS[name].is_installed)
    if device == "cuda" and not CONNECTORS[name].serves_cuda:
        others = ", ".join(name for name, kind in CONNECTORS.items() if kind.serves_cuda)
        raise ConfigError(f"transfer is {name}, which does not serve GPUs ({others} do)", param="transfer")
    check_codec(name, fleet.kv_codec)
    return name


def _shared_memory(options: EngineOptions, geometry: KVGeometry, num_workers: int) -> SharedMemory:
    if options.memory.kv_cache_bytes is not None:
        num_blocks = geometry.blocks_within(options.memory.kv_cache_bytes)
    else:
        num_blocks = default_num_blocks(options, geometry, num_workers)
    return create_shared_memory(geometry, [num_blocks] * num_workers)


def _share(memory: SharedMemory | None, number: int) -> PoolShare | None:
    if memory is None:
        return None
    return PoolShare(
        fd=memory.pool_fd,
        total_blocks=memory.total_blocks,
        first_block=memory.first_blocks[number],
        num_blocks=memory.num_blocks[number],
    )


def _on_cores(options: EngineOptions, share: CoreShare | None) -> EngineOptions:
    if share is None:
        return options
    threads = options.device.threads or share.num_threads
    device = msgspec.structs.replace(options.device, cores=share.cpus, threads=threads)
    return msgspec.structs.replace(options, device=device)


def _numbered(path: Path, number: int) -> str:
    return str(path.with_name(f"{path.stem}-{number}{path.suffix}"))
