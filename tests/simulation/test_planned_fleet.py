"""A simulated fleet that plans itself, and the twin behind its decisions."""

import io
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from diptych.advisor.planned_fleet import PlannedFleet
from diptych.advisor.twin import Twin
from diptych.advisor.twin_process import serve
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.core_split import CoreSplit
from diptych.control.compute_share import ComputeShare
from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.errors import ConfigError
from diptych.control.planner.fleet_layout import Layout, WorkerSetting, divided
from diptych.control.planner.planner_config import PlanMode, PlannerConfig
from diptych.control.planner.planner_events import (
    GroupCosts,
    ReplayedArrival,
    TwinAnswered,
    TwinPool,
    TwinQuestion,
    TwinSettings,
)
from diptych.control.router.routing import RoutingConfig
from diptych.control.router.topology import Role
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo
from diptych.simulation.costs.terms_cost import StepTermsCost
from diptych.simulation.fleet.pools import Pool, Pools
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import RequestSpec

TERMS = (5e6, 1e5, 0.0, 1e5, 10.0)
SLO = Slo(1000 * NS_PER_MS, 30 * NS_PER_MS)
ENGINE = EngineConfig(CacheConfig(2000, 16), shape_preset("chunked"), SLO, 8192)
GAP_NS = 150 * NS_PER_MS
CLUSTER = ClusterConfig(routing=RoutingConfig(disaggregate="always"))  # no prefill goes to a decode worker
SETTINGS = TwinSettings(ENGINE, CLUSTER, 1000)
CONFIG = PlannerConfig(
    "auto",
    tick_ns=2 * NS_PER_S,
    window_ns=6 * NS_PER_S,
    cooldown_ns=4 * NS_PER_S,
    max_replayed=24,
    max_candidates=3,
)


def layout(*roles: Role) -> Layout:
    return Layout(tuple(WorkerSetting(number, role, "chunked") for number, role in enumerate(roles)))


def question(*candidates: Layout, num_before: int = 0) -> TwinQuestion:
    """Prompts that keep two of four workers busy, and short answers, for five seconds."""
    arrivals = tuple(ReplayedArrival(number * GAP_NS, 3000, 4, SLO) for number in range(33))
    return TwinQuestion(7, arrivals, num_before, 5 * NS_PER_S, candidates, (GroupCosts(TERMS, 2000, 16),))


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


def test_prompts_in_steps_of_their_own_are_a_candidate_beside_mixed_steps() -> None:
    """Exclusive batches (unified) keep streams waiting, and mixed ones (chunked) prompts."""
    mixed, exclusive = (
        Layout(tuple(WorkerSetting(number, "both", shape) for number in (0, 1))) for shape in ("chunked", "unified")
    )
    streams = tuple(ReplayedArrival(0, 500, 100, Slo(), is_running=True) for _ in range(16))

    def attainments(slo: Slo) -> list[float]:
        arrivals = tuple(ReplayedArrival(number * GAP_NS, 2000, 40, slo) for number in range(20))
        costs = (GroupCosts(TERMS, 2000, 16),)
        asked = TwinQuestion(1, (*streams, *arrivals), 16, 20 * GAP_NS, (mixed, exclusive), costs)
        return [prediction.attainment for prediction in Twin(SETTINGS).answer(asked)]

    for_streams, exclusive_for_streams = attainments(Slo(None, 18 * NS_PER_MS))
    assert for_streams > exclusive_for_streams
    for_prompts, exclusive_for_prompts = attainments(Slo(250 * NS_PER_MS, None))
    assert exclusive_for_prompts > for_prompts


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
    fleet = PlannedFleet(
        scenario, replace(CONFIG, mode=mode), Twin(SETTINGS), outages=() if outage is None else (outage,)
    )
    fleet.run()
    return fleet


def attainment_after(second: int, fleet: PlannedFleet) -> float:
    table = fleet.cluster.collector.requests
    met = [table.slo_met[row] for row in range(len(table)) if table.arrival_ns[row] > second * NS_PER_S]
    return sum(value == 1 for value in met) / len(met)


def test_a_fleet_with_the_wrong_roles_changes_them_and_meets_its_objectives() -> None:
    auto, advised = planned(16), planned(10, "advise")
    assert auto.changes
    assert attainment_after(14, auto) > 0.9 > 0.1 > attainment_after(0, advised)
    assert not advised.changes
    assert any(decision.verdict == "advise" for decision in advised.decisions)
    auto.cluster.core.check_idle()


def test_no_change_is_made_while_the_metrics_are_gone() -> None:
    fleet = planned(12, outage=(0, 2**62))
    assert not fleet.changes
    assert [decision.verdict for decision in fleet.decisions] == ["hold"]


def test_equal_scenarios_are_planned_equally() -> None:
    assert planned(6).decisions == planned(6).decisions


def test_the_twin_prices_a_worker_by_the_cores_that_it_would_have() -> None:
    """A prompt takes 305 ms on four cores, and half of the load is prompts."""
    lone = layout("prefill", "decode")
    few, many = (
        Layout(tuple(divided(lone.settings, split, 8)), split) for split in (CoreSplit(decode=7), CoreSplit(prefill=7))
    )
    ofa_core = GroupCosts((4 * 5e6, 4 * 1e5, 0.0, 4 * 1e5, 40.0), 2000, 16)
    slow, fast = Twin(SETTINGS).answer(replace(question(few, many), costs=(ofa_core,)))
    assert slow.goodput_rps < 0.1 * fast.goodput_rps


def cored(seconds: int, mode: PlanMode = "auto") -> PlannedFleet:
    """One prefill worker that needs five of eight cores, and begins with four."""
    gap_ns = 270 * NS_PER_MS
    specs = [
        RequestSpec(arrival_ns=number * gap_ns, prompt_tokens=3000, output_tokens=4)
        for number in range(seconds * NS_PER_S // gap_ns)
    ]
    scenario = Scenario(
        engine=ENGINE,
        cost=StepTermsCost(*TERMS),  # on the cores that each has at first
        workload=specs,
        cluster=CLUSTER,
        pools=Pools(kv_bytes_per_token=1000, num_prefill=1, num_decode=1, link="shared_memory"),
        shares=(ComputeShare((0, 1, 2, 3), 4), ComputeShare((4, 5, 6, 7), 4)),
    )
    config = replace(CONFIG, mode=mode, max_candidates=4)
    fleet = PlannedFleet(scenario, config, Twin(SETTINGS), pinned=(0, 1), split=CoreSplit())
    fleet.run()
    return fleet


def test_cores_move_to_the_role_that_needs_them() -> None:
    auto, advised = cored(20), cored(8, "advise")
    assert attainment_after(16, auto) > 0.9 > 0.1 > attainment_after(5, advised)
    first, second = (auto.cluster.core.members.infos[worker].share for worker in (0, 1))
    assert first.num_threads > 4
    assert sorted(first.cpus + second.cpus) == list(range(8))
    kept = {info.share.num_threads for info in advised.cluster.core.members.infos.values()}
    assert kept == {4}
    assert any("cores" in words for _, words in auto.changes)
    auto.cluster.core.check_idle()


def test_a_split_is_of_workers_that_have_shares_and_spares_are_of_no_pool() -> None:
    def of(**pools: Any) -> Scenario:
        return Scenario(
            engine=ENGINE, cost=StepTermsCost(*TERMS), workload=[], pools=Pools(kv_bytes_per_token=1000, **pools)
        )

    with pytest.raises(ConfigError, match="have no shares"):
        PlannedFleet(of(num_both=2), PlannerConfig(), Twin(SETTINGS), split=CoreSplit())
    with pytest.raises(ConfigError, match="is of no pool"):
        PlannedFleet(of(named=(Pool(name="a", role="both"),)), PlannerConfig(), Twin(SETTINGS), spares=(0,))


FAST = (5e6, 2.5e4, 0.0, 1e5, 10.0)
SMALL_ENGINE = ENGINE.with_(max_model_len=4096)
UNEQUAL = replace(SETTINGS, pools=(TwinPool("large", ENGINE), TwinPool("small", SMALL_ENGINE)))


def unequal(seconds: int) -> PlannedFleet:
    """Two fast workers that decode, while slow ones are overloaded with prompts. Some prompts are long."""
    gap_ns = 90 * NS_PER_MS
    specs = [
        RequestSpec(arrival_ns=number * gap_ns, prompt_tokens=6000 if number % 10 == 9 else 3000, output_tokens=4)
        for number in range(seconds * NS_PER_S // gap_ns)
    ]
    pools = (
        Pool(name="large", role="decode", replicas=2, engine=ENGINE, cost=StepTermsCost(*FAST)),
        Pool(name="small", role="both", replicas=2, engine=SMALL_ENGINE),
        Pool(name="first", role="prefill", replicas=1, engine=ENGINE, cost=StepTermsCost(*TERMS)),
    )
    scenario = Scenario(
        engine=ENGINE,
        cost=StepTermsCost(*TERMS),
        workload=specs,
        cluster=CLUSTER,
        pools=Pools(kv_bytes_per_token=1000, link="shared_memory", named=pools),
    )
    config = replace(CONFIG, max_candidates=6)
    settings = replace(UNEQUAL, pools=(*UNEQUAL.pools, TwinPool("first", ENGINE)))
    fleet = PlannedFleet(scenario, config, Twin(settings))
    fleet.run()
    return fleet


def test_unequal_workers_change_roles_within_what_they_can_do() -> None:
    fleet = unequal(16)
    assert fleet.changes
    members = fleet.cluster.core.members
    longest = {
        phase: max(info.max_sequence_tokens for info in members.infos.values() if info.role != other)
        for phase, other in (("prefill", "decode"), ("decode", "prefill"))
    }
    assert longest == {"prefill": 8192, "decode": 8192}
    assert {members.infos[worker].role for worker in (0, 1)} != {"decode"}, "a fast worker computes prompts"
    assert attainment_after(10, fleet) > 0.9
    fleet.cluster.core.check_idle()


def test_the_twin_gives_each_pool_its_own_prices_and_its_own_context() -> None:
    def of(*workers: tuple[str, Role]) -> Layout:
        return Layout(tuple(WorkerSetting(n, role, "chunked", group) for n, (group, role) in enumerate(workers)))

    asked = question(
        of(("large", "prefill"), ("small", "decode")),
        of(("large", "decode"), ("small", "prefill")),
    )
    costs = (GroupCosts(FAST, 2000, 16, "large"), GroupCosts(TERMS, 2000, 16, "small"))
    fast, slow = Twin(UNEQUAL).answer(replace(asked, costs=costs))
    assert fast.attainment > 0.9 > 0.5 > slow.attainment
    long = tuple(replace(arrival, num_prompt_tokens=6000) for arrival in asked.arrivals)
    beside, alone = Twin(UNEQUAL).answer(
        replace(
            asked,
            costs=costs,
            arrivals=long,
            candidates=(of(("large", "both"), ("small", "both")), of(("small", "both"), ("small", "both"))),
        )
    )
    assert beside.attainment > 0.5
    assert alone.attainment == 0
