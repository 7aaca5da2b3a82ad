"""``--fleet`` and ``--pool`` of ``diptych serve``: the pools of a file of ``diptych simulate`` as groups of workers.

One format for both commands. Of the file, ``serve`` reads the pools; everything else comes from its own options. Of a
pool it leaves aside what says how to simulate it: devices, cost models, prices and the network.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from diptych.control.config import SchedulerConfig, scheduler_config
from diptych.control.errors import ConfigError
from diptych.control.router.topology import Role
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.serving.link.engine_options import parse_bytes
from diptych.simulation.pool_settings import PARALLEL, PoolSettings, parse_pool, pool_table
from diptych.simulation.settings import read_settings

NOT_SERVED = (*PARALLEL.values(), "weight_bits")  # a worker here has one device, and the checkpoint's weights


def worker_groups(fleet: Path | None, pools: Sequence[str], given: Mapping[str, Any]) -> tuple[WorkerGroup, ...]:
    """The groups of a file (None: there is none), changed by pools in short, ``NAME=POOL``. given: ``shape`` and the
    names of the scheduler's options, as the fleet has them. Raises ConfigError."""
    tables = [(name, _in_bytes(name, pool)) for name, pool in map(parse_pool, pools)]
    changes = {f"pools.{name}.{setting}": value for name, table in tables for setting, value in table.items()}
    settings = read_settings(fleet, changes).pools
    if fleet is not None and not settings.in_use:
        raise ConfigError(f"{fleet} has no pool with a worker; expected tables such as [pools.small]", param="fleet")
    return tuple(_group(name, settings.role(name), pool, given) for name, pool in settings.in_use.items())


def _in_bytes(name: str, pool: str) -> dict[str, Any]:
    """A pool in short as a table, with its memory as a number: ``kv_cache_bytes=2GiB`` is one there."""
    table = pool_table(name, pool)
    size = table.get("kv_cache_bytes")
    return {**table, "kv_cache_bytes": parse_bytes(size, "kv_cache_bytes")} if isinstance(size, str) else table


def _group(name: str, role: Role, pool: PoolSettings, given: Mapping[str, Any]) -> WorkerGroup:
    for setting in NOT_SERVED:
        if getattr(pool, setting) not in (None, 1):
            raise ConfigError(
                f"pools.{name}.{setting} is {getattr(pool, setting)}; diptych serve has no workers of that kind",
                param=f"pools.{name}.{setting}",
            )
    return WorkerGroup(
        name=name,
        role=role,
        replicas=pool.replicas,
        max_model_len=pool.max_model_len,
        kv_cache_bytes=pool.kv_cache_bytes,
        kv_cache_tokens=pool.kv_cache_tokens,
        cores=pool.cores,
        dtype=pool.dtype,
        quantize=pool.quantize,
        scheduler=_scheduler(pool, given),
    )


def _scheduler(pool: PoolSettings, given: Mapping[str, Any]) -> SchedulerConfig | None:
    details = msgspec.structs.asdict(pool.scheduler)
    changed = {name: value for name, value in details.items() if value not in (None, False)}
    if pool.shape is None and not changed:
        return None
    fleet = {name: value for name, value in given.items() if name != "shape"}
    return scheduler_config(pool.shape or given["shape"], **{**fleet, **changed})
