"""How the cores of a machine are divided among its workers: by the weights of their roles, in whole cores.

Pure: given the roles and who has which cores now, always the same division, with as few cores moved as possible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import gcd, lcm

from diptych.control.compute_share import ComputeShare
from diptych.control.errors import ConfigError
from diptych.control.router.topology import ROLES, Role

MAX_WEIGHT = 1000


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """A worker of one role gets cores in proportion to the weight of its role, and at least one."""

    prefill: int = 1
    decode: int = 1
    both: int = 1

    def __post_init__(self) -> None:
        for role in ROLES:
            if not 1 <= self.weight(role) <= MAX_WEIGHT:
                raise ConfigError(
                    f"core_split gives {role} the weight {self.weight(role)}; it must be in [1, {MAX_WEIGHT}]",
                    param="core_split",
                )

    def __str__(self) -> str:
        """The rule as parse_core_split reads it."""
        return ",".join(f"{role}={self.weight(role)}" for role in ROLES)

    def weight(self, role: Role) -> int:
        """The weight of a worker of this role."""
        return self.prefill if role == "prefill" else self.decode if role == "decode" else self.both

    def counts(self, roles: Mapping[int, Role], num_cores: int) -> dict[int, int]:
        """How many cores each worker gets; together all of them. Each gets one, and each further core goes to the
        worker that has the fewest for its weight (Webster's method of apportionment, which has no paradoxes: one more
        core takes none from any worker). Raises ConfigError with fewer cores than workers."""
        if num_cores < len(roles):
            raise ConfigError(
                f"core_split: {num_cores} cores for {len(roles)} workers; each needs one", param="core_split"
            )
        counts = dict.fromkeys(sorted(roles), 1)
        next_up = [(3 / self.weight(roles[worker]), worker) for worker in counts]
        heapify(next_up)
        for _ in range(num_cores - len(roles)):
            worker = next_up[0][1]
            counts[worker] += 1
            heapreplace(next_up, ((2 * counts[worker] + 1) / self.weight(roles[worker]), worker))
        return counts

    def divide(
        self, cores: Sequence[tuple[int, ...]], roles: Mapping[int, Role], held: Mapping[int, ComputeShare]
    ) -> dict[int, ComputeShare]:
        """The share of each worker of ``cores`` (each the CPUs in it): a thread on each of its cores. A worker keeps
        cores that it has now as far as it may. Raises ConfigError with fewer cores than workers."""
        counts = self.counts(roles, len(cores))
        free = list(cores)
        own: dict[int, list[tuple[int, ...]]] = {}
        for worker, count in counts.items():
            had = set(held[worker].cpus) if worker in held else set[int]()
            own[worker] = [core for core in free if had.issuperset(core)][:count]
            free = [core for core in free if core not in own[worker]]
        for worker, count in counts.items():
            missing = count - len(own[worker])
            own[worker] += free[:missing]
            free = free[missing:]
        return {
            worker: ComputeShare(tuple(sorted(cpu for core in mine for cpu in core)), len(mine))
            for worker, mine in own.items()
        }


def split_for(cores: Mapping[Role, int], workers: Mapping[Role, int]) -> CoreSplit | None:
    """The rule by which the workers of each role together get the cores in ``cores``, at least one each, whatever their
    numbers (None: there is none, as for five and three cores on two and two workers, whose halves are ties). workers:
    how many of each role; roles without any weigh as much as the mean worker."""
    num_cores, num_workers = sum(cores.values()), sum(workers.values())
    unit = lcm(*workers.values())
    present = {role: unit * cores[role] // count for role, count in workers.items()}
    least = gcd(*present.values())
    mean = max(1, unit * num_cores // (num_workers * least))
    weights = {role: present[role] // least if role in present else mean for role in ROLES}
    if not all(1 <= weight <= MAX_WEIGHT for weight in weights.values()):
        return None
    return CoreSplit(**weights) if _are_followed(cores, workers, weights) else None


def _are_followed(cores: Mapping[Role, int], workers: Mapping[Role, int], weights: Mapping[Role, int]) -> bool:
    """Whether Webster's method gives these cores to the workers of each role: no role's last core comes after, or at
    once with, the next one of another role."""
    for role, count in workers.items():
        most = -(-cores[role] // count)
        for other, num_others in workers.items():
            least = cores[other] // num_others
            comes_late = (2 * most - 1) * weights[other] >= (2 * least + 1) * weights[role]
            if other != role and most > 1 and comes_late:
                return False
    return True


def parse_core_split(text: str) -> CoreSplit:
    """The split of "prefill=3,decode=1"; roles that are not named weigh 1. Raises ConfigError."""
    weights: dict[str, int] = {}
    for part in text.split(","):
        role, equals, weight = part.strip().partition("=")
        if role not in ROLES or not equals or not weight.isdigit() or role in weights:
            message = f"core_split is {text!r}; expected weights such as prefill=3,decode=1"
            raise ConfigError(message, param="core_split")
        weights[role] = int(weight)
    return CoreSplit(**weights)
