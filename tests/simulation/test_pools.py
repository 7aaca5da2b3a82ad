"""Prefill and decode on separate replicas, in the simulator."""

import random
from dataclasses import replace

import pytest

from diptych.control.config import CacheConfig, ReplicaConfig, shape_preset
from diptych.control.errors import ConfigError
from diptych.control.handoff import Deliver, Handoffs, HandoffState, Prefill, Release, Reserve, Transfer
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.simulation.cluster import Cluster
from diptych.simulation.costs.linear import LinearCost
from diptych.simulation.faults import Fault, random_faults
from diptych.simulation.pools import Pools
from diptych.simulation.scenario import Scenario
from diptych.simulation.workload.spec import RequestSpec
from tests.simulation.scenarios import check_is_empty, check_row, random_replica, random_spec, run

# Seeds that found something once stay here.
REGRESSION_SEEDS: tuple[int, ...] = ()


def test_the_way_of_a_handoff() -> None:
    handoffs = Handoffs(block_size=16)
    assert handoffs.begin("a", 100, prefill=0, decode=1) == [Reserve(1, "a")]
    assert handoffs.on_computed("a", 48, 5) == []  # nothing is computed before there is a place for it
    assert handoffs.on_reserved("a", 32) == [Prefill(0, "a")]
    assert handoffs.on_reserved("a", 32) == []
    handoffs.on_started("a", 7)
    assert handoffs.on_computed("a", 30, 8) == []  # the decode replica has these
    assert handoffs.on_computed("a", 70, 9) == [Transfer("a", 0, 1, 32, 32)]  # whole blocks
    assert handoffs.on_computed("a", 100, 10) == [Transfer("a", 0, 1, 64, 36)]
    assert handoffs.state("a") is HandoffState.SENDING
    assert handoffs.on_arrived("a") == []
    assert handoffs.on_arrived("a") == [Deliver(1, "a", 7, 10), Release(0, "a")]
    assert "a" not in handoffs


def test_what_is_cached_there_does_not_travel() -> None:
    handoffs = Handoffs(block_size=16)
    handoffs.begin("a", 64, prefill=0, decode=1)
    handoffs.on_reserved("a", 64)
    assert handoffs.on_computed("a", 64, 10) == [Deliver(1, "a", -1, 10), Release(0, "a")]


@pytest.mark.parametrize("after", range(5))
def test_a_handoff_can_be_dropped_in_every_state(after: int) -> None:
    handoffs = Handoffs(block_size=16)
    steps = [
        lambda: handoffs.begin("a", 100, prefill=0, decode=1),
        lambda: handoffs.on_reserved("a", 0),
        lambda: handoffs.on_computed("a", 48, 5),
        lambda: handoffs.on_computed("a", 100, 5),
        lambda: handoffs.on_arrived("a"),
    ]
    for step in steps[: after + 1]:
        step()
    handoffs.drop("a")
    assert len(handoffs) == 0
    for step in steps[1:]:
        assert step() == []


def scenario(specs: list[RequestSpec], pools: Pools | None, **changes: object) -> Scenario:
    base = Scenario(
        replica=ReplicaConfig(CacheConfig(4000), shape_preset("chunked"), max_model_len=20_000),
        cost=LinearCost(5e6, 3e4, 0.3, 1e4, 10.0),
        workload=specs,
        pools=pools,
        record_events=True,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def chat_beside_a_long_prompt() -> list[RequestSpec]:
    chats = [RequestSpec(arrival_ns=number, prompt_tokens=50, output_tokens=300, kind="chat") for number in range(4)]
    return [*chats, RequestSpec(arrival_ns=NS_PER_S // 2, prompt_tokens=16_000, output_tokens=2, kind="long")]


def test_a_long_prompt_does_not_touch_the_streams_of_the_decode_pool() -> None:
    pools = Pools(num_prefill=1, num_decode=1, kv_bytes_per_token=131_072)
    apart = run(scenario(chat_beside_a_long_prompt(), pools)).collector.gaps
    unified = ReplicaConfig(CacheConfig(4000), shape_preset("unified"), max_model_len=20_000)
    together = run(scenario(chat_beside_a_long_prompt(), None, replica=unified)).collector.gaps
    assert max(together.weights) > 400_000  # microseconds: the whole prefill
    worst_apart = apart.percentiles([99.0])[0]
    assert worst_apart < 10 * NS_PER_MS


def test_chunks_travel_while_the_next_is_computed() -> None:
    """What is left to wait for after the first token is about one chunk, not the whole prompt."""
    specs = [RequestSpec(arrival_ns=0, prompt_tokens=16_000, output_tokens=10)]
    pools = Pools(num_prefill=1, num_decode=1, kv_bytes_per_token=131_072, link="eth100")
    cluster = run(scenario(specs, pools))
    table = cluster.collector.requests
    whole_ns = 16_000 * 131_072 * NS_PER_S // 11_500_000_000
    assert table.handoff_ns[0] < whole_ns / 4
    assert cluster.driver is not None
    assert cluster.driver.num_bytes == 16_000 * 131_072


def random_pools(seed: int, *, fast_forward: bool = True, with_faults: bool = False) -> Scenario:
    """Any policies, any split, links from fast to painful."""
    rng = random.Random(seed)
    replica = random_replica(rng)
    arrival_ns, specs = 0, []
    for _ in range(rng.choice([5, 20, 40])):
        arrival_ns += rng.choice([0, rng.randrange(100 * NS_PER_MS)])
        specs.append(random_spec(rng, arrival_ns))
    prefill = replace(replica, scheduler=random_replica(rng).scheduler) if rng.random() < 0.5 else None
    pools = Pools(
        num_prefill=rng.choice([1, 2, 3]),
        num_decode=rng.choice([1, 2, 3]),
        kv_bytes_per_token=rng.choice([1000, 10**6]),
        link=rng.choice(["nvlink4", "eth100"]),
        prefill=prefill,
    )
    faults: tuple[Fault, ...] = ()
    if with_faults:
        faults = random_faults(
            rng.randrange(2**30),
            num_replicas=pools.num_prefill + pools.num_decode,
            until_ns=arrival_ns + NS_PER_S,
            count=4,
            kinds=("crash", "hang", "slow"),
            mean_duration_ns=200 * NS_PER_MS,
        )
    return Scenario(
        replica=replica,
        cost=LinearCost(5e6, 3e4, 40.0, 1e5, 20.0),
        workload=specs,
        pools=pools,
        faults=faults,
        seed=seed,
        record_events=True,
        fast_forward=fast_forward,
    )


def check_pools(scenario: Scenario, cluster: Cluster) -> None:
    table = cluster.collector.requests
    specs = list(scenario.workload)  # type: ignore[arg-type]
    assert sorted(table.number) == list(range(len(specs)))
    for row in range(len(table)):
        check_row(table, row, specs[table.number[row]], scenario)
    for replica in cluster.replicas:
        check_is_empty(replica.core)
        assert not replica.core.scheduler.outgoing
        assert not len(replica.core.scheduler.incoming)
        assert not replica.core.scheduler.incoming.waiting
    assert cluster.driver is not None
    assert len(cluster.driver.handoffs) == 0
    assert not cluster.driver._transfers
    assert set(cluster._decode.picker.outstanding) | set(cluster._prefill.picker.outstanding) == {0}
    assert not cluster.collector._handoffs


@pytest.mark.parametrize("seed", [*range(80), *REGRESSION_SEEDS])
def test_strides_give_the_log_of_single_steps_with_pools_too(seed: int) -> None:
    strides, steps = run(random_pools(seed)), run(random_pools(seed, fast_forward=False))
    assert strides.log is not None
    assert steps.log is not None
    assert list(strides.log.lines()) == list(steps.log.lines())
    check_pools(random_pools(seed), strides)


@pytest.mark.parametrize("seed", [*range(80, 200), *REGRESSION_SEEDS])
def test_pools_lose_nothing_when_workers_fail(seed: int) -> None:
    scenario = random_pools(seed, with_faults=True)
    check_pools(scenario, run(scenario))


def test_impossible_pools_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="num_decode is 0"):
        Pools(num_prefill=1, num_decode=0, kv_bytes_per_token=1)
    with pytest.raises(ConfigError, match="nvlink4"):
        Pools(num_prefill=1, num_decode=1, kv_bytes_per_token=1, link="rope")
    with pytest.raises(ConfigError, match="messages"):
        replace(random_pools(1), faults=(Fault("delay", 0, 0, 1),))
