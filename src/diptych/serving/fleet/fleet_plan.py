"""The options of each worker of a fleet: its role, its cores, its share of the memory, and how KV moves.

Owns the translation of one EngineOptions and FleetOptions into one EngineOptions per worker. Makes the shared memory
where there is some, one for each copy of the model; must never start a process.
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import msgspec

from diptych.base.processor import Processor, read_processor
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import prefill_scheduler
from diptych.control.errors import ConfigError
from diptych.control.router.topology import ROLES, LinkCosts, Role, WorkerInfo
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.transfer import CONNECTORS
from diptych.runtime.transfer.connector import RESUME_TIMEOUT_S
from diptych.serving.fleet.fleet_options import CoreShare, FleetOptions, check_codec, divide_cores
from diptych.serving.fleet.host_cores import HostCores, divide_between_groups
from diptych.serving.fleet.joint_ready import longest_sequence
from diptych.serving.fleet.shared_memory import (
    SharedMemory,
    create_shared_memory,
    default_num_blocks,
    host_files,
    keeps_order,
)
from diptych.serving.fleet.worker_groups import copies_of
from diptych.serving.fleet.worker_handle import WorkerSite
from diptych.serving.kv_memory import kv_geometry_of, longest_sequence_of
from diptych.serving.link.engine_options import EngineOptions, PoolShare, WorkerPlace, parse_cores
from diptych.serving.link.messages import Ready

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """One entry of ``options`` and ``copies`` (which model copy it has) per worker that there may be. memories: of each
    copy; none when each worker has its own. host_fds: of each worker, where they read each other's host blocks.
    cluster: how the front end decides. The owner of the plan closes it."""

    options: tuple[EngineOptions, ...]
    cluster: ClusterConfig
    copies: tuple[int, ...] = (0,)
    memories: tuple[SharedMemory, ...] = ()
    host_fds: tuple[int, ...] = ()

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """File descriptors that every worker inherits."""
        return (*(fd for memory in self.memories for fd in memory.fds), *self.host_fds)

    def memory_domain(self, worker: int) -> int | None:
        """The memory that this worker shares with others of its copy; None: it has its own."""
        return self.copies[worker] if self.memories else None

    def info_of(self, worker: int, role: Role, site: WorkerSite, ready: Ready) -> WorkerInfo:
        """The worker as the ClusterCore knows it."""
        return WorkerInfo(
            worker,
            role,
            ready.num_blocks,
            ready.block_size,
            memory_domain=self.memory_domain(worker),
            host=site.host,
            rack=site.rack,
            share=ready.share,
            max_model_len=longest_sequence(ready),
            model_copy=self.copies[worker],
            host_domain=self.host_domain,
            groups=tuple(ready.groups),
        )

    @property
    def host_domain(self) -> int | None:
        """The domain whose workers read each other's host blocks: those of one model copy. None: no worker reads
        another's."""
        return 0 if self.host_fds else None

    def close(self) -> None:
        """Let go of the shared memory."""
        for memory in self.memories:
            memory.close()
        for fd in self.host_fds:
            os.close(fd)


def plan_fleet(options: EngineOptions, fleet: FleetOptions, processor: Processor | None = None) -> FleetPlan:
    """The options of each worker on ``processor`` (None: this machine's). Raises ConfigError, also for what a worker
    would refuse when it loads."""
    roles, explains = fleet.slots, fleet.explain_misses != "off"
    if explains and not options.memory.prefix_cache:
        raise ConfigError("explain_misses has no effect without the prefix cache", param="explain_misses")
    options = msgspec.structs.replace(options, explains_misses=explains)
    if fleet.core_split is not None:
        _check_core_split(options)
    cores = _core_shares(options, fleet, processor or read_processor())
    cluster = replace(fleet.cluster, slo=options.slo)
    wanted = worker_options(options, fleet)
    if len(roles) == 1 and fleet.join is None:
        return FleetPlan((_on_cores(wanted[0], cores[0]),), cluster)
    transfer = _transfer(options, fleet)
    kind, join = CONNECTORS[transfer], fleet.join
    geometries = list(map(cache(kv_geometry_of), wanted))  # equal workers: a large GGUF file takes a second to read
    copies = copies_of(wanted, geometries, roles) if join is None else (0,) * len(roles)
    memories = _shared_memories(wanted, geometries, copies) if kind.shares_pool else ()
    host_fds = host_files(len(roles)) if _shares_host(options, fleet, cluster) else ()
    secret = secrets.token_bytes(SECRET_BYTES) if join is None else join.key.derived("KV")
    told = []
    for number, role in enumerate(roles):
        memory = memories[copies[number]] if memories else None
        place = WorkerPlace(
            number=number,
            num_workers=len(roles) if join is None else 1,
            role=role,
            pool=_share(memory, copies[:number].count(copies[number])),
            weights_fd=memory.weights_fd if memory else None,
            transfer=transfer,
            codec=fleet.kv_codec if kind.packs else "none",
            secret=secret,
            listen="" if join is None else join.kv_listen,
            encrypts=join is not None and not join.transfer_plain,
            publishes_blocks=cluster.routing.routing == "kv_aware" or explains,
            resume_timeout_s=RESUME_TIMEOUT_S if join is None else fleet.heartbeat_timeout_s,
            host_fds={mate: fd for mate, fd in enumerate(host_fds) if copies[mate] == copies[number]},
        )
        record = None if options.record is None else _numbered(Path(options.record), number)
        own = _on_cores(wanted[number], cores[number % len(cores)] if cores else None)
        scheduler = prefill_scheduler(own.scheduler, own.slo) if role == "prefill" else own.scheduler
        told.append(msgspec.structs.replace(own, place=place, record=record, scheduler=scheduler))
    layers = geometries[0].layers
    windows = () if layers.is_dense else tuple([group.window_tokens for group in layers.groups])
    links = LinkCosts(bytes_per_token=geometries[0].token_bytes, windows=windows)
    cluster = replace(cluster, routing=replace(cluster.routing, links=links))
    return FleetPlan(tuple(told), cluster, copies, memories, host_fds)


def worker_options(options: EngineOptions, fleet: FleetOptions) -> list[EngineOptions]:
    """What each worker that there may be differs in from ``options``, the fleet's, by its group. Raises ConfigError."""
    groups = fleet.groups_of_workers
    options = _with_windows(options, fleet)
    own = {group.name: group.applied_to(options) for group in fleet.groups}
    return [own[group.name] for group in groups] + [options] * (len(fleet.slots) - len(groups))


def _with_windows(options: EngineOptions, fleet: FleetOptions) -> EngineOptions:
    """Which windows count: workers that hand sequences to each other lay their KV out alike, whatever the longest is
    that each of them takes."""
    if len(fleet.slots) == 1 and fleet.join is None:
        return options
    longest = longest_sequence_of(options)
    below = max([group.max_model_len or longest for group in fleet.groups], default=longest)
    return msgspec.structs.replace(options, memory=msgspec.structs.replace(options.memory, windows_below=below))


def _core_shares(options: EngineOptions, fleet: FleetOptions, processor: Processor) -> tuple[CoreShare | None, ...]:
    """The cores of each worker. CPUs that were named get a thread each. Under a quota of time nothing is pinned: other
    groups of the host would be pinned to the same CPUs."""
    named, num_workers = options.device.cores, len(fleet.roles)  # those that are added share the cores of others
    if not num_workers or fleet.ray is not None:
        return ()
    if any(group.cores for group in fleet.groups):
        if named or fleet.core_split is not None:
            other = f"cores is {named}" if named else "core_split divides the cores"
            raise ConfigError(f"{other}, but the pools name cores of their own", param="cores")
        ordered = sorted(fleet.groups, key=lambda group: ROLES.index(group.role))
        return tuple(divide_between_groups(processor, ordered))
    if fleet.core_split is not None:
        cores = HostCores(processor, named, fleet.core_split)
        fleet.core_split.counts(dict(enumerate(fleet.slots)), len(cores.cores))  # enough for all that may be added
        divided = cores.divide(dict(enumerate(fleet.roles)), {})
        return tuple(CoreShare(",".join(map(str, share.cpus)), share.num_threads) for share in divided.values())
    if named:
        shares = divide_cores(processor.cores_of(parse_cores(named)), num_workers, fleet.cores_per_worker)
        return tuple(share and replace(share, num_threads=None) for share in shares)
    if processor.is_limited_by_quota and fleet.cores_per_worker is None and num_workers > 1:
        return (CoreShare(None, max(1, processor.num_threads // num_workers)),) * num_workers
    return divide_cores(processor.cores_of(processor.usable), num_workers, fleet.cores_per_worker)


def _check_core_split(options: EngineOptions) -> None:
    for name, value in (("threads", options.device.threads), ("device", options.device.device == "cuda" or None)):
        if value is not None:
            raise ConfigError(f"core_split and {name} exclude each other (device: cpu)", param="core_split")


def _transfer(options: EngineOptions, fleet: FleetOptions) -> str:
    """The connector that was asked for, or the first that serves the device. Raises ConfigError when it does not, and
    for a codec that it does not have."""
    device, name = options.device.device, fleet.transfer
    if name == "auto":
        may_be_gpu = _may_be_gpu(options)
        serving = (name for name, kind in CONNECTORS.items() if kind.serves_cuda or not may_be_gpu)
        if fleet.join is not None:  # some may be on other hosts
            serving = (name for name in ("tcp",))
        name = next(name for name in serving if CONNECTORS[name].is_installed)
    if device == "cuda" and not CONNECTORS[name].serves_cuda:
        others = ", ".join(name for name, kind in CONNECTORS.items() if kind.serves_cuda)
        raise ConfigError(f"transfer is {name}, which does not serve GPUs ({others} do)", param="transfer")
    check_codec(name, fleet.kv_codec, options.memory.kv_dtype)
    return name


def _shares_host(options: EngineOptions, fleet: FleetOptions, cluster: ClusterConfig) -> bool:
    """Whether workers read each other's host blocks: all are processes of this machine that compute on its CPUs, and
    the router says who has what."""
    memory = options.memory
    is_here = fleet.join is None and fleet.ray is None
    is_told = cluster.routing.routing == "kv_aware" and memory.prefix_cache
    return memory.host_bytes > 0 and is_here and is_told and not _may_be_gpu(options) and keeps_order()


def _may_be_gpu(options: EngineOptions) -> bool:
    device = options.device.device
    return device == "cuda" or (device == "auto" and Path("/dev/nvidiactl").exists())


def _shared_memories(
    options: Sequence[EngineOptions], geometries: Sequence[KVGeometry], copies: Sequence[int]
) -> tuple[SharedMemory, ...]:
    """One for each copy. What no option sizes gets its part of the memory that is free before any of them is taken."""
    num_blocks = cache(partial(_num_blocks, num_workers=len(options)))
    counts = list(map(num_blocks, options, geometries))
    memories = []
    for copy in range(max(copies) + 1):
        members = [number for number, of in enumerate(copies) if of == copy]
        memories.append(create_shared_memory(geometries[members[0]], [counts[number] for number in members]))
    return tuple(memories)


def _num_blocks(options: EngineOptions, geometry: KVGeometry, num_workers: int) -> int:
    if options.memory.kv_cache_bytes is not None:
        return geometry.blocks_within(options.memory.kv_cache_bytes)
    return default_num_blocks(options, geometry, num_workers)


def _share(memory: SharedMemory | None, number: int) -> PoolShare | None:
    """The part of the pool for the worker that is the ``number``-th of its model copy."""
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
