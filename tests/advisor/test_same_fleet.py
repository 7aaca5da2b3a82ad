"""Plan, advise, the advice of a diagnosis, the planner's twin and chapter 6 of the guide name the same fleet.

Each builds its simulations from what it knows (settings, an observed server, a planner's question, a form), and all
evaluate and choose as advisor/evaluation.py does. Steps cost the same for all of them here.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from diptych.advisor.device_layout import LayoutName, PlannedDevice, WorkerKind
from diptych.advisor.evaluation import PACES, Score, choose, evaluate
from diptych.advisor.layout_runs import RunOptions
from diptych.advisor.layout_space import FleetBudget, LayoutSpace
from diptych.advisor.plan_search import PlanQuestion, PlanSearch
from diptych.advisor.twin import Twin
from diptych.control.planner.fleet_layout import Layout, WorkerSetting
from diptych.control.planner.planner_events import GroupCosts, ReplayedArrival, TwinQuestion, TwinSettings
from diptych.control.slo import NS_PER_MS, Slo
from diptych.diagnosis.engine_settings import CATALOGUE
from diptych.diagnosis.shape_choice import choose_shape
from diptych.diagnosis.twin_model import TwinModel
from diptych.simulation import prepare
from diptych.simulation.costs.cost_choice import CostChoice, choose_cost
from diptych.simulation.costs.terms_cost import StepTermsCost
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.prepare import Prepared
from diptych.simulation.prepare import prepare as prepared
from diptych.simulation.settings import plain, settings_from
from diptych.web.panels import choose as chapter
from diptych.web.panels.machine import machine
from diptych.workload.build import build
from diptych.workload.spec import ClosedLoop, RequestSpec
from tests.laws import law

NUM_LOADS = 50
NUM_WORKERS = 2
NUM_REQUESTS = 10
LAYOUTS: tuple[LayoutName, ...] = ("unified", "chunked", "split")
MODEL, HARDWARE = "llama-3.1-8b", "h100-sxm"
TERMS = (6.0 * NS_PER_MS, 0.03 * NS_PER_MS, 0.0, 0.05 * NS_PER_MS, 20.0)


@dataclass(frozen=True)
class Case:
    """A load as a visitor of the guide would ask it, and the same as the others see it."""

    query: chapter.ChooseQuery
    fleet: Prepared  # of two equal workers
    split: Prepared
    requests: tuple[RequestSpec, ...]

    @property
    def slo(self) -> Slo:
        """The objectives of every request."""
        return Slo(round(self.query.ttft_ms * NS_PER_MS), round(self.query.tpot_ms * NS_PER_MS))


@pytest.fixture(autouse=True)
def _same_costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every step costs what the scheduler's own terms say, and a simulation is short."""

    def choice(*names: object, **settings: object) -> CostChoice:
        return replace(choose_cost(*names, **settings), cost=StepTermsCost(*TERMS))  # type: ignore[arg-type]

    monkeypatch.setattr(prepare, "choose_cost", choice)
    monkeypatch.setattr(chapter, "LEAST_REQUESTS", NUM_REQUESTS)
    monkeypatch.setattr(chapter, "MOST_REQUESTS", NUM_REQUESTS)
    chapter._simulated.cache_clear()
    yield
    chapter._simulated.cache_clear()


def case(number: int) -> Case:
    """One of many loads: from idle to overloaded, short and long prompts, loose and tight objectives."""
    rng = random.Random(number)
    query = chapter.ChooseQuery(
        model=MODEL,
        hardware=HARDWARE,
        gpus=NUM_WORKERS,
        rate=round(rng.choice((2.0, 8.0, 20.0, 40.0)) * rng.uniform(0.6, 1.4), 2),
        prompt=rng.choice((200, 800, 2000)),
        output=rng.choice((8, 20, 50)),
        ttft_ms=rng.choice((300.0, 800.0, 2000.0)),
        tpot_ms=rng.choice((6.6, 7.0, 8.0, 20.0)),
        seed=number,
    )
    chosen = machine(MODEL, HARDWARE)
    both, apart = (
        chapter.settings_of(chosen, query, plan, query.rate)
        for plan in (chapter.Plan("chunked", NUM_WORKERS), chapter.Plan("split", NUM_WORKERS, 1, 1))
    )
    requests = build(both.workload, both.seed)
    assert not isinstance(requests, ClosedLoop)
    return Case(query, prepared(both), prepared(apart), tuple(requests))


def by_plan(asked: Case) -> LayoutName:
    """``diptych plan``."""
    query = asked.query
    base = settings_from(
        plain(chapter.settings_of(machine(MODEL, HARDWARE), query, chapter.Plan("chunked", NUM_WORKERS), query.rate))
    )
    kinds = (WorkerKind(PlannedDevice(HARDWARE, None, 700.0), Parallelism(1)),)
    space = LayoutSpace(
        shapes=LAYOUTS, kinds=kinds, prefill_kinds=kinds, decode_kinds=kinds, budget=FleetBudget(devices=NUM_WORKERS)
    )
    options = RunOptions(search=PACES, probe_s=0.001)
    found = PlanSearch(PlanQuestion(base=base, space=space, options=options)).within_budget(space.layouts())
    return found.fleets[0].layout.shape


def by_chapter(asked: Case) -> LayoutName:
    """Chapter 6 of the guide."""
    name: LayoutName = chapter.panel(asked.query)["recommendation"]["shape"]
    return name


def observed(asked: Case) -> TwinModel:
    """The server that diagnosis and advise see: two workers that do both, with whole prompts."""
    scenario = asked.split.scenario
    assert scenario.pools is not None
    return TwinModel(
        requests=asked.requests,
        terms=TERMS,
        roles=("both",) * NUM_WORKERS,
        engines=(asked.fleet.scenario.engine,) * NUM_WORKERS,
        cluster=asked.fleet.scenario.cluster,
        link=scenario.pools.link,
        kv_bytes_per_token=scenario.pools.kv_bytes_per_token,
        asked=asked.slo,
    )


def by_advise(asked: Case) -> LayoutName:
    """``diptych advise``."""
    return choose_shape(observed(asked)).best.shape


def by_diagnosis(asked: Case) -> bool:
    """Whether the advice of a diagnosis is to divide the workers."""
    [setting] = [each for each in CATALOGUE["diptych"]["prefill_interference"] if each.name == "roles"]
    assert setting.change is not None
    changed = setting.change(observed(asked))
    assert changed is None or changed.roles == ("prefill", "decode")
    return changed is not None


class PlannersLoad:
    """The question of a planner, as advisor.evaluation.FleetLoad."""

    def __init__(self, asked: Case) -> None:
        scenario = asked.fleet.scenario
        assert asked.split.scenario.pools is not None
        self.twin = Twin(
            TwinSettings(
                engine=scenario.engine,
                cluster=scenario.cluster,
                kv_bytes_per_token=asked.split.scenario.pools.kv_bytes_per_token,
                shares_memory=False,
            )
        )
        cache_size = scenario.engine.cache
        arrivals = tuple(
            ReplayedArrival(spec.arrival_ns, spec.prompt_tokens, spec.output_tokens, asked.slo)
            for spec in asked.requests
        )
        layouts = {
            "unified": [WorkerSetting(number, "both", "unified") for number in range(NUM_WORKERS)],
            "chunked": [WorkerSetting(number, "both", "chunked") for number in range(NUM_WORKERS)],
            "split": [WorkerSetting(0, "prefill", "chunked"), WorkerSetting(1, "decode", "chunked")],
        }
        self.candidates: dict[LayoutName, Layout] = {name: Layout(tuple(layouts[name])) for name in LAYOUTS}
        costs = (GroupCosts(TERMS, cache_size.num_blocks, cache_size.block_size),)
        span_ns = arrivals[-1].at_ns + 1
        self.question = TwinQuestion(1, arrivals, 0, span_ns, tuple(self.candidates.values()), costs)
        self.requests = asked.requests

    def scores(self, asked: Sequence[tuple[LayoutName, float]]) -> dict[tuple[LayoutName, float], Score]:
        found = {}
        for name, pace in asked:
            requests = [replace(spec, arrival_ns=round(spec.arrival_ns / pace)) for spec in self.requests]
            found[name, pace] = Score.of(self.twin.serve(self.question, self.candidates[name], requests))
        return found


def by_planner(asked: Case) -> LayoutName:
    """The twin of a live fleet's planner."""
    evaluated = evaluate(PlannersLoad(asked), LAYOUTS)
    return evaluated[choose(evaluated, lambda name: name)[0]].fleet


def agree(number: int) -> LayoutName:
    """The layout that all name for a load."""
    asked = case(number)
    doors = {"plan": by_plan, "advise": by_advise, "planner": by_planner, "chapter": by_chapter}
    found = {name: door(asked) for name, door in doors.items()}
    assert len(set(found.values())) == 1, found
    assert by_diagnosis(asked) == (found["advise"] == "split")
    return found["plan"]


@law(weight=2.0)
def test_all_name_the_same_fleet_for_a_load(seed: int) -> None:
    agree(seed)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_LOADS))
def test_all_name_the_same_fleet_for_each_of_fifty_loads(number: int) -> None:
    agree(number)
