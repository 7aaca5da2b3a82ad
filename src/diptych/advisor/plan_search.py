"""The search for the best fleet: within a budget, or of the least cost that carries a load.

Within a budget every layout is simulated at the asked rate; those that keep the objectives run again at rates that grow
by STEP, until at most a few of each shape are left, whose highest rates are then searched
(search/goodput_search.py). So layouts are compared where their differences show, though all may carry the asked rate.
Without a budget each choice of workers gets the smallest fleet that carries the rate (search/fewest.py).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from diptych.advisor.device_layout import FleetLayout, LayoutName
from diptych.advisor.evaluation import evaluate
from diptych.advisor.layout_preference import LayoutOffer, ranked
from diptych.advisor.layout_runs import LayoutRuns, OnStage, Point, RunOptions
from diptych.advisor.layout_space import LayoutSpace
from diptych.control.errors import ConfigError
from diptych.simulation.report.outcome import workload_figures
from diptych.simulation.search_runs import OBJECTIVES
from diptych.simulation.settings import Settings
from diptych.workload.build import build
from diptych.workload.spec import ClosedLoop

FINALISTS = 2  # of each shape, whose highest rates are searched
FIRST_RATE = 1.0  # where none is asked
STEP = math.sqrt(2.0)
MOST_STEPS = 24
REFINEMENTS = 4  # steps to neighbours, of each shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """base: the load, the objectives, and all that layouts do not set. base.workload.rate None, without a trace: there
    is no asked rate, and the highest that a fleet carries is all that counts."""

    base: Settings
    space: LayoutSpace
    options: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        slo, workload = self.base.slo, self.base.workload
        has_slo = slo.ttft_ms or slo.tpot_ms or workload.slo.to_slo() or any(kind.slo for kind in workload.classes)
        if not has_slo and workload.trace is None:
            raise ConfigError(f"a plan needs objectives: {OBJECTIVES}", param="slo")
        if workload.arrivals.kind == "closed":
            raise ConfigError("a plan is made for an open loop; arrivals.kind is 'closed'", param="arrivals")

    def asked_rate(self) -> float | None:
        """Requests per second of the load: as given, or as the trace has it. Raises ConfigError."""
        workload = self.base.workload
        if workload.rate is not None or workload.trace is None:
            return workload.rate
        requests = build(workload, self.base.seed)
        assert not isinstance(requests, ClosedLoop), "refused above"
        figure = workload_figures(requests)["rate_rps"]
        return None if figure is None else float(figure)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayout:
    """A layout and its figures. point: of the run at the asked rate (see LayoutRuns.point), or without one at the
    highest that was kept. highest_rate_rps: at which enough requests meet their objectives (None: at no rate that was
    tried). runs: all runs of the layout, by their rates."""

    layout: FleetLayout
    point: Point
    highest_rate_rps: float | None
    runs: Sequence[Point]

    @property
    def attainment(self) -> float:
        """Attainment at the measured point."""
        return float(self.point["attainment"])

    @property
    def rate_per_cost(self) -> float:
        """Highest rate over USD per hour; over devices where no price is known."""
        return (self.highest_rate_rps or 0.0) / _size(self.layout)


@dataclass(frozen=True, slots=True)
class TriedLayout:
    """A layout of a search that is not over, with the highest rate so far at which it kept the objectives (None: at
    none)."""

    layout: FleetLayout
    highest_kept_rps: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """fleets: the best of each shape, the one to take first (see layout_preference). refused: what could not be
    simulated, by layout, with the reason. num_runs: simulations. twice: what carries twice the asked rate, in the best
    shape (None: there is no asked rate, or no such fleet)."""

    fleets: tuple[MeasuredLayout, ...]
    refused: Mapping[str, str]
    num_layouts: int
    num_runs: int
    twice: FleetLayout | None = None


class PlanSearch:
    """One question, and what was simulated for it."""

    def __init__(self, question: PlanQuestion, on_stage: OnStage | None = None) -> None:
        self._space = question.space
        self._asked = question.asked_rate()
        self._first_rate = self._asked or FIRST_RATE
        self._wanted = question.options.search.attainment
        self._runs = LayoutRuns(question.base, question.options, on_stage)

    def tried(self) -> list[TriedLayout]:
        """What is known of every layout that was simulated, the most for its cost first."""
        fleets = [TriedLayout(layout, rate) for layout, rate in self._runs.highest_kept().items()]
        return sorted(fleets, key=lambda fleet: -(fleet.highest_kept_rps or 0.0) / _size(fleet.layout))

    @property
    def num_runs(self) -> int:
        """Simulations so far."""
        return self._runs.num_runs

    def within_budget(self, layouts: Iterable[FleetLayout]) -> CapacityPlan:
        """The best of these and of their neighbours in the space: of those that keep the objectives at the asked rate
        (if any does) the one that carries the most for its cost. Raises ConfigError where none can be simulated."""
        by_shape: dict[LayoutName, list[FleetLayout]] = {}
        for layout in layouts:
            by_shape.setdefault(layout.shape, []).append(layout)
        finalists: list[FleetLayout] = []
        for group in by_shape.values():
            finalists += self._refined(self._most_enduring(group))
        return self._plan(finalists, lambda fleet: fleet.rate_per_cost)

    def smallest(self) -> CapacityPlan:
        """The cheapest fleet that keeps the objectives at the asked rate, for each shape, without a budget. Raises
        ConfigError, also where there is none."""
        if self._asked is None:
            raise ConfigError("rate is not given; without a budget (--devices) it must be", param="rate")
        shapes = [shape for shape in self._space.shapes if shape != "mixed"]  # three numbers at once are not searched
        ones = [
            self._space.layout(shape, kinds, (1,) * len(kinds))
            for shape in shapes
            for kinds in self._space.kinds_of(shape)
        ]
        sized = [layout for layout in self._runs.smallest(ones, self._asked) if layout is not None]
        cheapest: dict[LayoutName, FleetLayout] = {}
        for layout in sorted(sized, key=_size):
            cheapest.setdefault(layout.shape, layout)
        if not cheapest and len(self._runs.refused) < len(ones):
            raise ConfigError(f"no fleet keeps the objectives at {self._asked:g} requests/s", param="slo")
        return self._plan(list(cheapest.values()), lambda fleet: 1 / _size(fleet.layout))

    def exactly(self, layout: FleetLayout) -> CapacityPlan:
        """The figures of this layout alone. Raises ConfigError where it cannot be simulated."""
        return self._plan([layout], lambda fleet: fleet.rate_per_cost)

    def _most_enduring(self, layouts: Sequence[FleetLayout]) -> list[FleetLayout]:
        """At most FINALISTS of the layouts: those that keep the objectives at the highest rates."""
        rate = self._first_rate
        alive = list(layouts)
        for _ in range(MOST_STEPS):
            shares = self._runs.shares(alive, rate)
            alive = sorted(shares, key=lambda layout: -shares[layout])
            kept = [layout for layout in alive if shares[layout] >= self._wanted]
            if len(kept) <= FINALISTS:
                break
            alive, rate = kept, STEP * rate
        return alive[:FINALISTS]

    def _refined(self, best: list[FleetLayout]) -> list[FleetLayout]:
        """Walk from the best to better neighbours, compared at the first rate that the best does not carry."""
        rate = self._first_rate
        for _ in range(REFINEMENTS if best else 0):
            tried = self._runs.layouts
            near = [layout for layout in self._space.neighbours(best[0]) if layout not in tried]
            if not near:
                break
            for _ in range(MOST_STEPS):
                if self._runs.shares(best[:1], rate)[best[0]] < self._wanted:
                    break
                rate *= STEP
            shares = self._runs.shares([best[0], *near], rate)
            ranked = sorted(shares, key=lambda layout: -shares[layout])
            if ranked[0] == best[0]:
                break
            best = ranked[:FINALISTS]
        return best

    def _measured(self, layouts: Sequence[FleetLayout]) -> list[MeasuredLayout]:
        """The layouts that can be simulated, with the run at the asked rate and their highest rates."""
        runs, asked = self._runs, self._asked
        if asked is None:
            found = runs.highest_rates(layouts, self._first_rate)
        else:
            runs.run([(layout, asked) for layout in layouts], "the asked rate")
            known = runs.known(layouts)
            evaluated = evaluate(runs, layouts, runs.search, pace=asked, known=known)
            found = {each.fleet: each.found for each in evaluated if each.found is not None}
        fleets = []
        for layout, result in found.items():
            tried = runs.points(layout)
            rate = asked if asked is not None else result.rate or tried[0]["rate"]
            fleets.append(
                MeasuredLayout(
                    layout=layout,
                    point=runs.point(layout, rate),
                    highest_rate_rps=result.estimate or result.rate,
                    runs=tried,
                )
            )
        return fleets

    def _plan(self, finalists: Sequence[FleetLayout], worth: Callable[[MeasuredLayout], float]) -> CapacityPlan:
        """The best fleet of each layout, the one to take first (see layout_preference). Raises ConfigError where there
        is none."""
        measured = self._measured(finalists)
        if not measured:
            raise ConfigError(self._none_words(), param="devices")
        order = ranked([self._offer(fleet, worth) for fleet in measured], self._wanted)
        fleets = tuple(measured[number] for number in order)
        twice = self._twice(fleets[0].layout)
        return CapacityPlan(
            fleets=fleets,
            refused={str(layout): reason for layout, reason in self._runs.refused.items()},
            num_layouts=len(self._runs.layouts),
            num_runs=self._runs.num_runs,
            twice=twice,
        )

    def _offer(self, fleet: MeasuredLayout, worth: Callable[[MeasuredLayout], float]) -> LayoutOffer:
        highest, asked = fleet.highest_rate_rps, self._asked
        return LayoutOffer(
            fleet.layout.shape,
            fleet.attainment,
            worth(fleet),
            _size(fleet.layout),
            headroom=highest / asked if highest is not None and asked is not None else None,
        )

    def _twice(self, layout: FleetLayout) -> FleetLayout | None:
        """The smallest fleet of the same kinds of workers that keeps the objectives at twice the asked rate; of a mixed
        one, whose three numbers are not searched at once, twice its workers."""
        if self._asked is None:
            return None
        if layout.shape == "mixed":
            return layout.with_counts(tuple(2 * group.count for group in layout.groups))
        smallest = layout.with_counts((1,) * len(layout.groups))
        return self._runs.smallest([smallest], 2 * self._asked)[0]

    def _none_words(self) -> str:
        refused = self._runs.refused
        if not refused:
            return "the budget allows no fleet of these devices; raise it, or allow other shapes"
        layout, reason = next(iter(refused.items()))
        return f"none of {len(refused)} layouts can be simulated; {layout}: {reason}"


def _size(layout: FleetLayout) -> float:
    """What a fleet costs: USD per hour where prices are known, else devices."""
    return layout.usd_per_hour or float(layout.num_devices)
