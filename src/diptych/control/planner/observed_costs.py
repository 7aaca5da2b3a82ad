"""What steps cost on the workers of each group, from what they report; and a layout as parts of equal workers, with
their prices."""

from collections import Counter
from collections.abc import Mapping, Sequence

from diptych.control.engine.reports import LoadReport
from diptych.control.planner.fleet_layout import STARTED_GROUP, Layout
from diptych.control.planner.planner_events import GroupCosts, ObservedWorker, Terms
from diptych.control.planner.pressure import OfferedWork, Part, StepPrices, prices_of

Reporting = tuple[ObservedWorker, LoadReport]


def group_costs(workers: Sequence[ObservedWorker]) -> tuple[GroupCosts, ...]:
    """The mean costs of the workers of each group. A worker that would be started is priced as the mean of all if none
    of its group runs."""
    groups: dict[str, list[Reporting]] = {}
    for worker in workers:
        if worker.load is not None:
            groups.setdefault(worker.group, []).append((worker, worker.load))
    if groups:
        groups.setdefault(STARTED_GROUP, [pair for members in groups.values() for pair in members])
    return tuple(_costs_of(group, members) for group, members in sorted(groups.items()))


def _costs_of(group: str, members: Sequence[Reporting]) -> GroupCosts:
    terms = [_terms_of_a_core(load, worker.num_cores) for worker, load in members]
    count = len(terms)
    return GroupCosts(
        (
            sum(each[0] for each in terms) / count,
            sum(each[1] for each in terms) / count,
            sum(each[2] for each in terms) / count,
            sum(each[3] for each in terms) / count,
            sum(each[4] for each in terms) / count,
        ),
        min(load.num_blocks for _, load in members),
        members[0][0].block_size,
        group,
        members[0][0].groups,
    )


def _terms_of_a_core(load: LoadReport, num_cores: int) -> Terms:
    units = max(1, num_cores)
    return (
        load.fixed_ns * units,
        load.token_ns * units,
        load.pair_ns * units,
        load.sequence_ns * units,
        load.context_ns * units,
    )


def fastest_terms(costs: Sequence[GroupCosts], workers: Sequence[ObservedWorker], most_cores: int) -> list[Terms]:
    """Prices of the groups that have workers, each on the most cores that one of its workers could get (0: cores are
    not divided)."""
    present = {worker.group for worker in workers}
    return [each.terms_on(most_cores) for each in costs if each.group in present]


class Pricing:
    """Prices of the workers of layouts under one load."""

    def __init__(self, costs: Sequence[GroupCosts], work: OfferedWork) -> None:
        self._costs: Mapping[str, GroupCosts] = {each.group: each for each in costs}
        self._work = work
        self._prices: dict[tuple[str, int], StepPrices] = {}

    def parts(self, layout: Layout) -> list[Part]:
        """The layout's workers, equal ones together."""
        counts = Counter((*setting.kind, setting.num_cores) for setting in layout.settings)
        return [
            (role, shape, self._of(group, num_cores), count)
            for (group, role, shape, num_cores), count in sorted(counts.items())
        ]

    def _of(self, group: str, num_cores: int) -> StepPrices:
        key = (group, num_cores)
        if key not in self._prices:
            costs = self._costs[group]
            self._prices[key] = prices_of(
                self._work, costs.terms_on(num_cores), costs.kv_tokens(self._work.context_tokens)
            )
        return self._prices[key]
