"""The cores of this machine that a fleet may compute on, and who of its workers gets which while it serves."""

from collections.abc import Mapping

from diptych.base.processor import Processor, parse_cpu_list
from diptych.control.cluster.core_split import CoreSplit
from diptych.control.compute_share import ComputeShare
from diptych.control.errors import InvalidRequestError
from diptych.control.router.topology import Role
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
