"""What a running fleet says of its settings: see control/fleet_settings.py."""

from dataclasses import replace

from diptych.control.config import CacheConfig, EngineConfig
from diptych.control.fleet_settings import FleetSettings, WorkerSettings
from diptych.control.router.topology import WorkerInfo
from diptych.serving.fleet.fleet import Fleet


def settings_of(fleet: Fleet, version: str, model: str) -> FleetSettings:
    """What the workers that are up and the front end run by now."""
    members, config, slo = fleet.core.members, fleet.core.config, fleet.options.slo
    infos = [info for number, info in sorted(members.infos.items()) if number in members.up]
    cluster = replace(config, slo=slo)
    shares_memory = len({info.memory_domain for info in infos}) <= 1 and all(
        info.memory_domain is not None or len(infos) == 1 for info in infos
    )
    workers = tuple(_worker(fleet, info) for info in infos)
    return FleetSettings(version, model, workers, cluster, config.routing.links.bytes_per_token, shares_memory)


def _worker(fleet: Fleet, info: WorkerInfo) -> WorkerSettings:
    number, ready = info.number, fleet.joint_ready
    has_prefix_cache = fleet.options.memory.prefix_cache
    cache = CacheConfig(info.num_blocks, info.block_size, enable_prefix_cache=has_prefix_cache, groups=info.groups)
    longest = min(info.max_model_len, ready.max_model_len) if ready else info.max_model_len
    engine = EngineConfig(cache, fleet.changes.settings(number, info.role), fleet.options.slo, longest)
    terms = fleet.metrics.fleet.stats_of(number).step_time_coefficients
    known = fleet.known.get(number)
    return WorkerSettings(number, info.role, engine, terms, tuple(known.measured) if known else ())
