"""Simulated drafts: they shorten answers' time by what was right, and change nothing else."""

import pytest

from diptych.control.config import CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.errors import ConfigError
from diptych.control.events import StepFinished
from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
from diptych.simulation.fleet.simulated_drafts import MAX_GUESS, SimulatedDrafts, number_of
from diptych.simulation.scenario import Scenario
from diptych.simulation.settings import settings_from
from diptych.workload.spec import RequestSpec
from tests.simulation.linear_cost import LinearCost
from tests.simulation.scenarios import check_laws, run


def scenario(drafts: SimulatedDrafts | None, *, count: int = 1, row_ns: float = 1e6) -> Scenario:
    """Requests that arrive together, on a machine whose steps take 20 ms and so much per row."""
    ids = [tuple(range(9 * number, 9 * number + 8)) for number in range(count)]
    specs = [
        RequestSpec(arrival_ns=0, prompt_tokens=40, output_tokens=200, hash_ids=own, hash_block_tokens=32)
        for own in ids
    ]
    engine = EngineConfig(CacheConfig(4000, 16), SchedulerConfig(max_num_seqs=64), max_model_len=400)
    cost = LinearCost(2e7, 3e4, 0.0, row_ns, 0.0)
    return Scenario(engine=engine, cost=cost, workload=specs, record_events=True, drafts=drafts)


def steps(cluster: SimulatedCluster) -> list[StepFinished]:
    assert cluster.log is not None
    return [event for _, event in cluster.log if isinstance(event, StepFinished)]


def test_an_answer_whose_guesses_are_right_takes_as_many_steps_fewer() -> None:
    asked = scenario(SimulatedDrafts(1.0, 1.0))
    cluster = run(asked)
    check_laws(asked, cluster)
    extra = [entry for step in steps(cluster) for entry in step.extra]
    assert {entry.num_accepted for entry in extra[:-1]} == {MAX_GUESS}
    assert sum(step.num_decodes * step.num_steps + step.num_extra_tokens for step in steps(cluster)) == 199
    assert sum(worker.usage.decode_tokens for worker in cluster.workers) == 199


@pytest.mark.parametrize("count", [1, 6])
def test_as_many_guesses_are_right_as_the_model_says(count: int) -> None:
    asked = scenario(SimulatedDrafts(0.5, 0.8), count=count)
    cluster = run(asked)
    check_laws(asked, cluster)
    plain = run(scenario(None, count=count))
    assert cluster.environment.now < 0.7 * plain.environment.now
    first = [entry.num_accepted > 0 for step in steps(cluster) for entry in step.extra]
    assert sum(first) / len(first) == pytest.approx(0.8, abs=0.12)


def test_guesses_that_do_not_pay_change_nothing() -> None:
    dear = [run(scenario(drafts, count=4, row_ns=3e7)) for drafts in (None, SimulatedDrafts(0.5, 0.3))]
    assert not any(step.extra for step in steps(dear[1]))
    assert dear[0].environment.now == dear[1].environment.now


def test_what_is_guessed_depends_on_request_and_place_alone() -> None:
    drafts = SimulatedDrafts(0.4, 0.7)
    number = number_of("r1")
    assert number == number_of("r1~3") != number_of("r2")
    share = sum(drafts.exists(number, place) for place in range(4000)) / 4000
    right = sum(drafts.num_right(number, place, 1) for place in range(4000)) / 4000
    assert (share, right) == (pytest.approx(0.4, abs=0.03), pytest.approx(0.7, abs=0.03))
    for place in range(50):
        most = drafts.num_right(number, place, 10)
        assert [drafts.num_right(number, place, count) for count in range(11)] == [min(most, n) for n in range(11)]


@pytest.mark.parametrize("table", [{"coverage": 0.5}, {"acceptance": 0.5}, {"coverage": 1.5, "acceptance": 0.5}])
def test_half_an_acceptance_model_is_refused(table: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="speculation"):
        settings_from({"speculation": table}).speculation.drafts()
