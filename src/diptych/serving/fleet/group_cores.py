"""The cores of groups of workers: those that name some get these, the others divide what is left."""

from collections.abc import Sequence

from diptych.base.processor import Processor
from diptych.control.errors import ConfigError
from diptych.serving.fleet.fleet_options import CoreShare, divide_cores
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.serving.link.engine_options import parse_cores


def divide_between_groups(processor: Processor, groups: Sequence[WorkerGroup]) -> list[CoreShare | None]:
    """The cores of each worker, group after group. Groups that name no cores divide what the others leave. Raises
    ConfigError when that is nothing."""
    usable = processor.cores_of(processor.usable)
    named = {cpu for group in groups if isinstance(group.cores, str) for cpu in parse_cores(group.cores)}
    left = [core for core in usable if not named.intersection(core)]
    shares: dict[str, Sequence[CoreShare | None]] = {}
    for group in groups:
        if group.cores is None:
            continue
        if isinstance(group.cores, int):
            count = group.cores * group.replicas
            if count > len(left):
                raise ConfigError(
                    f"cores of {group.name} is {group.cores} for each of {group.replicas} workers; {len(left)} cores "
                    "are left",
                    param="cores",
                )
            own, left = left[:count], left[count:]
        else:
            own = list(processor.cores_of(parse_cores(group.cores)))
        shares[group.name] = _divided(own, group.replicas)
    others = [group for group in groups if group.cores is None]
    if others and not left:
        names = ", ".join(group.name for group in others)
        raise ConfigError(f"no cores are left for {names}", param="cores")
    rest = list(_divided(left, sum(group.replicas for group in others))) if others else []
    for group in others:
        shares[group.name], rest = rest[: group.replicas], rest[group.replicas :]
    return [share for group in groups for share in shares[group.name]]


def _divided(cores: Sequence[tuple[int, ...]], num_workers: int) -> Sequence[CoreShare | None]:
    if num_workers > 1:
        return divide_cores(cores, num_workers, None)
    return [CoreShare(",".join(str(cpu) for core in cores for cpu in core), len(cores))]
