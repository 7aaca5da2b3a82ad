"""The layouts that a budget allows.

A layout belongs to the space only if no worker of any of its groups could be added within the budget: a fleet that
leaves devices unused does nothing that a larger one does not. Where the numbers of workers can be chosen in many ways,
the space holds some of them evenly spread; ``neighbours`` are the ways next to one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from diptych.advisor.device_layout import FleetLayout, LayoutGroup, LayoutName, WorkerKind
from diptych.control.errors import ConfigError
from diptych.control.router.topology import Role

MOST_SPLITS = 8  # numbers of workers that are tried for given kinds of workers
MOST_WORKERS = 1024
ROUNDING = 1e-9
ROLES_OF: dict[LayoutName, tuple[Role, ...]] = {
    "unified": ("both",),
    "chunked": ("both",),
    "split": ("prefill", "decode"),
    "mixed": ("prefill", "decode", "both"),
}


@dataclass(frozen=True, slots=True)
class FleetBudget:
    """Limits of a fleet; None: no limit. kilowatts: of the rated power of its devices."""

    devices: int | None = None
    usd_per_hour: float | None = None
    kilowatts: float | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "usd_per_hour", "kilowatts"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be positive", param=name)

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return (self.devices, self.usd_per_hour, self.kilowatts) != (None, None, None)

    def most(self, kind: WorkerKind, beside: Sequence[LayoutGroup] = ()) -> int:
        """How many workers of this kind fit beside those groups."""
        limits = (
            (self.devices, kind.num_devices, sum(group.count * group.kind.num_devices for group in beside)),
            (self.usd_per_hour, kind.usd_per_hour, sum(group.count * group.kind.usd_per_hour for group in beside)),
            (self.kilowatts, kind.kilowatts, sum(group.count * group.kind.kilowatts for group in beside)),
        )
        counts = [int((limit - used) / each + ROUNDING) for limit, each, used in limits if limit is not None and each]
        return max(0, min([*counts, MOST_WORKERS]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSpace:
    """shapes: those to be tried. kinds: of workers that do both. prefill_kinds, decode_kinds: of the pools of a split
    fleet. The workers between the pools of a mixed fleet are like those that decode, as in Splitwise."""

    shapes: tuple[LayoutName, ...]
    kinds: tuple[WorkerKind, ...]
    prefill_kinds: tuple[WorkerKind, ...]
    decode_kinds: tuple[WorkerKind, ...]
    budget: FleetBudget

    def layouts(self) -> Iterator[FleetLayout]:
        """All that fill the budget, or of each choice of kinds at most MOST_SPLITS."""
        for shape in self.shapes:
            for kinds in self.kinds_of(shape):
                yield from (
                    self.layout(shape, kinds, counts)
                    for counts in spread(self.fillings(self.budget, kinds), MOST_SPLITS)
                )

    @staticmethod
    def layout(shape: LayoutName, kinds: tuple[WorkerKind, ...], counts: tuple[int, ...]) -> FleetLayout:
        """The layout with ``counts`` workers of each kind, in the roles of ``shape``."""
        groups = zip(ROLES_OF[shape], counts, kinds, strict=True)
        return FleetLayout(shape, tuple(LayoutGroup(role, count, kind) for role, count, kind in groups))

    def kinds_of(self, shape: LayoutName) -> Iterator[tuple[WorkerKind, ...]]:
        """The kinds of workers of a shape's groups, in every choice."""
        if shape in ("unified", "chunked"):
            yield from ((kind,) for kind in self.kinds)
        elif shape == "split":
            yield from product(self.prefill_kinds, self.decode_kinds)
        else:
            yield from ((first, second, second) for first, second in product(self.prefill_kinds, self.decode_kinds))

    def neighbours(self, layout: FleetLayout) -> list[FleetLayout]:
        """The layouts next to this one among those that fill the budget with the same kinds of workers: one worker more
        or one fewer in some group but the last, and the others as near as the budget allows."""
        kinds = tuple(group.kind for group in layout.groups)
        own = tuple(group.count for group in layout.groups)
        others = [counts for counts in self.fillings(self.budget, kinds) if counts != own]
        distance = {counts: max(abs(a - b) for a, b in zip(counts[:-1], own[:-1], strict=True)) for counts in others}
        nearest = min(distance.values(), default=0)
        return [layout.with_counts(counts) for counts in others if distance[counts] == nearest]

    @staticmethod
    def fillings(budget: FleetBudget, kinds: tuple[WorkerKind, ...]) -> list[tuple[int, ...]]:
        """Numbers of workers, at least one of each kind, to which none can be added."""
        return [counts for counts in _partial(budget, kinds, ()) if not _has_room(budget, kinds, counts)]


def spread(fillings: Sequence[tuple[int, ...]], most: int) -> list[tuple[int, ...]]:
    """At most ``most`` of the fillings, evenly spread, with the first and the last."""
    if len(fillings) <= most:
        return list(fillings)
    return [fillings[round(index * (len(fillings) - 1) / (most - 1))] for index in range(most)]


def _partial(
    budget: FleetBudget, kinds: tuple[WorkerKind, ...], groups: tuple[LayoutGroup, ...]
) -> Iterator[tuple[int, ...]]:
    """Numbers of workers that begin with these groups; of the last kind as many as fit."""
    kind = kinds[len(groups)]
    most = budget.most(kind, groups)
    is_last = len(groups) + 1 == len(kinds)
    for count in range(most if is_last else 1, most + 1):
        if not count:
            continue
        now = (*groups, LayoutGroup("both", count, kind))
        if is_last:
            yield tuple(group.count for group in now)
        else:
            yield from _partial(budget, kinds, now)


def _has_room(budget: FleetBudget, kinds: tuple[WorkerKind, ...], counts: tuple[int, ...]) -> bool:
    groups = [LayoutGroup("both", count, kind) for kind, count in zip(kinds, counts, strict=True)]
    return any(budget.most(kind, groups) for kind in kinds)
