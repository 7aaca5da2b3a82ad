"""Prefill and decode on separate workers, in the simulator: the cluster's own decisions, over simulated links."""

import random
from dataclasses import replace
from typing import Any

import pytest

from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.simulation.faults import Fault, random_faults
from diptych.simulation.fleet.members import fleet
from diptych.simulation.fleet.pipeline import Pipeline
from diptych.simulation.fleet.pools import Pool, Pools
from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import RequestSpec
from tests.laws import law
from tests.simulation.fault_schedules import check_nothing_is_left
from tests.simulation.linear_cost import LinearCost
from tests.simulation.scenarios import check_row, front_end, random_engine_config, random_spec, run


def scenario(specs: list[RequestSpec], pools: Pools | None, **changes: Any) -> Scenario:
    base = Scenario(
        engine=EngineConfig(CacheConfig(4000), shape_preset("chunked"), max_model_len=20_000),
        cost=LinearCost(5e6, 3e4, 0.3, 1e4, 10.0),
        workload=specs,
        pools=pools,
        cluster=front_end(disaggregate="always"),
        record_events=True,
    )
    return replace(base, **changes)


def chat_beside_a_long_prompt() -> list[RequestSpec]:
    chats = [RequestSpec(arrival_ns=number, prompt_tokens=50, output_tokens=300, kind="chat") for number in range(4)]
    return [*chats, RequestSpec(arrival_ns=NS_PER_S // 2, prompt_tokens=16_000, output_tokens=2, kind="long")]


def test_a_long_prompt_does_not_touch_the_streams_of_the_decode_pool() -> None:
    pools = Pools(num_prefill=1, num_decode=1, kv_bytes_per_token=131_072)
    apart = run(scenario(chat_beside_a_long_prompt(), pools)).collector.gaps
    unified = EngineConfig(CacheConfig(4000), shape_preset("unified"), max_model_len=20_000)
    together = run(scenario(chat_beside_a_long_prompt(), None, engine=unified)).collector.gaps
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
    assert cluster.transfers is not None
    assert cluster.transfers.num_bytes == 16_000 * 131_072


def pipelined(stages: int, replicas: int = 1, **changes: Any) -> Pools:
    pool = Pool(name="both", role="both", replicas=replicas, stages=stages, **changes)
    return Pools(kv_bytes_per_token=1, named=(pool,))


def test_passes_go_through_the_stages_one_after_the_other() -> None:
    pipeline = Pipeline(4)
    assert pipeline.enter(0, 402) == 402  # 101 + 101 + 100 + 100
    assert pipeline.enter(0, 402) == 503  # one stage behind
    assert pipeline.enter(0, 40) == 513  # waits for the long one in each stage
    assert pipeline.enter(10_000, 40) == 10_040


@law(weight=0.1)
def test_a_pass_in_a_pipeline_is_never_faster_than_alone_and_none_overtakes(seed: int) -> None:
    rng = random.Random(seed)
    pipeline, now, last_ns, busy_ns = Pipeline(rng.randint(1, 5)), 0, 0, 0
    for _ in range(50):
        now += rng.choice([0, rng.randrange(200)])
        pass_ns = rng.randrange(1, 500)
        busy_ns += pass_ns
        left_ns = pipeline.enter(now, pass_ns)
        assert left_ns >= now + pass_ns and left_ns >= last_ns
        assert left_ns <= now + busy_ns  # as if all had been one stage
        last_ns = left_ns


def test_lanes_fill_the_stages_of_a_pipeline() -> None:
    """Four lanes on four stages decode four times as much as one lane in the same time, and not faster each."""
    specs = [RequestSpec(arrival_ns=number, prompt_tokens=10, output_tokens=200) for number in range(4)]
    alone = run(scenario(specs[:1], pipelined(4), cluster=front_end("round_robin")))
    together = run(scenario(specs, pipelined(4), cluster=front_end("round_robin")))
    assert sorted(together.collector.requests.worker) == [0, 1, 2, 3]
    one_ns, four_ns = alone.last_end_ns, together.last_end_ns
    assert one_ns < four_ns < 1.1 * one_ns
    busy_ns = [worker.usage.busy_decode_ns for worker in together.workers]
    assert sum(busy_ns) / 4 < four_ns  # of their passes alone; the rest are bubbles
    apart = run(scenario(specs, pipelined(1, replicas=4), cluster=front_end("round_robin")))
    assert apart.last_end_ns <= four_ns


def test_strides_give_the_log_of_single_steps_on_pipelines() -> None:
    specs = [RequestSpec(arrival_ns=number * 3 * NS_PER_MS, prompt_tokens=300, output_tokens=40) for number in range(9)]
    named = (
        Pool(name="prefill", role="prefill", stages=2, layout=(1, 2)),
        Pool(name="decode", role="decode", stages=3, replicas=2, layout=(1, 3), relayout_bytes_per_s=10**10),
    )
    pools = Pools(kv_bytes_per_token=1000, named=named, stall_ns=NS_PER_MS)
    strides, steps = (run(scenario(specs, pools, fast_forward=fast)) for fast in (True, False))
    assert strides.log is not None and steps.log is not None
    assert list(strides.log.lines()) == list(steps.log.lines())
    check_nothing_is_left(strides)


def handoff_ns(pools: Pools) -> int:
    cluster = run(scenario([RequestSpec(arrival_ns=0, prompt_tokens=16_000, output_tokens=10)], pools))
    return cluster.collector.requests.handoff_ns[0]


def two(**changes: Any) -> Pools:
    """One prefill and one decode replica; changes: of both pools."""
    named = tuple(Pool(name=name, role=name, **changes) for name in ("prefill", "decode"))  # type: ignore[arg-type]
    return Pools(kv_bytes_per_token=1_310_720, link="eth100", named=named)


def test_network_cards_add_up_and_a_new_cut_costs_the_receiver_a_copy() -> None:
    once, twice = handoff_ns(two()), handoff_ns(two(nics=2))
    assert once > 1.8 * twice
    pools = two(relayout_bytes_per_s=10**12)
    prefill, decode = pools.named
    recut = handoff_ns(replace(pools, named=(prefill, replace(decode, layout=(2, 1)))))
    copy_ns = 16_000 * 1_310_720 // 1000
    assert abs(recut - once - copy_ns) < 10 * NS_PER_MS
    assert handoff_ns(pools) == once


def test_transfers_stall_the_steps_in_which_they_end_when_that_is_set() -> None:
    specs = [RequestSpec(arrival_ns=0, prompt_tokens=1000, output_tokens=100)]
    free, stalled = (run(scenario(specs, replace(two(), stall_ns=ns))) for ns in (0, 16 * NS_PER_MS))
    late_ns = stalled.last_end_ns - free.last_end_ns
    assert late_ns == 32 * NS_PER_MS  # once where the prompt ends, once where it is taken over
    first = [cluster.collector.requests.ttft_ns(0) for cluster in (free, stalled)]
    assert first[1] - first[0] == 16 * NS_PER_MS


def random_pools(seed: int, *, fast_forward: bool = True, with_faults: bool = False) -> Scenario:
    """Any policies, any split, links from fast to painful."""
    rng = random.Random(seed)
    worker = random_engine_config(rng)
    arrival_ns, specs = 0, []
    for _ in range(rng.choice([5, 20, 40])):
        arrival_ns += rng.choice([0, rng.randrange(100 * NS_PER_MS)])
        specs.append(random_spec(rng, arrival_ns))
    prefill = replace(worker, scheduler=random_engine_config(rng).scheduler) if rng.random() < 0.5 else None
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
            num_workers=pools.num_prefill + pools.num_decode,
            until_ns=arrival_ns + NS_PER_S,
            count=4,
            kinds=("crash", "hang", "slow"),
            mean_duration_ns=200 * NS_PER_MS,
        )
    return Scenario(
        engine=worker,
        cost=LinearCost(5e6, 3e4, 40.0, 1e5, 20.0),
        workload=specs,
        pools=pools,
        cluster=front_end(rng.choice(["round_robin", "kv_aware", "round_robin"]), rng.choice(["always", "auto"])),
        faults=faults,
        seed=seed,
        record_events=True,
        fast_forward=fast_forward,
    )


def check_pools(scenario: Scenario, cluster: SimulatedCluster) -> None:
    table = cluster.collector.requests
    specs = list(scenario.workload)  # type: ignore[arg-type]
    assert sorted(table.number) == list(range(len(specs)))
    for row in range(len(table)):
        check_row(table, row, specs[table.number[row]], scenario)
    check_nothing_is_left(cluster)


@law(weight=1.0)
def test_strides_give_the_log_of_single_steps_with_pools_too(seed: int) -> None:
    strides, steps = run(random_pools(seed)), run(random_pools(seed, fast_forward=False))
    assert strides.log is not None
    assert steps.log is not None
    assert list(strides.log.lines()) == list(steps.log.lines())
    check_pools(random_pools(seed), strides)


@law(weight=1.0)
def test_pools_lose_nothing_when_workers_fail(seed: int) -> None:
    scenario = random_pools(seed, with_faults=True)
    check_pools(scenario, run(scenario))


def test_impossible_pools_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="num_decode is 0"):
        Pools(num_prefill=1, num_decode=0, kv_bytes_per_token=1)
    with pytest.raises(ConfigError, match="nvlink4"):
        Pools(num_prefill=1, num_decode=1, kv_bytes_per_token=1, link="rope")
    with pytest.raises(ConfigError, match="num_prefill is 0"):
        Pools(num_prefill=0, num_decode=1, kv_bytes_per_token=1)


def of_hundred_blocks(pools: Pools) -> Scenario:
    engine = EngineConfig(CacheConfig(100), shape_preset("chunked"), max_model_len=1000)
    return replace(scenario([], pools), engine=engine)


def test_workers_of_one_host_share_one_range_of_blocks() -> None:
    pools = Pools(num_prefill=2, num_decode=2, kv_bytes_per_token=1, num_hosts=2)
    members = fleet(of_hundred_blocks(pools))
    assert [member.config.cache.first_block for member in members] == [0, 0, 100, 100]
    assert [member.info.memory_domain for member in members] == [0, 1, 0, 1]
    alone = fleet(of_hundred_blocks(replace(pools, num_prefill=1, num_decode=1, num_hosts=0)))
    assert [member.info.memory_domain for member in alone] == [None, None]


def test_pools_with_names_say_everything_about_their_workers() -> None:
    pool = Pool(name="a", role="both", replicas=2)
    with pytest.raises(ConfigError, match="named pools say"):
        Pools(kv_bytes_per_token=1, num_prefill=1, named=(pool,))
    with pytest.raises(ConfigError, match="two pools have one name"):
        Pools(kv_bytes_per_token=1, named=(pool, pool))
    with pytest.raises(ConfigError, match="cut the KV in the same way"):
        Pools(kv_bytes_per_token=1, num_hosts=1, named=(pool, Pool(name="b", role="both", layout=(2, 1))))
    with pytest.raises(ConfigError, match="stages of pool a is 0"):
        Pool(name="a", role="both", stages=0)
