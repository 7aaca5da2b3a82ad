"""Configurations of a fleet: the role and the shape of each worker, and which others can be reached from one.

Workers are alike here, so that a configuration is counted by (role, shape). ``assign`` turns counts back into workers,
with as few changes as possible.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from diptych.control.config import ShapeName
from diptych.control.router.topology import ROLES, Role

NEW_WORKER = -1

Kind = tuple[Role, ShapeName]
Counts = tuple[tuple[Kind, int], ...]


@dataclass(frozen=True, slots=True, order=True)
class WorkerSetting:
    """What one worker is for (worker NEW_WORKER: it has to be started)."""

    worker: int
    role: Role
    shape: ShapeName

    @property
    def kind(self) -> Kind:
        """What workers are counted by."""
        return self.role, self.shape


@dataclass(frozen=True, slots=True)
class Layout:
    """One configuration, in the order of the workers' numbers."""

    settings: tuple[WorkerSetting, ...]

    @property
    def counts(self) -> Counts:
        """How many workers of each kind; equal counts are equal configurations."""
        return as_counts(Counter(setting.kind for setting in self.settings))

    @property
    def label(self) -> str:
        """For people: ``1 prefill + 3 decode``; shapes where they are not all chunked."""
        shapes = {setting.shape for setting in self.settings}
        return " + ".join(
            f"{count} {role}" + (f" ({shape})" if shapes != {"chunked"} else "") for (role, shape), count in self.counts
        )


@dataclass(frozen=True, slots=True)
class Reach:
    """What may be changed: shapes to choose from (of workers that do both; the others have the first), how many
    workers there may be (least to most), and which keep what an operator has set."""

    shapes: tuple[ShapeName, ...]
    least_workers: int
    most_workers: int
    pinned: frozenset[int] = field(default_factory=frozenset)


def as_counts(counts: Mapping[Kind, int]) -> Counts:
    """In one order, without zeros."""
    return tuple(sorted((kind, count) for kind, count in counts.items() if count))


def has_both_phases(kinds: Iterable[Kind]) -> bool:
    """Whether a worker is left that can prefill, and one that can decode."""
    roles = {role for role, _ in kinds}
    return "both" in roles or {"prefill", "decode"} <= roles


def reachable(layout: Layout, reach: Reach) -> list[Counts]:
    """The present configuration first, then its neighbours (one role, one shape, one worker more or fewer), then the
    divisions of as many workers among the roles; each once, and each with a worker for both phases."""
    now = Counter(setting.kind for setting in layout.settings)
    pinned = Counter(setting.kind for setting in layout.settings if setting.worker in reach.pinned)
    found: dict[Counts, None] = {as_counts(now): None}
    for counts in (*_one_change(now, now - pinned, reach), *_rebuilt(now - pinned, pinned, reach)):
        if has_both_phases(kind for kind, count in counts.items() if count):
            found.setdefault(as_counts(counts))
    return list(found)


def _one_change(now: Counter[Kind], free: Counter[Kind], reach: Reach) -> Iterator[Counter[Kind]]:
    kinds: list[Kind] = [
        (role, shape) for role in ROLES for shape in (reach.shapes if role == "both" else reach.shapes[:1])
    ]
    total = now.total()
    for kind in sorted(free):
        for other in kinds:
            if other != kind:
                yield now - Counter((kind,)) + Counter((other,))
        if total > reach.least_workers:
            yield now - Counter((kind,))
    if total < reach.most_workers:
        for kind in kinds:
            yield now + Counter((kind,))


def _rebuilt(free: Counter[Kind], pinned: Counter[Kind], reach: Reach) -> Iterator[Counter[Kind]]:
    total, first = free.total(), reach.shapes[0]
    for shape in reach.shapes:
        for num_prefill in range(total + 1):
            for num_decode in range(total + 1 - num_prefill):
                kinds: dict[Kind, int] = {("prefill", first): num_prefill, ("decode", first): num_decode}
                yield pinned + Counter({**kinds, ("both", shape): total - num_prefill - num_decode})


def assign(layout: Layout, counts: Counts, idlest: Sequence[int], pinned: frozenset[int]) -> Layout:
    """A configuration with these counts: pinned workers stay, others keep their kind where it is wanted, and of those
    that must change or go, the ones that come first in ``idlest`` do."""
    rank = {worker: place for place, worker in enumerate(idlest)}
    busiest_first = sorted(layout.settings, key=lambda setting: (-rank.get(setting.worker, -1), setting.worker))
    wanted = Counter(dict(counts))
    kept: list[WorkerSetting] = []
    changing: list[WorkerSetting] = []
    for setting in sorted(busiest_first, key=lambda setting: setting.worker not in pinned):
        if setting.worker in pinned or wanted[setting.kind] > 0:
            wanted[setting.kind] -= 1
            kept.append(setting)
        else:
            changing.append(setting)
    left = sorted((+wanted).elements())
    for number, kind in enumerate(left):
        worker = changing[number].worker if number < len(changing) else NEW_WORKER
        kept.append(WorkerSetting(worker, *kind))
    return Layout(tuple(sorted(kept)))
