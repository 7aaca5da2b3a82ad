"""Requests of class batch in a simulated fleet: what others notice of them, and that they end."""

import pytest

from diptych.control.config import CacheConfig, EngineConfig, PresetName, shape_preset
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.simulation.scenario import Scenario, load_balancer
from diptych.workload.spec import RequestSpec
from tests.simulation.linear_cost import LinearCost
from tests.simulation.scenarios import check_laws, run

COST = LinearCost(5e6, 3e4, 20.0, 1e5, 20.0)


def scenario(shape: PresetName, num_batch: int, *, fast_forward: bool = True, num_workers: int = 1) -> Scenario:
    """Others come now and then, long after the batch has come."""
    batch = [
        RequestSpec(
            arrival_ns=number, prompt_tokens=200 + number, output_tokens=150, kind="batch", service_class="batch"
        )
        for number in range(num_batch)
    ]
    others = [
        RequestSpec(arrival_ns=NS_PER_S + 777_777_777 * number, prompt_tokens=150, output_tokens=20, kind="other")
        for number in range(8)
    ]
    engine = EngineConfig(CacheConfig(2000, 16), shape_preset(shape))
    return Scenario(
        engine=engine,
        cost=COST,
        workload=[*batch, *others],
        num_workers=num_workers,
        cluster=load_balancer(),
        record_events=True,
        fast_forward=fast_forward,
    )


def times_of_others(given: Scenario) -> list[tuple[int, int]]:
    """(Time to the first token, time from there to the end) of each of the others."""
    cluster = run(given)
    check_laws(given, cluster)
    table = cluster.collector.requests
    found = {table.number[row]: (table.ttft_ns(row), table.decode_ns[row]) for row in range(len(table))}
    specs = list(given.workload)  # type: ignore[call-overload]
    return [found[number] for number, spec in enumerate(specs) if spec.kind == "other"]


@pytest.mark.parametrize("shape", ["unified", "chunked"])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_others_notice_nothing_of_a_batch(shape: PresetName, *, fast_forward: bool) -> None:
    """The step of the batch that is under way when they come is broken off."""
    assert times_of_others(scenario(shape, 0)) == times_of_others(scenario(shape, 30, fast_forward=fast_forward))


def test_a_batch_is_computed_on_the_workers_that_are_idle() -> None:
    given = scenario("chunked", 12, num_workers=2)
    cluster = run(given)
    check_laws(given, cluster)
    table = cluster.collector.requests
    ends = [table.queue_ns[row] + table.e2e_ns(row) for row in range(len(table)) if table.kind[row] == "batch"]
    assert len(ends) == 12 and all(worker.usage.decode_tokens for worker in cluster.workers)
    assert max(ends) < 60_000 * NS_PER_MS
