"""The workers of a fleet: as the front end knows them, and as they run.

Owns which settings each has and which blocks of a memory domain are its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diptych.control.config import EngineConfig
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.router.topology import WorkerInfo
from diptych.simulation.environment import Environment
from diptych.simulation.fleet.pools import Pools
from diptych.simulation.fleet.simulated_worker import Auditor, SimulatedWorker, Surroundings, WorkerModel
from diptych.simulation.fleet.warmed_up_model import warmed_up_model
from diptych.simulation.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a fleet: as the front end knows it, and its settings."""

    info: WorkerInfo
    config: EngineConfig


def fleet(engine: EngineConfig, num_workers: int, pools: Pools | None) -> list[Member]:
    """All workers. Those that share memory number their blocks one after the other."""
    members = []
    ends: dict[int, int] = {}  # host -> blocks of the workers so far
    for worker in range(num_workers):
        if pools is None:
            cache = engine.cache
            members.append(Member(WorkerInfo(worker, "both", cache.num_blocks, cache.block_size), engine))
            continue
        role = pools.role(worker)
        config = pools.prefill if pools.prefill is not None and role == "prefill" else engine
        host = worker % pools.num_hosts if pools.num_hosts else worker
        domain = host if pools.num_hosts else None
        if domain is not None:
            first_block = ends.get(host, 0)
            ends[host] = first_block + config.cache.num_blocks
            config = replace(config, cache=replace(config.cache, first_block=first_block))
        cache = config.cache
        info = WorkerInfo(worker, role, cache.num_blocks, cache.block_size, f"host{host}", domain)
        members.append(Member(info, config))
    return members


def make_workers(
    scenario: Scenario,
    members: Sequence[Member],
    environment: Environment,
    surroundings: Surroundings,
    auditor: Auditor | None,
) -> list[SimulatedWorker]:
    """The workers; those that differ in the place of their blocks alone share what warm-up taught them."""
    models: dict[EngineConfig, StepTimeModel] = {}
    workers = []
    cluster = scenario.cluster_config
    has_costs = cluster.routing.routing == "kv_aware"
    for member in members:
        kind = member.config.with_(cache=replace(member.config.cache, first_block=0))
        if kind not in models:
            models[kind] = warmed_up_model(kind, scenario.cost, scenario.warm_up)
        worker = WorkerModel(
            member.config,
            scenario.cost,
            models[kind],
            scenario.fast_forward,
            scenario.swap_block_ns,
            reports_load=has_costs or bool(cluster.max_untouched_per_worker),
            publishes_kv=has_costs and len(members) > 1,
            copy_block_ns=scenario.copy_block_ns,
        )
        workers.append(SimulatedWorker(member.info.number, worker, environment, surroundings, auditor))
    return workers
