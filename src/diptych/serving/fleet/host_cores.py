"""The cores of this machine that a fleet may compute on, and who of its workers gets which while it serves.

Groups of workers that name cores get these; the others divide what is left.
"""

from collections.abc import Mapping, Sequence

from diptych.base.processor import Processor, parse_cpu_list
from diptych.control.cluster.core_split import CoreSplit
from diptych.control.compute_share import ComputeShare
from diptych.control.errors import ConfigError, InvalidRequestError
from diptych.control.router.topology import Role
from diptych.serving.fleet.fleet_options import CoreShare, divide_cores
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.serving.link.engine_options import parse_cores


class HostCores:
    """named: the CPUs that the fleet is limited to, such as "0-7" (None: those that this process may use). split: the
    rule by which they are divided again whenever a role changes, or a worker comes or goes (None: they are not)."""

    def __init__(self, processor: Processor, named: str | None = None, split: CoreSplit | None = None) -> None:
        self.processor = processor
        self.split = split
        self.cores = processor.cores_of(parse_cores(named) if named else processor.usable)

    def share_of(self, text: str) -> ComputeShare:
        """A thread on each CPU of a list such as "0-3". Raises InvalidRequestError for a CPU of others."""
        known = {cpu for core in self.cores for cpu in core}
        try:
            cpus = parse_cpu_list(text)
        except ValueError:
            raise InvalidRequestError(f"cores is {text!r}; expected a list such as 0-3,8", param="cores") from None
        if foreign := sorted(set(cpus) - known):
            raise InvalidRequestError(
                f"cores is {text!r}; CPU {foreign[0]} is not one of {sorted(known)}", param="cores"
            )
        return ComputeShare(tuple(sorted(cpus)), len(cpus))

    def divide(self, roles: Mapping[int, Role], held: Mapping[int, ComputeShare]) -> dict[int, ComputeShare]:
        """The share of each worker by the rule; empty without one. held: the present shares."""
        return self.split.divide(self.cores, roles, held) if self.split is not None else {}


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
