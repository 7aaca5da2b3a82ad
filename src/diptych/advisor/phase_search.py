"""DistServe's placement search (Zhong et al., OSDI 2024, algorithm 1): each phase by itself.

For every kind of worker the highest rate of one prefill worker at which enough requests get their first token in time,
and of one decode worker at which enough get their later ones in time; of each phase the kind that carries the most for
its cost; and as many workers of either as the rate, or the budget, takes. With k kinds for each phase this searches 2 k
rates instead of one for each of k * k pairs and each of their ratios.

The authors simulate a phase alone. Here the measured worker is part of a split fleet with ``OTHERS`` workers of the
other phase, so that transfers count, and memory that is taken until they end. Where the others are the bottleneck, the
rate found is a lower bound.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from diptych.advisor.device_layout import FleetLayout, LayoutGroup, WorkerKind
from diptych.advisor.layout_runs import LayoutRuns, OnStage
from diptych.advisor.layout_space import FleetBudget, LayoutSpace
from diptych.advisor.plan_search import FIRST_RATE, PlanQuestion
from diptych.control.errors import ConfigError
from diptych.control.router.topology import Role
from diptych.simulation.settings import Settings, SloSettings

OTHERS = 8  # workers of the phase that is not measured


@dataclass(frozen=True, slots=True)
class PhaseRates:
    """Requests per second of one worker of each kind, in either phase; kinds that carry nothing are left out."""

    prefill: Mapping[WorkerKind, float]
    decode: Mapping[WorkerKind, float]

    def best(self) -> tuple[WorkerKind, WorkerKind]:
        """The kinds that carry the most for their cost. Raises ConfigError where a phase has none."""
        for name, rates in (("prefill", self.prefill), ("decode", self.decode)):
            if not rates:
                raise ConfigError(f"no kind of worker keeps the objectives of {name} at any rate", param="slo")
        return max(self.prefill, key=self._prefill_worth), max(self.decode, key=self._decode_worth)

    def layout(self, budget: FleetBudget, rate: float | None) -> FleetLayout:
        """Workers of the best kinds: within the budget those whose weaker phase carries the most, or else as many as
        carry the rate. Raises ConfigError."""
        kinds = self.best()
        first, second = self.prefill[kinds[0]], self.decode[kinds[1]]
        if budget.is_limited:
            ways = LayoutSpace.fillings(budget, kinds)
            if not ways:
                raise ConfigError(f"the budget allows no pair of {kinds[0]} and {kinds[1]}", param="devices")
            counts = max(ways, key=lambda way: min(way[0] * first, way[1] * second))
        elif rate is None:
            raise ConfigError("rate is not given; without a budget (--devices) it must be", param="rate")
        else:
            counts = math.ceil(rate / first), math.ceil(rate / second)
        return LayoutSpace.layout("split", kinds, counts)

    def _prefill_worth(self, kind: WorkerKind) -> float:
        return self.prefill[kind] / (kind.usd_per_hour or kind.num_devices)

    def _decode_worth(self, kind: WorkerKind) -> float:
        return self.decode[kind] / (kind.usd_per_hour or kind.num_devices)


def phase_rates(question: PlanQuestion, on_stage: OnStage | None = None) -> PhaseRates:
    """Search the rates of all kinds of the question's space. Raises ConfigError."""
    return PhaseRates(_rates("prefill", question, on_stage), _rates("decode", question, on_stage))


def _rates(role: Role, question: PlanQuestion, on_stage: OnStage | None) -> dict[WorkerKind, float]:
    """The rate of one worker of each kind in this role, beside workers of the largest of the other phase's kinds."""
    space = question.space
    kinds, others = space.prefill_kinds, space.decode_kinds
    if role == "decode":
        kinds, others = others, kinds
    largest = max(others, key=lambda kind: kind.num_devices)
    fleets = {_beside(role, kind, largest): kind for kind in kinds}
    runs = LayoutRuns(phase_settings(question.base, role), question.options, on_stage)
    try:
        found = runs.highest_rates(list(fleets), question.asked_rate() or FIRST_RATE)
    finally:
        runs.close()
    rates = {fleets[layout]: result.estimate or result.rate for layout, result in found.items()}
    return {kind: rate for kind, rate in rates.items() if rate}


def _beside(role: Role, kind: WorkerKind, other: WorkerKind) -> FleetLayout:
    groups = [LayoutGroup(role, 1, kind), LayoutGroup("decode" if role == "prefill" else "prefill", OTHERS, other)]
    return FleetLayout("split", tuple(groups if role == "prefill" else reversed(groups)))


def phase_settings(base: Settings, role: Role) -> Settings:
    """The same load with the objective of one phase alone, and no request served whole. Raises ConfigError where there
    is none of that phase."""
    slo = base.slo
    wanted = slo.ttft_ms if role == "prefill" else slo.tpot_ms
    if wanted is None:
        name = "ttft" if role == "prefill" else "tpot"
        raise ConfigError(f"{name}_slo_ms is not given; the search of each phase needs both", param="slo")
    own = SloSettings(ttft_ms=wanted) if role == "prefill" else SloSettings(tpot_ms=wanted)
    return msgspec.structs.replace(base, slo=own, disaggregate="always", admit_all=True)
