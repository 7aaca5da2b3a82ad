"""Which shape the present workers should have: each shape with the same workers and the same requests, simulated.

The rule is that of ``diptych plan`` (advisor/layout_preference.py).
"""

from dataclasses import dataclass, replace
from statistics import fmean

from diptych.advisor.device_layout import LayoutName
from diptych.advisor.layout_preference import LayoutOffer, preferred
from diptych.control.config import prefill_scheduler, reshaped
from diptych.control.router.topology import Role
from diptych.control.slo import NS_PER_S
from diptych.diagnosis.twin_model import TwinModel
from diptych.simulation.results import RequestTable

TARGET = 0.9  # the share of the requests that must meet their objectives
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
    """shapes: all that were simulated, the recommended first."""

    shapes: tuple[SimulatedShape, ...]

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


def choose_shape(model: TwinModel) -> ShapeChoice:
    """The shapes that as many workers can have, which know the objectives that are asked."""
    model = model.told()
    count = len(model.roles)
    found = [_simulated(model, "chunked", 0), _simulated(model, "unified", 0)]
    found += [_simulated(model, "split", num_prefill) for num_prefill in range(1, count)]
    best = found[preferred([_offer(shape, found) for shape in found], TARGET)]
    others = sorted((shape for shape in found if shape is not best), key=lambda shape: -shape.score)
    return ShapeChoice((best, *others))


def _offer(shape: SimulatedShape, found: list[SimulatedShape]) -> LayoutOffer:
    """Without objectives: how near its TTFT comes to the shortest."""
    share = shape.attainment
    if share is None:  # no time: no request was finished
        shortest = min((other.ttft_s for other in found if other.ttft_s), default=0.0)
        share = shortest / shape.ttft_s if shape.ttft_s else 0.0
    return LayoutOffer(shape.shape, share)


def _simulated(model: TwinModel, shape: LayoutName, num_prefill: int) -> SimulatedShape:
    count = len(model.roles)
    base = model.engines[0]
    preset = reshaped(base.scheduler, "unified" if shape == "unified" else "chunked")
    roles: list[Role] = ["both"] * count
    if shape == "split":
        roles = ["prefill" if number < num_prefill else "decode" for number in range(count)]
    engines = tuple(
        base.with_(scheduler=prefill_scheduler(preset, base.slo) if role == "prefill" else preset) for role in roles
    )
    table = replace(model, roles=tuple(roles), engines=engines).run()
    option = f"--shape {shape}" + (f" --workers {count}" if count > 1 else "")
    words = f"{shape}, {count} worker{'s' if count > 1 else ''}"
    if shape == "split":
        option = f"--prefill {num_prefill} --decode {count - num_prefill}"
        words = f"split, {num_prefill} prefill + {count - num_prefill} decode"
    return _measured(shape, words, option, table, model)


def _measured(shape: LayoutName, words: str, option: str, table: RequestTable, model: TwinModel) -> SimulatedShape:
    rows = table.completed_rows()
    late = slow = 0
    for row in rows:
        slo = model.requests[table.number[row]].slo
        tpot_ns = table.tpot_ns(row)
        late += bool(slo and slo.ttft_ns and table.ttft_ns(row) > slo.ttft_ns)
        slow += bool(slo and slo.tpot_ns and tpot_ns and tpot_ns > slo.tpot_ns)
    judged = [met for met in table.slo_met if met >= 0]
    count = max(1, len(model.requests))
    tpots = [tpot for row in rows if (tpot := table.tpot_ns(row)) is not None]
    return SimulatedShape(
        shape,
        words,
        option,
        sum(judged) / len(judged) if judged else None,
        late / count,
        slow / count,
        fmean(table.ttft_ns(row) for row in rows) / NS_PER_S if rows else 0.0,
        fmean(tpots) / NS_PER_S if tpots else 0.0,
    )
