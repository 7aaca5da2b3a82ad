"""The workers of a fleet: as the front end knows them, and as they run.

Owns which settings each has and which blocks of a shared pool are its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diptych.control.config import EngineConfig
from diptych.control.router.topology import WorkerInfo
from diptych.simulation.environment import Environment
from diptych.simulation.fleet.pools import Pools
from diptych.simulation.fleet.simulated_worker import Auditor, Listener, SimulatedWorker, WorkerModel
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


def make_workers(
    scenario: Scenario,
    members: Sequence[Member],
    environment: Environment,
    listener: Listener,
    auditor: Auditor | None,
) -> list[SimulatedWorker]:
    """The workers; equal ones share what warm-up taught them."""
    models: dict[int, WorkerModel] = {}
    workers = []
    for member in members:
        base = scenario.engine
        if scenario.pools is not None and scenario.pools.prefill is not None and member.info.role == "prefill":
            base = scenario.pools.prefill
        if id(base) not in models:
            model = warmed_up_model(base, scenario.cost, scenario.warm_up)
            models[id(base)] = WorkerModel(base, scenario.cost, model, scenario.fast_forward, scenario.swap_block_ns)
        worker = models[id(base)]
        if member.config is not base:
            worker = replace(worker, config=member.config)
        workers.append(SimulatedWorker(member.info.number, worker, environment, listener, auditor))
    return workers


def peers_of(members: Sequence[Member]) -> list[list[int]]:
    """For each worker, the others that share a pool of memory with it."""
    pools: dict[int, list[int]] = {}
    for member in members:
        if member.info.pool is not None:
            pools.setdefault(member.info.pool, []).append(member.info.number)
    return [
        [] if one.info.pool is None else [other for other in pools[one.info.pool] if other != one.info.number]
        for one in members
    ]
