"""The workers of a fleet: as the front end knows them, and as they run.

Owns which settings and which cost model each has, which pipeline it is a lane of, and which blocks of a memory domain
are its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diptych.control.config import EngineConfig
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.errors import ConfigError
from diptych.control.router.topology import Role, WorkerInfo
from diptych.simulation.environment import Environment
from diptych.simulation.fleet.pipeline import Pipeline
from diptych.simulation.fleet.pools import Place, Pools
from diptych.simulation.fleet.simulated_disk import DiskModel
from diptych.simulation.fleet.simulated_hosts import SharedContents
from diptych.simulation.fleet.simulated_worker import Auditor, SimulatedWorker, Surroundings, WorkerModel
from diptych.simulation.fleet.warmed_up_model import warmed_up_model
from diptych.simulation.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a fleet: as the front end knows it, its settings, and where it is (None: there are no pools)."""

    info: WorkerInfo
    config: EngineConfig
    place: Place | None = None


def fleet(scenario: Scenario) -> list[Member]:
    """All workers of a scenario."""
    members = _members(scenario.engine, scenario.num_workers, scenario.pools)
    if not scenario.shares:
        return members
    shared = zip(members, scenario.shares, strict=True)
    return [replace(member, info=replace(member.info, share=share)) for member, share in shared]


def _members(engine: EngineConfig, num_workers: int, pools: Pools | None) -> list[Member]:
    """The fleet's members, on whole devices. Those that share memory number their blocks one after the other."""
    if pools is None:
        return [Member(_info(worker, "both", engine, "local", None, 0), engine) for worker in range(num_workers)]
    members = []
    ends: dict[int, int] = {}  # host -> blocks of the workers so far
    for worker, place in enumerate(pools.places()):
        config = place.pool.engine or engine
        host = pools.host_of(place.replica)
        domain = host if pools.num_domains else None
        if domain is not None:
            first_block = ends.get(host, 0)
            ends[host] = first_block + config.cache.num_blocks
            config = replace(config, cache=replace(config.cache, first_block=first_block))
        info = _info(worker, place.pool.role, config, f"host{host}", domain, host)
        info = replace(info, model_copy=place.pool.model_copy)
        if pools.num_racks:
            info = replace(info, rack=f"rack{pools.rack_of(place.replica)}")
        members.append(Member(info, config, place))
    return members


def _info(worker: int, role: Role, config: EngineConfig, host: str, domain: int | None, host_domain: int) -> WorkerInfo:
    """The WorkerInfo with which a worker of these settings presents itself. host_domain: of its host, should its blocks
    be read there."""
    cache = config.cache
    longest = max(1, min(config.max_model_len, cache.capacity_tokens))
    return WorkerInfo(
        worker,
        role,
        cache.num_blocks,
        cache.block_size,
        host=host,
        memory_domain=domain,
        max_model_len=longest,
        host_domain=host_domain if cache.tiers.shares_host else None,
        groups=cache.groups,
    )


def _disk(scenario: Scenario, member: Member) -> DiskModel | None:
    """The disk of a worker whose settings say that it has one: its pool's own, or that of the scenario. Raises
    ConfigError where neither is given."""
    if not member.config.cache.tiers.has_disk:
        return None
    disk = (member.place.pool.disk if member.place else None) or scenario.disk
    if disk is None:
        raise ConfigError(f"has_disk is True for worker {member.info.number}, and there is no disk", param="disk")
    return disk


def make_workers(
    scenario: Scenario,
    members: Sequence[Member],
    environment: Environment,
    surroundings: Surroundings,
    auditor: Auditor | None,
) -> list[SimulatedWorker]:
    """The workers; those that differ in the place of their blocks alone share what warm-up taught them."""
    models: dict[tuple[EngineConfig, int], StepTimeModel] = {}
    pipelines: dict[int, Pipeline] = {}  # of the replicas that have one
    workers = []
    cluster = scenario.cluster_config
    shared = SharedContents()
    has_costs = cluster.routing.routing == "kv_aware"
    for member in members:
        pool = member.place.pool if member.place else None
        cost = (pool and pool.cost) or scenario.cost
        kind = (member.config.with_(cache=replace(member.config.cache, first_block=0)), id(cost))
        if kind not in models:
            models[kind] = warmed_up_model(kind[0], cost, scenario.warm_up)
        pipeline = None
        if pool is not None and member.place is not None and pool.stages > 1:
            pipeline = pipelines.setdefault(member.place.replica, Pipeline(pool.stages))
        own_swap_ns = pool.swap_block_ns if pool else None
        worker = WorkerModel(
            member.config,
            cost,
            models[kind],
            scenario.fast_forward,
            scenario.swap_block_ns if own_swap_ns is None else own_swap_ns,
            reports_load=has_costs or bool(cluster.max_prefills_in_flight_per_worker),
            publishes_kv=scenario.explain_misses or (has_costs and len(members) > 1),
            copy_block_ns=pool.copy_block_ns if pool else 0,
            pipeline=pipeline,
            stall_ns=scenario.pools.stall_ns if scenario.pools else 0,
            share=member.info.share,
            drafts=scenario.drafts,
            depth=scenario.depth,
            disk=_disk(scenario, member),
            shared=shared if member.config.cache.tiers.shares_host else None,
        )
        workers.append(SimulatedWorker(member.info.number, worker, environment, surroundings, auditor))
    return workers
