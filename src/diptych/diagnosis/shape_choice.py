"""Which layout the present workers should have: each with the same workers and the same requests, simulated.

The evaluation and the rule are those of ``diptych plan`` (advisor/).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from diptych.advisor.device_layout import LayoutName
from diptych.advisor.evaluation import TARGET, EvaluatedFleet, Score, choose, evaluate
from diptych.advisor.layout_preference import LayoutOffer, preferred
from diptych.control.config import prefill_scheduler, reshaped
from diptych.control.router.topology import Role
from diptych.control.slo import NS_PER_S
from diptych.diagnosis.twin_model import TwinModel
from diptych.simulation.results import RequestTable

NOTABLE = 0.02  # a share that is said


@dataclass(frozen=True, slots=True)
class SimulatedShape:
    """A shape on these requests. attainment: share that meets its objectives (None: there are none). option: how serve
    is started with it."""

    shape: LayoutName
    words: str
    option: str
    attainment: float | None
    late_share: float
    slow_share: float
    ttft_s: float
    tpot_s: float

    @property
    def score(self) -> float:
        """More is better: requests that meet their objectives; without any, the faster."""
        return self.attainment if self.attainment is not None else -self.ttft_s


@dataclass(frozen=True, slots=True)
class ShapeChoice:
    """shapes: all that were simulated, the recommended first. model: the twin in the recommended."""

    shapes: tuple[SimulatedShape, ...]
    model: TwinModel

    @property
    def best(self) -> SimulatedShape:
        """The recommended."""
        return self.shapes[0]

    def reasons(self) -> list[str]:
        """Why, in words."""
        said = []
        for shape in self.shapes:
            met = "no objectives" if shape.attainment is None else f"{shape.attainment:.0%} meet their objectives"
            missed = []
            if shape.late_share > NOTABLE:
                missed.append(f"{shape.late_share:.0%} of the first tokens come late")
            if shape.slow_share > NOTABLE:
                missed.append(f"{shape.slow_share:.0%} of the answers are slow")
            why = f" ({' and '.join(missed)})" if missed else ""
            means = f"mean TTFT {shape.ttft_s * 1000:,.0f} ms, TPOT {shape.tpot_s * 1000:,.1f} ms"
            said.append(f"{shape.words}: {met}{why}; {means}")
        return said


@dataclass(frozen=True, slots=True)
class ObservedFleet:
    """The present workers in another layout. num_prefill: workers for prompts alone, of a split."""

    layout: LayoutName
    num_prefill: int = 0


class ObservedLoad:
    """Requests of an observed server, as advisor.evaluation.FleetLoad: pace 1 is that at which they came. tables: of
    every simulation so far."""

    def __init__(self, model: TwinModel) -> None:
        self.model = model.told()
        self.tables: dict[tuple[ObservedFleet, float], RequestTable] = {}

    def fleets(self) -> list[ObservedFleet]:
        """The layouts that as many workers can have."""
        splits = [ObservedFleet("split", num_prefill) for num_prefill in range(1, len(self.model.roles))]
        return [ObservedFleet("chunked"), ObservedFleet("unified"), *splits]

    def model_of(self, fleet: ObservedFleet) -> TwinModel:
        """The twin with its workers in this layout."""
        count, base = len(self.model.roles), self.model.engines[0]
        preset = reshaped(base.scheduler, "unified" if fleet.layout == "unified" else "chunked")
        roles: list[Role] = ["both"] * count
        if fleet.layout == "split":
            roles = ["prefill" if number < fleet.num_prefill else "decode" for number in range(count)]
        engines = tuple(
            base.with_(scheduler=prefill_scheduler(preset, base.slo) if role == "prefill" else preset) for role in roles
        )
        return replace(self.model, roles=tuple(roles), engines=engines)

    def scores(self, asked: Sequence[tuple[ObservedFleet, float]]) -> dict[tuple[ObservedFleet, float], Score]:
        for fleet, pace in asked:
            requests = (replace(spec, arrival_ns=round(spec.arrival_ns / pace)) for spec in self.model.requests)
            self.tables[fleet, pace] = replace(self.model_of(fleet), requests=tuple(requests)).run()
        return {key: Score.of(self.tables[key]) for key in asked}


def choose_shape(model: TwinModel) -> ShapeChoice:
    """The layouts that as many workers can have, which know the objectives that are asked; the one to take first."""
    load = ObservedLoad(model)
    evaluated = evaluate(load, load.fleets())
    found = [_measured(load, each) for each in evaluated]
    if any(each.score.judged for each in evaluated):
        number = choose(evaluated, lambda fleet: fleet.layout, target=TARGET)[0]
    else:
        number = preferred([_offer(shape, found) for shape in found], TARGET)
    others = sorted((shape for shape in found if shape is not found[number]), key=lambda shape: -shape.score)
    return ShapeChoice((found[number], *others), load.model_of(evaluated[number].fleet))


def _offer(shape: SimulatedShape, found: list[SimulatedShape]) -> LayoutOffer:
    """The offer of a shape without objectives: how near its TTFT comes to the shortest (no time: no request was
    finished)."""
    shortest = min((other.ttft_s for other in found if other.ttft_s), default=0.0)
    return LayoutOffer(shape.shape, shortest / shape.ttft_s if shape.ttft_s else 0.0)


def _measured(load: ObservedLoad, evaluated: EvaluatedFleet[ObservedFleet]) -> SimulatedShape:
    fleet, model = evaluated.fleet, load.model
    table, count = load.tables[fleet, 1.0], len(model.roles)
    option = f"--shape {fleet.layout}" + (f" --workers {count}" if count > 1 else "")
    words = f"{fleet.layout}, {count} worker{'s' if count > 1 else ''}"
    if fleet.layout == "split":
        option = f"--prefill {fleet.num_prefill} --decode {count - fleet.num_prefill}"
        words = f"split, {fleet.num_prefill} prefill + {count - fleet.num_prefill} decode"
    rows = table.completed_rows()
    late = slow = 0
    for row in rows:
        slo = model.requests[table.number[row]].slo
        tpot_ns = table.tpot_ns(row)
        late += bool(slo and slo.ttft_ns and table.ttft_ns(row) > slo.ttft_ns)
        slow += bool(slo and slo.tpot_ns and tpot_ns and tpot_ns > slo.tpot_ns)
    total = max(1, len(model.requests))
    tpots = [tpot for row in rows if (tpot := table.tpot_ns(row)) is not None]
    return SimulatedShape(
        fleet.layout,
        words,
        option,
        evaluated.score.attainment,
        late / total,
        slow / total,
        fmean(table.ttft_ns(row) for row in rows) / NS_PER_S if rows else 0.0,
        fmean(tpots) / NS_PER_S if tpots else 0.0,
    )
