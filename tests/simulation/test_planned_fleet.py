"""A simulated fleet that plans itself, and the twin behind its decisions."""

import io
from dataclasses import replace

import msgspec

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.planner.fleet_layout import Layout, WorkerSetting
from diptych.control.planner.planner_config import PlanMode, PlannerConfig
from diptych.control.planner.planner_events import ReplayedArrival, TwinAnswered, TwinQuestion, TwinSettings
from diptych.control.router.routing import RoutingConfig
from diptych.control.router.topology import Role
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo
from diptych.simulation.costs.terms_cost import StepTermsCost
from diptych.simulation.fleet.pools import Pools
from diptych.simulation.scenario import Scenario
from diptych.simulation.twin.planned_fleet import PlannedFleet
from diptych.simulation.twin.twin import Twin
from diptych.simulation.twin.twin_process import serve
from diptych.workload.spec import RequestSpec

TERMS = (5e6, 1e5, 0.0, 1e5, 10.0)
SLO = Slo(1000 * NS_PER_MS, 30 * NS_PER_MS)
ENGINE = EngineConfig(CacheConfig(2000, 16), shape_preset("chunked"), SLO, 8192)
GAP_NS = 150 * NS_PER_MS
CLUSTER = ClusterConfig(routing=RoutingConfig(disaggregate="always"))  # no prefill goes to a decode worker
SETTINGS = TwinSettings(ENGINE, CLUSTER, 1000)


def layout(*roles: Role) -> Layout:
    return Layout(tuple(WorkerSetting(number, role, "chunked") for number, role in enumerate(roles)))


def question(*candidates: Layout, num_before: int = 0) -> TwinQuestion:
    """Prompts that keep two of four workers busy, and short answers, for five seconds."""
    arrivals = tuple(ReplayedArrival(number * GAP_NS, 3000, 4, SLO) for number in range(33))
    return TwinQuestion(7, arrivals, num_before, 5 * NS_PER_S, candidates, TERMS, 2000, 16)


def test_the_twin_prefers_prefill_workers_where_prompts_are_the_work() -> None:
    few, many = Twin(SETTINGS).answer(
        question(layout("prefill", "decode", "decode", "decode"), layout("prefill", "prefill", "prefill", "decode"))
    )
    assert many.goodput_rps > 2 * few.goodput_rps
    assert many.nearness_rps > few.nearness_rps
    assert many.goodput_rps <= 33 / 5


def test_requests_that_waited_before_do_not_count_as_served_in_time() -> None:
    (all_of_them,) = Twin(SETTINGS).answer(question(layout("both", "both", "both", "both")))
    (without,) = Twin(SETTINGS).answer(question(layout("both", "both", "both", "both"), num_before=12))
    assert without.goodput_rps <= all_of_them.goodput_rps - 12 / 5 + 1e-9


def test_streams_that_run_already_take_their_share_and_need_no_prompt_computed() -> None:
    both = layout("both", "both", "both", "both")
    few = question(both)
    streams = tuple(ReplayedArrival(0, 4000, 200, SLO, is_running=True) for _ in range(8))
    many = replace(few, arrivals=(*streams, *few.arrivals), num_before=8)
    computed = replace(many, arrivals=(*(replace(stream, is_running=False) for stream in streams), *few.arrivals))
    alone, beside, behind = (Twin(SETTINGS).answer(asked)[0].nearness_rps for asked in (few, many, computed))
    assert alone >= beside > behind


def test_the_twin_process_answers_line_by_line() -> None:
    asked = question(layout("both", "both"))
    lines = [msgspec.json.encode(record) for record in (SETTINGS, asked, asked)]
    answers = io.BytesIO()
    serve(io.BytesIO(b"\n".join(lines) + b"\n"), answers)
    first, second = (msgspec.json.decode(line, type=TwinAnswered) for line in answers.getvalue().splitlines())
    assert first.number == 7
    assert first.predictions == second.predictions == Twin(SETTINGS).answer(asked)


def planned(seconds: int, mode: PlanMode = "auto", outage: tuple[int, int] | None = None) -> PlannedFleet:
    """Prompts for which one prefill worker of four is too few."""
    specs = [
        RequestSpec(arrival_ns=number * GAP_NS, prompt_tokens=3000, output_tokens=4)
        for number in range(seconds * NS_PER_S // GAP_NS)
    ]
    scenario = Scenario(
        engine=ENGINE,
        cost=StepTermsCost(*TERMS),
        workload=specs,
        cluster=CLUSTER,
        pools=Pools(kv_bytes_per_token=1000, num_prefill=1, num_decode=3, link="shared_memory"),
    )
    config = PlannerConfig(
        mode,
        tick_ns=2 * NS_PER_S,
        window_ns=6 * NS_PER_S,
        cooldown_ns=4 * NS_PER_S,
        max_replayed=24,
        max_candidates=3,
    )
    fleet = PlannedFleet(scenario, config, Twin(SETTINGS), outages=() if outage is None else (outage,))
    fleet.run()
    return fleet


def attainment(fleet: PlannedFleet) -> float:
    met = fleet.cluster.collector.requests.slo_met
    return sum(value == 1 for value in met) / len(met)


def test_a_fleet_with_the_wrong_roles_changes_them_and_meets_its_objectives() -> None:
    auto, advised = planned(25), planned(25, "advise")
    assert auto.changes
    assert attainment(auto) > attainment(advised) + 0.3
    assert not advised.changes
    assert any(decision.verdict == "advise" for decision in advised.decisions)
    auto.cluster.core.check_idle()


def test_no_change_is_made_while_the_metrics_are_gone() -> None:
    fleet = planned(12, outage=(0, 2**62))
    assert not fleet.changes
    assert [decision.verdict for decision in fleet.decisions] == ["hold"]


def test_equal_scenarios_are_planned_equally() -> None:
    assert planned(6).decisions == planned(6).decisions
