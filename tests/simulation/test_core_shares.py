"""Simulated workers that compute on a part of a machine, and parts that move between them."""

from dataclasses import replace

import pytest

from diptych.control.compute_share import ComputeShare
from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.errors import ConfigError
from diptych.control.events import Resized, StepFinished
from diptych.control.slo import NS_PER_MS
from diptych.simulation.faults import Fault
from diptych.simulation.fleet.pools import Pools
from diptych.simulation.scenario import Scenario, WorkerChange
from diptych.workload.spec import RequestSpec
from tests.simulation.fault_schedules import AuditedCluster, run_schedule
from tests.simulation.linear_cost import LinearCost
from tests.simulation.scenarios import front_end

CORES = tuple(ComputeShare(cpus, len(cpus)) for cpus in ((0, 1, 2, 3), (4, 5)))
GIVEN, TAKEN = ComputeShare((0, 1), 2), ComputeShare((2, 3, 4, 5), 4)
COST = LinearCost(5e6, 3e4, 0.3, 1e4, 10.0)
SCENARIO = Scenario(
    engine=EngineConfig(CacheConfig(1000), shape_preset("chunked"), max_model_len=8000),
    cost=COST,
    workload=[
        RequestSpec(arrival_ns=number * 50 * NS_PER_MS, prompt_tokens=1000, output_tokens=80) for number in range(12)
    ],
    pools=Pools(num_prefill=1, num_decode=1, kv_bytes_per_token=100_000, link="shared_memory"),
    cluster=front_end(disaggregate="always"),
    worker_changes=(WorkerChange(200 * NS_PER_MS, 0, share=GIVEN), WorkerChange(200 * NS_PER_MS, 1, share=TAKEN)),
    shares=CORES,
    record_events=True,
)


def slowness(cluster: AuditedCluster, worker: int) -> list[tuple[int, float]]:
    """(start, measured / priced) of each step of a worker."""
    assert cluster.log is not None
    steps = [event for number, event in cluster.log if number == worker and isinstance(event, StepFinished)]
    found = []
    for step in steps:
        if step.num_steps == 1 and not step.num_decodes:
            tokens = sum(count for _, _, count in step.prefills)
            pairs = sum(count * start + count * (count + 1) // 2 for _, start, count in step.prefills)
            found.append((step.start_ns, (step.end_ns - step.start_ns) / (5e6 + 3e4 * tokens + 0.3 * pairs)))
    return found


def test_steps_take_longer_on_fewer_cores_and_units_are_given_up_before_they_are_taken() -> None:
    cluster = run_schedule(SCENARIO)
    assert cluster.log is not None
    (given_at, first), (taken_at, second) = [
        (event.time_ns, (worker, event.share)) for worker, event in cluster.log if isinstance(event, Resized)
    ]
    assert (first, second) == ((0, GIVEN), (1, TAKEN))
    assert 200 * NS_PER_MS <= given_at <= taken_at
    for start_ns, ratio in slowness(cluster, 0):
        assert ratio == pytest.approx(2.0 if start_ns >= given_at else 1.0, rel=0.01)


def test_a_worker_that_crashed_gets_the_share_that_it_had() -> None:
    crash = Fault("crash", 0, 400 * NS_PER_MS, 100 * NS_PER_MS)
    cluster = run_schedule(replace(SCENARIO, faults=(crash,)))
    assert cluster.log is not None
    resized = [(worker, event.share) for worker, event in cluster.log if isinstance(event, Resized)]
    assert resized == [(0, GIVEN), (1, TAKEN), (0, GIVEN)]
    assert cluster.core.members.infos[0].share == GIVEN


def test_shares_are_of_all_workers() -> None:
    with pytest.raises(ConfigError, match="1 shares for 2 workers"):
        replace(SCENARIO, shares=CORES[:1])
    with pytest.raises(ConfigError, match="only where shares are given"):
        replace(SCENARIO, shares=())
