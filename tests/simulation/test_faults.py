"""Whatever fails, whenever: nothing is lost, nothing is written where it must not be, nothing is left behind."""

from dataclasses import replace
from typing import Any

import pytest

from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.simulation.faults import Fault, FaultKind, Watch
from diptych.simulation.fleet.pools import Pools
from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import RequestSpec
from tests.laws import law
from tests.simulation.fault_schedules import (
    AuditedCluster,
    check_same_log,
    check_strides,
    random_schedule,
    run_schedule,
    unequal_schedule,
    windowed_schedule,
)
from tests.simulation.linear_cost import LinearCost
from tests.simulation.scenarios import front_end

# Seeds of random_schedule that found something once stay here. All these: with two steps in flight, a worker that died
# was said to have sent a token that it was still computing; and an answer that was complete although the word of its
# end was lost was counted twice. 2999: an order that a report caused began a step twice. 3872: a lone hopeless request.
# 41105: the first token of an attempt that was being dropped reached a client while its request waited for a worker.
# 87615: rows for good guesses took the whole step, and a stream that had lost its blocks got no part of it.
STRIDES_SEEDS = (3768,)  # a refused prompt and a refused reservation shared one memory of being refused
REGRESSION_SEEDS = (1709, 2999, 3872, 6764, 8798, 12943, 14235, 15339, 17894, 18296, 41105, 87615)


@law(weight=2.0, seeds=REGRESSION_SEEDS)
def test_every_law_holds_on_a_bad_day(seed: int) -> None:
    run_schedule(random_schedule(seed))


@law(weight=1.5, seeds=STRIDES_SEEDS)
def test_strides_give_the_log_of_single_steps_on_a_bad_day_too(seed: int) -> None:
    check_strides(seed, run_schedule(random_schedule(seed)))


@law(weight=1.0)
def test_every_law_holds_on_a_bad_day_of_a_model_with_windows(seed: int) -> None:
    cluster = run_schedule(windowed_schedule(seed))
    if seed % 3 == 0:
        check_same_log(cluster, SimulatedCluster(windowed_schedule(seed, fast_forward=False)))


@law(weight=1.0)
def test_every_law_holds_among_unequal_workers_on_a_bad_day(seed: int) -> None:
    run_schedule(unequal_schedule(seed))


def two_workers(fault: Fault | None, *, link: str = "eth100", **changes: Any) -> Scenario:
    """One prefills, one decodes; three requests of 2,000 tokens, whose KV takes about 20 ms on this link."""
    specs = [RequestSpec(arrival_ns=number, prompt_tokens=2000, output_tokens=50) for number in range(3)]
    base = Scenario(
        engine=EngineConfig(CacheConfig(1000), shape_preset("chunked"), max_model_len=8000),
        cost=LinearCost(5e6, 3e4, 0.3, 1e4, 10.0),
        workload=specs,
        pools=Pools(num_prefill=1, num_decode=1, kv_bytes_per_token=100_000, link=link),
        cluster=front_end(disaggregate="always"),
        faults=(fault,) if fault else (),
        record_events=True,
    )
    return replace(base, **changes)


def complete_answers(cluster: AuditedCluster) -> int:
    table = cluster.collector.requests
    return sum(table.is_completed(row) for row in range(len(table)))


@pytest.mark.parametrize("link", ["eth100", "shared_memory"])
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("at_ms", [1, 30, 75, 140, 250, 400])
def test_a_worker_that_dies_is_only_a_pause_for_its_streams(worker: int, at_ms: int, link: str) -> None:
    crash = Fault("crash", worker, at_ms * NS_PER_MS, 500 * NS_PER_MS)
    assert complete_answers(run_schedule(two_workers(crash, link=link))) == 3


def test_a_stream_goes_on_behind_the_last_token_that_its_client_has() -> None:
    """Each stream had some of its 50 tokens when the worker died, and computes only the others again."""
    crash = Fault("crash", 1, 400 * NS_PER_MS, 50 * NS_PER_MS)
    cluster = run_schedule(two_workers(crash))
    plain = run_schedule(two_workers(None))
    tokens = [sum(worker.usage.decode_tokens for worker in fleet.workers) for fleet in (cluster, plain)]
    assert tokens[0] <= tokens[1]
    assert complete_answers(cluster) == 3


def test_a_worker_that_hangs_for_long_is_replaced() -> None:
    hang = Fault("hang", 1, 250 * NS_PER_MS, 3600 * NS_PER_S)
    cluster = run_schedule(two_workers(hang, watch=Watch(heartbeat_ns=NS_PER_S)))
    assert complete_answers(cluster) == 3
    assert cluster.last_end_ns < 10 * NS_PER_S


@pytest.mark.parametrize("duration_ms", [5, 900])
def test_a_broken_link_stalls_a_transfer_and_then_moves_the_request(duration_ms: int) -> None:
    """A short outage is waited out; one beyond the connector's patience loses the attempt, which is tried again."""
    outage = Fault("link_down", 0, 60 * NS_PER_MS, duration_ms * NS_PER_MS)
    cluster = run_schedule(two_workers(outage, watch=Watch(resume_ns=100 * NS_PER_MS)))
    assert complete_answers(cluster) == 3
    assert bool(cluster.core.counts["lost_transfer"]) == (duration_ms == 900)


def test_on_failure_fail_ends_what_a_dead_worker_had() -> None:
    crash = Fault("crash", 1, 400 * NS_PER_MS, 50 * NS_PER_MS)
    cluster = run_schedule(two_workers(crash, cluster=replace(front_end(disaggregate="always"), on_failure="fail")))
    assert complete_answers(cluster) < 3


def test_leases_end_what_the_front_end_cannot_reach() -> None:
    """No renewal comes through for longer than a lease: both sides give up their blocks, and it is tried again."""
    loss = Fault("link_loss", 1, 55 * NS_PER_MS, NS_PER_S)
    slow = Pools(num_prefill=1, num_decode=1, kv_bytes_per_token=10**6, link="eth100")
    config = replace(front_end(disaggregate="always"), lease_ns=20 * NS_PER_MS)
    cluster = run_schedule(two_workers(loss, pools=slow, cluster=config))
    assert cluster.core.counts["leases_expired"] > 0
    assert complete_answers(cluster) == 3


KINDS: tuple[FaultKind, ...] = ("link_loss", "delay", "reorder", "duplicate")


@pytest.mark.parametrize("kind", KINDS)
def test_messages_may_be_late_mixed_up_or_doubled(kind: FaultKind) -> None:
    for worker in (0, 1):
        fault = Fault(kind, worker, 0, 10 * NS_PER_S, 9.0)
        assert complete_answers(run_schedule(two_workers(fault))) == 3


def test_borrowed_blocks_carry_no_bytes() -> None:
    near, far = run_schedule(two_workers(None, link="shared_memory")), run_schedule(two_workers(None))
    assert near.transfers is not None
    assert far.transfers is not None
    assert near.transfers.num_bytes == 0
    assert near.num_borrowed_steps > 0
    assert far.transfers.num_bytes == 3 * 2000 * 100_000
    assert near.last_end_ns < far.last_end_ns
