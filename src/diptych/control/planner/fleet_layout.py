"""Configurations of a fleet: the role and the shape of each worker, the rule that divides the cores, and which others
can be reached from one.

Workers of one *group* are alike, so that a configuration is counted by (group, role, shape). ``assign`` turns counts
back into workers, with as few changes as possible.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product

from diptych.control.cluster.core_split import CoreSplit, split_for
from diptych.control.config import PresetName
from diptych.control.router.topology import ROLES, Role, has_both_phases

NEW_WORKER = -1
STARTED_GROUP = ""  # of workers that belong to no pool: all of an equal fleet, and those that are started later
MOST_JOINT_GROUPS = 4  # that get a role each in one change

Kind = tuple[str, Role, PresetName]
Counts = tuple[tuple[Kind, int], ...]


@dataclass(frozen=True, slots=True, order=True)
class WorkerSetting:
    """What one worker is for (worker NEW_WORKER: it has to be started). group: of equal workers, which it never leaves.
    num_cores: that it computes on, where a CoreSplit divides them (0: none does)."""

    worker: int
    role: Role
    shape: PresetName
    group: str = STARTED_GROUP
    num_cores: int = 0

    @property
    def kind(self) -> Kind:
        """What workers are counted by."""
        return self.group, self.role, self.shape


@dataclass(frozen=True, slots=True)
class Configuration:
    """How many workers of each kind, and the rule that divides the cores (None: there is none)."""

    counts: Counts
    split: CoreSplit | None = None

    @property
    def num_workers(self) -> int:
        """Workers of all kinds."""
        return sum(count for _, count in self.counts)


@dataclass(frozen=True, slots=True)
class Layout:
    """One configuration, in the order of the workers' numbers."""

    settings: tuple[WorkerSetting, ...]
    split: CoreSplit | None = None

    @property
    def configuration(self) -> Configuration:
        """Equal ones need no change from one to the other."""
        return Configuration(as_counts(Counter(setting.kind for setting in self.settings)), self.split)

    @property
    def label(self) -> str:
        """The layout in words: ``1 prefill + 3 decode``; with shapes where they are not all chunked, pools and cores
        where there are any."""
        shapes = {setting.shape for setting in self.settings}
        cores = Counter[Kind]()
        for setting in self.settings:
            cores[setting.kind] += setting.num_cores
        words = []
        for kind, count in self.configuration.counts:
            group, role, shape = kind
            text = f"{count} {role}" + (f" ({shape})" if shapes != {"chunked"} else "")
            text += f" of {group}" if group else ""
            words.append(text + (f" on {cores[kind]} core{'s' if cores[kind] > 1 else ''}" if cores[kind] else ""))
        return " + ".join(words)


@dataclass(frozen=True, slots=True)
class Reach:
    """What may be changed: shapes to choose from (of workers that do both; the others have the first; group_shapes: of
    pools that have others), how many workers there may be (least to most), which keep what an operator has set, and
    whether cores may move between workers."""

    shapes: tuple[PresetName, ...]
    least_workers: int
    most_workers: int
    pinned: frozenset[int] = field(default_factory=frozenset)
    group_shapes: Mapping[str, tuple[PresetName, ...]] = field(default_factory=dict)
    moves_cores: bool = False

    def shapes_of(self, group: str) -> tuple[PresetName, ...]:
        """What the workers of a group may have."""
        return self.group_shapes.get(group, self.shapes)


def as_counts(counts: Mapping[Kind, int]) -> Counts:
    """Counts in a fixed order, without zeros."""
    return tuple(sorted((kind, count) for kind, count in counts.items() if count))


def reachable(layout: Layout, reach: Reach) -> list[Configuration]:
    """The present configuration first, then its neighbours (cores between two roles, one role, one shape, one worker
    more or fewer), then the divisions of as many workers among the roles, of each group and of whole groups; each once,
    and each with a worker for both phases. What changes workers keeps the rule that divides the cores; where cores may
    move, a neighbour also comes with equal cores for all, since a rule for some roles may be wrong for others."""
    now = Counter(setting.kind for setting in layout.settings)
    pinned = Counter(setting.kind for setting in layout.settings if setting.worker in reach.pinned)
    present = layout.configuration
    neighbours = list(_one_change(now, now - pinned, reach))
    changed = [(counts, layout.split) for counts in (*neighbours, *_rebuilt(now - pinned, pinned, reach))]
    found: dict[Configuration, None] = {present: None}
    if layout.split is not None and reach.moves_cores:
        found.update((replace(present, split=split), None) for split in _core_moves(layout))
        changed += [(counts, CoreSplit()) for counts in neighbours]
    for counts, split in changed:
        if has_both_phases(role for (_, role, _), count in counts.items() if count):
            found.setdefault(Configuration(as_counts(counts), split))
    return list(found)


def _core_moves(layout: Layout) -> Iterator[CoreSplit]:
    """The rules by which the workers of one role together have a core more, or two, four and so on, or each of them one
    more, and those of another role have as many fewer."""
    cores, workers = Counter[Role](), Counter[Role]()
    for setting in layout.settings:
        cores[setting.role] += setting.num_cores
        workers[setting.role] += 1
    for taker, giver in permutations(sorted(workers), 2):
        most = cores[giver] - workers[giver]
        counts = {1 << power for power in range(most.bit_length())} | {workers[taker], workers[giver]}
        for count in sorted(counts):
            wanted = {**cores, taker: cores[taker] + count, giver: cores[giver] - count}
            if count <= most and (split := split_for(wanted, workers)) is not None:
                yield split


def _one_change(now: Counter[Kind], free: Counter[Kind], reach: Reach) -> Iterator[Counter[Kind]]:
    total = now.total()
    for kind in sorted(free):
        for other in _kinds_of(kind[0], reach):
            if other != kind:
                yield now - Counter((kind,)) + Counter((other,))
        if total > reach.least_workers:
            yield now - Counter((kind,))
    if total < reach.most_workers:
        for kind in _kinds_of(STARTED_GROUP, reach):
            yield now + Counter((kind,))


def _kinds_of(group: str, reach: Reach) -> list[Kind]:
    shapes = reach.shapes_of(group)
    return [(group, role, shape) for role in ROLES for shape in (shapes if role == "both" else shapes[:1])]


def _rebuilt(free: Counter[Kind], pinned: Counter[Kind], reach: Reach) -> Iterator[Counter[Kind]]:
    groups = sorted({group for group, _, _ in free})
    for group in groups:
        others = Counter({kind: count for kind, count in free.items() if kind[0] != group})
        for division in _divisions(group, free.total() - others.total(), reach.shapes_of(group)):
            yield pinned + others + division
    if 1 < len(groups) <= MOST_JOINT_GROUPS:
        for roles in product(ROLES, repeat=len(groups)):
            role_of = dict(zip(groups, roles, strict=True))
            whole: Counter[Kind] = Counter()
            for (group, _, _), count in free.items():
                whole[group, role_of[group], reach.shapes_of(group)[0]] += count
            yield pinned + whole


def _divisions(group: str, total: int, shapes: Sequence[PresetName]) -> Iterator[Counter[Kind]]:
    first = shapes[0]
    for shape in shapes:
        for num_prefill in range(total + 1):
            for num_decode in range(total + 1 - num_prefill):
                kinds: dict[Kind, int] = {(group, "prefill", first): num_prefill, (group, "decode", first): num_decode}
                yield Counter({**kinds, (group, "both", shape): total - num_prefill - num_decode})


def assign(
    layout: Layout, wanted: Configuration, idlest: Sequence[int], pinned: frozenset[int], num_cores: int = 0
) -> Layout:
    """The layout of a configuration: pinned workers stay, others keep their kind where it is wanted, and of those that
    must change or go, the ones that come first in ``idlest`` do. num_cores: that the rule divides. Raises ConfigError
    when these are fewer than the workers."""
    rank = {worker: place for place, worker in enumerate(idlest)}
    busiest_first = sorted(layout.settings, key=lambda setting: (-rank.get(setting.worker, -1), setting.worker))
    missing = Counter(dict(wanted.counts))
    kept: list[WorkerSetting] = []
    changing: dict[str, list[WorkerSetting]] = {}
    for setting in sorted(busiest_first, key=lambda setting: setting.worker not in pinned):
        if setting.worker in pinned or missing[setting.kind] > 0:
            missing[setting.kind] -= 1
            kept.append(setting)
        else:
            changing.setdefault(setting.group, []).append(setting)
    for group, role, shape in sorted((+missing).elements()):
        left = changing.get(group)
        kept.append(WorkerSetting(left.pop(0).worker if left else NEW_WORKER, role, shape, group))
    return Layout(tuple(divided(kept, wanted.split, num_cores)), wanted.split)


def divided(settings: Iterable[WorkerSetting], split: CoreSplit | None, num_cores: int) -> list[WorkerSetting]:
    """Settings in their order, with the cores that the rule gives each. Raises ConfigError for too few cores."""
    ordered = sorted(settings)
    counts = None
    if split is not None:
        counts = split.counts({number: setting.role for number, setting in enumerate(ordered)}, num_cores)
    return [
        WorkerSetting(
            setting.worker, setting.role, setting.shape, setting.group, 0 if counts is None else counts[number]
        )
        for number, setting in enumerate(ordered)
    ]
