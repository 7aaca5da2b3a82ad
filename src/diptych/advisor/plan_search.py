"""The search for the best fleet: within a budget, or of the least cost that carries a load.

First a few requests are served one by one on a worker of each kind: kinds that miss the objectives even so are left
out, and where all do, that is the answer. Within a budget every layout is simulated at the asked rate; those that keep
the objectives run again at twice the rate, until at most a few of each shape and choice of devices are left, whose
highest rates are then searched (search/goodput_search.py). So layouts are compared where their differences show,
though all may carry the asked rate. Without a budget each choice of workers gets the smallest fleet that carries the
rate (search/fewest.py), the choices of the fewest devices first: the best so far bounds the later ones. Fleets are
compared by short runs, and until few are left by shorter ones (layout_runs.py); the figures of those in the plan are of
long ones, to their end.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from diptych.advisor.device_layout import FleetLayout, LayoutName
from diptych.advisor.layout_preference import SIMPLER, LayoutOffer, is_tie, preferred, ranked
from diptych.advisor.layout_runs import AloneFigures, LayoutRuns, OnStage, Point, RunOptions
from diptych.advisor.layout_space import LayoutSpace
from diptych.control.errors import ConfigError
from diptych.simulation.report.outcome import workload_figures
from diptych.simulation.search_runs import MOST_WORKERS, OBJECTIVES
from diptych.simulation.settings import Settings, SloSettings
from diptych.workload.build import build
from diptych.workload.spec import ClosedLoop

FINALISTS = 2  # of each shape, whose highest rates are searched
FIRST_RATE = 1.0  # where none is asked
STEP = math.sqrt(2.0)
MOST_STEPS = 24
REFINEMENTS = 4  # steps to neighbours, of each shape
LAST_STAGES = 4  # within a budget the highest rates; then the asked rate, what was found, twice the rate


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
    """fleets: the best of each shape, the one to take first (see layout_preference). by_device: the best of the fleets
    that have one kind of device, for each, in the order of the fleets' worth. ties: the fleets that come within TIE of
    the first. keeps: whether the first keeps the objectives at the asked rate. refused: what could not be simulated,
    by layout, with the reason. left_out: layouts of one worker of each kind that miss the objectives even of requests
    alone, with their figures in words. num_runs: simulations. twice: what carries twice the asked rate, in the best
    shape (None: there is no asked rate, no such fleet, or the first does not keep the asked one). enough: what carries
    the asked rate, in that shape, where the first does not (None: there is no such fleet)."""

    fleets: tuple[MeasuredLayout, ...]
    by_device: Mapping[str, MeasuredLayout]
    ties: tuple[MeasuredLayout, ...]
    keeps: bool
    refused: Mapping[str, str]
    left_out: Mapping[str, str]
    num_layouts: int
    num_runs: int
    twice: FleetLayout | None = None
    enough: FleetLayout | None = None


class PlanSearch:
    """One question, and what was simulated for it. on_stage: told what is done, and the share of the whole search.
    on_first: told the first answer, a sentence."""

    def __init__(
        self, question: PlanQuestion, on_stage: OnStage | None = None, on_first: Callable[[str], None] | None = None
    ) -> None:
        self._question = question
        self._space = question.space
        self._asked = question.asked_rate()
        self._first_rate = self._asked or FIRST_RATE
        self._wanted = question.options.search.attainment
        self._stages = _Stages(on_stage)
        self._on_first = on_first
        self._runs = LayoutRuns(question.base, question.options, self._stages.show)
        self._left_out: dict[str, str] = {}

    def close(self) -> None:
        """End the processes that simulate."""
        self._runs.close()

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
        (if any does) the one that carries the most for its cost. Raises ConfigError where none can be simulated, or
        none keeps the objectives of a request alone."""
        groups: dict[_Group, list[FleetLayout]] = {}
        for layout in self._able(list(layouts)):
            groups.setdefault((layout.shape, layout.devices), []).append(layout)
        self._stages.expect(len(groups) + LAST_STAGES)
        finalists: list[list[FleetLayout]] = []
        for _, group in sorted(groups.items(), key=lambda item: SIMPLER.index(item[0][0])):
            self._stages.begin()
            self._say_first(group)
            finalists.append(self._refined(self._most_enduring(group)))
        return self._plan(self._raced(finalists), lambda fleet: fleet.rate_per_cost)

    def smallest(self) -> CapacityPlan:
        """The cheapest fleet that keeps the objectives at the asked rate, for each shape and choice of devices, without
        a budget. Raises ConfigError, also where there is none."""
        if self._asked is None:
            raise ConfigError("rate is not given; without a budget (--devices) it must be", param="rate")
        shapes = [shape for shape in self._space.shapes if shape != "mixed"]  # three numbers at once are not searched
        able = self._able(
            [
                self._space.layout(shape, kinds, (1,) * len(kinds))
                for shape in shapes
                for kinds in self._space.kinds_of(shape)
            ]
        )
        waiting: dict[_Group, list[FleetLayout]] = {}
        for layout in sorted(able, key=_size):
            waiting.setdefault((layout.shape, layout.devices), []).append(layout)
        self._stages.expect(max(map(len, waiting.values()), default=0) + LAST_STAGES - 1)
        cheapest: dict[_Group, FleetLayout] = {}
        while waiting:
            self._stages.begin()
            self._size_next(waiting, cheapest)
            waiting = {key: rest for key, rest in waiting.items() if rest}
        if not cheapest and able:
            raise ConfigError(f"no fleet keeps the objectives at {self._asked:g} requests/s", param="slo")
        return self._plan(self._confirmed(list(cheapest.values())), lambda fleet: 1 / _size(fleet.layout))

    def exactly(self, layout: FleetLayout) -> CapacityPlan:
        """The figures of this layout alone. Raises ConfigError where it cannot be simulated."""
        self._stages.expect(LAST_STAGES - 1)
        return self._plan([layout], lambda fleet: fleet.rate_per_cost)

    def _able(self, layouts: Sequence[FleetLayout]) -> list[FleetLayout]:
        """The layouts that can keep the objectives, as far as requests alone on them say. Raises ConfigError where all
        miss them."""
        least = {layout: layout.with_counts((1,) * len(layout.groups)) for layout in layouts}
        alone = self._runs.alone(list(dict.fromkeys(least.values())))
        able = {layout for layout, figures in alone.items() if figures.can_reach(self._wanted)}
        if alone and not able:
            raise unreachable(self._question.base.slo, self._wanted, alone)
        self._left_out = {
            str(layout): _alone_words(figures, self._wanted) for layout, figures in alone.items() if layout not in able
        }
        return [layout for layout in layouts if least[layout] in able]

    def _say_first(self, group: Sequence[FleetLayout]) -> None:
        """Say of the first layout how it fares at the asked rate, before all others are tried."""
        if self._on_first is None or self._runs.num_runs:
            return
        shares = self._runs.shares(group[:1], self._first_rate)
        for layout, share in shares.items():
            verb = "keeps" if share >= self._wanted else "does not keep"
            self._on_first(f"so far: {layout} {verb} the objectives at {self._first_rate:.3g} requests/s")

    def _size_next(self, waiting: dict["_Group", list[FleetLayout]], cheapest: dict["_Group", FleetLayout]) -> None:
        """Size the next choice of workers of each group, where one of each kind costs less than the best so far."""
        assert self._asked is not None
        asked, most = [], []
        for key, rest in waiting.items():
            layout = rest.pop(0)
            best = cheapest.get(key)
            if best is None or _size(layout) < _size(best):
                asked.append(layout)
                most.append(MOST_WORKERS if best is None else _most_workers(layout, _size(best)))
        for layout, fleet in zip(asked, self._runs.smallest(asked, self._asked, most=most), strict=True):
            key = layout.shape, layout.devices
            if fleet is not None and (key not in cheapest or _size(fleet) < _size(cheapest[key])):
                is_first = not cheapest
                cheapest[key] = fleet
                if is_first and self._on_first is not None:
                    self._on_first(f"so far: {fleet} keeps the objectives at {self._asked:.3g} requests/s")

    def _confirmed(self, fleets: Sequence[FleetLayout]) -> list[FleetLayout]:
        """The fleets; where one keeps the objectives in short runs alone, the smallest that does so in whole ones."""
        assert self._asked is not None
        self._runs.run([(fleet, self._asked) for fleet in fleets], "the asked rate, whole", "whole")
        confirmed = []
        for fleet in fleets:
            if not self._runs.keeps(fleet, self._asked):
                least = fleet.with_counts((1,) * len(fleet.groups))
                start = max(group.count for group in fleet.groups)
                larger = self._runs.smallest([least], self._asked, start=start, length="whole")[0]
                fleet = fleet if larger is None else larger
            confirmed.append(fleet)
        return confirmed

    def _most_enduring(self, layouts: Sequence[FleetLayout]) -> list[FleetLayout]:
        """At most FINALISTS of the layouts: those that keep the objectives at the highest rates. A rate at which none
        does is followed by one between it and the last."""
        rate, step = self._first_rate, STEP**2
        alive = list(layouts)
        for _ in range(MOST_STEPS):
            shares = self._runs.shares(alive, rate)
            ordered = sorted(shares, key=lambda layout: -shares[layout])
            kept = [layout for layout in ordered if shares[layout] >= self._wanted]
            if len(kept) > FINALISTS:
                alive, rate = kept, step * rate
            elif not kept and rate > self._first_rate and step > STEP and len(alive) > FINALISTS:
                rate, step = rate / STEP, STEP
            else:
                return ordered[:FINALISTS]
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

    def _raced(self, finalists: Sequence[Sequence[FleetLayout]]) -> list[FleetLayout]:
        """The finalists that may be the best of their group: the first, and those that keep the objectives at the
        highest rate of the first, by their cost."""
        self._stages.begin()
        firsts = [group[0] for group in finalists if group]
        found = self._runs.highest_rates(firsts, self._first_rate)
        rates = {
            other: rate * _size(other) / _size(group[0])
            for group in finalists
            if group and group[0] in found and (rate := found[group[0]].rate) is not None
            for other in group[1:]
        }
        self._runs.run(list(rates.items()), "the second of each shape")
        equal = [layout for layout, rate in rates.items() if layout not in self._runs.refused]
        return [*found, *(layout for layout in equal if self._runs.keeps(layout, rates[layout]))]

    def _measured(self, layouts: Sequence[FleetLayout]) -> list[MeasuredLayout]:
        """The layouts that can be simulated, with a whole run at the asked rate, and their highest rates. Those that
        fare otherwise in the whole run are searched by whole runs."""
        runs, asked = self._runs, self._asked
        self._stages.begin()
        if asked is not None:
            before = {layout: runs.keeps(layout, asked) for layout in layouts if runs.has_run(layout, asked)}
            runs.run([(layout, asked) for layout in layouts], "the asked rate, whole", "whole")
            runs.judge_by_whole_runs([layout for layout, kept in before.items() if runs.keeps(layout, asked) != kept])
        found = runs.highest_rates(layouts, self._first_rate)
        self._stages.begin()
        if asked is None:
            best = {layout: result.rate for layout, result in found.items() if result.rate is not None}
            runs.run(list(best.items()), "the highest rates, whole", "whole")
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
        offers = [self._offer(fleet, worth) for fleet in measured]
        order = ranked(offers, self._wanted)
        fleets = tuple(measured[number] for number in order)
        ties = [number for number in order[1:] if is_tie(offers[order[0]], offers[number], self._wanted)]
        keeps = self._asked is None or fleets[0].attainment >= self._wanted
        larger = self._larger(fleets[0], 2.0 if keeps else 1.0)
        return CapacityPlan(
            fleets=fleets,
            by_device=self._by_device(measured, offers),
            ties=tuple(measured[number] for number in ties),
            keeps=keeps,
            refused={str(layout): reason for layout, reason in self._runs.refused.items()},
            left_out=self._left_out,
            twice=larger if keeps else None,
            enough=None if keeps else larger,
            num_layouts=len(self._runs.layouts),
            num_runs=self._runs.num_runs,
        )

    def _by_device(
        self, measured: Sequence[MeasuredLayout], offers: Sequence[LayoutOffer]
    ) -> dict[str, MeasuredLayout]:
        """The best fleet of each device, of those that have no other."""
        found = {}
        for name in dict.fromkeys(name for fleet in measured for name in sorted(fleet.layout.devices)):
            own = [number for number, fleet in enumerate(measured) if fleet.layout.devices == {name}]
            if own:
                found[name] = own[preferred([offers[number] for number in own], self._wanted)]
        order = sorted(
            found, key=lambda name: -min(offers[found[name]].attainment, self._wanted) - offers[found[name]].worth
        )
        return {name: measured[found[name]] for name in order}

    def _offer(self, fleet: MeasuredLayout, worth: Callable[[MeasuredLayout], float]) -> LayoutOffer:
        highest, asked = fleet.highest_rate_rps, self._asked
        return LayoutOffer(
            fleet.layout.shape,
            fleet.attainment,
            worth(fleet),
            _size(fleet.layout),
            headroom=highest / asked if highest is not None and asked is not None else None,
        )

    def _larger(self, fleet: MeasuredLayout, factor: float) -> FleetLayout | None:
        """The smallest fleet of the same kinds of workers that keeps the objectives at ``factor`` times the asked rate;
        of a mixed one, whose three numbers are not searched at once, twice its workers for twice the rate."""
        self._stages.begin()
        layout = fleet.layout
        if self._asked is None:
            return None
        if layout.shape == "mixed":
            return layout.with_counts(tuple(2 * group.count for group in layout.groups)) if factor > 1 else None
        smallest = layout.with_counts((1,) * len(layout.groups))
        growth = factor * self._asked / (fleet.highest_rate_rps or self._asked)
        start = max(1, round(growth * max(group.count for group in layout.groups)))
        return self._runs.smallest([smallest], factor * self._asked, start=min(start, MOST_WORKERS))[0]

    def _none_words(self) -> str:
        refused = self._runs.refused
        if not refused:
            return "the budget allows no fleet of these devices; raise it, or allow other shapes"
        layout, reason = next(iter(refused.items()))
        return f"none of {len(refused)} layouts can be simulated; {layout}: {reason}"


_Group = tuple[LayoutName, frozenset[str]]


class _Stages:
    """What is done of a search in several stages, the first of which (requests alone) is not counted."""

    def __init__(self, on_stage: OnStage | None) -> None:
        self._on_stage = on_stage
        self._number, self._total = 0, 1
        self._done = self._shown = 0.0  # of the present stage: before the runs that are under way, and shown

    def expect(self, total: int) -> None:
        """Take in how many stages are to come."""
        self._total = max(1, total)

    def begin(self) -> None:
        """The next stage."""
        self._number = min(self._number + 1, self._total)
        self._done = 0.0

    def show(self, what: str, share: float) -> None:
        """A batch of runs of the present stage, of which there may be more: each counts for half of what is left."""
        part = self._done + (1 - self._done) * share / 2
        if share >= 1:
            self._done = part
        if self._on_stage is None:
            return
        words = f"step {self._number} of {self._total}: {what}" if self._number else what
        self._shown = max(self._shown, (self._number - 1 + part) / self._total if self._number else 0.0)
        self._on_stage(words, self._shown)


def unreachable(slo: SloSettings, attainment: float, alone: Mapping[FleetLayout, AloneFigures]) -> ConfigError:
    """Why no fleet keeps the objectives, whatever its size."""
    share = f"{attainment:.0%} of the requests"
    for name, option, limit in (("ttft", "TTFT", slo.ttft_ms), ("tpot", "TPOT", slo.tpot_ms)):
        known = {layout: ms for layout, each in alone.items() if (ms := getattr(each, f"{name}_ms")) is not None}
        if limit is None or not known:
            continue
        best = min(known, key=lambda layout: known[layout])
        if known[best] > limit:
            return ConfigError(
                f"the {option} objective of {limit:g} ms is unreachable with any number of these devices: alone on an "
                f"idle fleet, {share} have at best a {option} of {known[best]:.3g} ms ({best}). Raise it to more than "
                "that, allow faster devices or more of them for a worker (--parallel), or a smaller model",
                param=f"{name}_slo_ms",
            )
    best = max(alone, key=lambda layout: alone[layout].met / alone[layout].judged)
    return ConfigError(
        f"the objectives are unreachable with any number of these devices: alone on an idle fleet, at best "
        f"{alone[best].met / alone[best].judged:.0%} of the requests meet them, and {attainment:.0%} should ({best}: "
        f"{_alone_words(alone[best], attainment)})",
        param="slo",
    )


def _alone_words(alone: AloneFigures, attainment: float) -> str:
    figures = [("TTFT", alone.ttft_ms), ("TPOT", alone.tpot_ms)]
    words = " and ".join(f"{name} {ms:.3g} ms" for name, ms in figures if ms is not None)
    return f"{attainment:.0%} of the requests alone on it have {words}"


def _most_workers(layout: FleetLayout, size: float) -> int:
    """The most workers that one group can have in a fleet of less than this size, beside one of each other."""
    rest = size - _size(layout)
    costs = [_size(FleetLayout(layout.shape, (group,))) for group in layout.groups]
    return min(MOST_WORKERS, 1 + int(rest / min(costs)))


def _size(layout: FleetLayout) -> float:
    """What a fleet costs: USD per hour where prices are known, else devices."""
    return layout.usd_per_hour or float(layout.num_devices)
