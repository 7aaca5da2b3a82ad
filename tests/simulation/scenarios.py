"""Random scenarios for the laws that must hold in every simulation, and the check of those laws."""

import random
from collections import Counter
from dataclasses import replace

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import (
    BudgetConfig,
    CacheConfig,
    CapsConfig,
    EngineConfig,
    PreemptionConfig,
    SchedulerConfig,
)
from diptych.control.engine.engine_core import EngineCore
from diptych.control.events import FirstToken, RequestFinished, StepFinished
from diptych.control.request import FinishReason
from diptych.control.router.routing import Disaggregate, RoutingName
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo
from diptych.simulation.event_log import EventLog
from diptych.simulation.faults import random_faults
from diptych.simulation.fleet.simulated_cluster import FRONT_END, SimulatedCluster
from diptych.simulation.fleet.simulated_drafts import SimulatedDrafts
from diptych.simulation.results import REASONS, RequestTable
from diptych.simulation.scenario import Scenario, load_balancer
from diptych.workload.spec import RequestSpec
from tests.simulation.linear_cost import LinearCost


def random_engine_config(rng: random.Random) -> EngineConfig:
    """Any valid combination of policies, over caches from plentiful to painful."""
    kind = rng.choice(["whole", "fixed", "slo", "slo"])
    tokens = rng.choice([32, 100, 512, 2048])
    threshold = rng.choice([0, 10, 25])
    caps = CapsConfig()
    if kind != "whole":
        partial = rng.choice([0, 1, 2, 4])
        longs = rng.choice([0, 1, 2]) if threshold else 0
        caps = CapsConfig(partial, min(longs, partial) if partial else longs, threshold)
    order = rng.choice(["fcfs", "priority", "shortest", "deadline"])
    preemption = PreemptionConfig(
        kind=rng.choice(["recompute", "swap"]), from_waiting=order == "priority" and rng.random() < 0.5
    )
    budget = BudgetConfig(kind, tokens, rng.choice([8, 20, 60]) * NS_PER_MS, min_chunk_tokens=rng.choice([1, 16]))
    block_size = rng.choice([4, 16, 32])
    return EngineConfig(
        cache=CacheConfig(
            num_blocks=rng.choice([200, 500, 4000]) // block_size + 4,
            block_size=block_size,
            num_host_blocks=rng.choice([0, 20, 100]),
            watermark_blocks=rng.choice([0, 2]),
            enable_prefix_cache=rng.random() < 0.8,
        ),
        scheduler=SchedulerConfig(
            order, budget, caps, preemption, max_num_seqs=rng.choice([1, 4, 24]), max_waiting=rng.choice([5, 4096])
        ),
        slo=rng.choice([Slo(), Slo(200 * NS_PER_MS, 20 * NS_PER_MS)]),
        max_model_len=rng.choice([120, 300]),
    )


def random_spec(rng: random.Random, arrival_ns: int) -> RequestSpec:
    """Short or long, shared or not, stopped early or not, impatient or not."""
    prompt, output = rng.choice([3, 20, 90, 180, 400]) + rng.randrange(10), rng.choice([1, 2, 15, 60, 140])
    hash_ids: tuple[int, ...] = ()
    if rng.random() < 0.5:
        stem = rng.randrange(3)
        shared = rng.randrange(1, 8)
        hash_ids = tuple(
            100 * stem + index if index < shared else rng.randrange(1000, 10**6)
            for index in range((prompt + (output if rng.random() < 0.5 else 0)) // 20)
        )
    return RequestSpec(
        arrival_ns=arrival_ns,
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=rng.choice([None, None, output + rng.randrange(50)]),
        hash_ids=hash_ids,
        hash_block_tokens=20,
        priority=rng.choice([0, 0, 1, 5]),
        slo=rng.choice([None, Slo(tpot_ns=rng.choice([6, 15, 40]) * NS_PER_MS)]),
        kind=rng.choice(["chat", "long"]),
        abort_after_ns=rng.choice([None] * 8 + [rng.randrange(NS_PER_S)]),
        service_class=service_class_of(arrival_ns, prompt, output),
    )


def service_class_of(arrival_ns: int, *lengths: int) -> str:
    """One of two requests of some scenarios is of class batch. (Not drawn: the scenarios are older than classes.)"""
    return "batch" if (arrival_ns + sum(lengths)) % 4 == 1 else "standard"


def random_scenario(seed: int, *, fast_forward: bool = True, with_faults: bool = True) -> Scenario:
    """A small fleet, a burst or a trickle of requests, and (half of the time) faults."""
    rng = random.Random(seed)
    worker = random_engine_config(rng)
    num_workers = rng.choice([1, 1, 2, 5])
    mean_gap_ns = rng.choice([1, 20, 200]) * NS_PER_MS
    arrival_ns, specs = 0, []
    for _ in range(rng.choice([5, 20, 40])):
        arrival_ns += rng.choice([0, rng.randrange(2 * mean_gap_ns)])
        specs.append(random_spec(rng, arrival_ns))
    faults = ()
    fault_seed, num_faults = rng.randrange(2**30), rng.choice([0, 0, 2, 8])
    if with_faults and num_faults:
        faults = random_faults(
            fault_seed,
            num_workers=num_workers,
            until_ns=arrival_ns + NS_PER_S,
            count=num_faults,
            mean_duration_ns=rng.choice([10, 500]) * NS_PER_MS,
        )
    return Scenario(
        engine=worker,
        cost=LinearCost(5e6, 3e4, rng.choice([0.0, 40.0]), 1e5, rng.choice([0.0, 20.0, 333.3])),
        workload=specs,
        num_workers=num_workers,
        cluster=load_balancer(rng.choice(["round_robin", "round_robin", "round_robin", "kv_aware"])),
        faults=faults,
        seed=seed,
        record_events=True,
        fast_forward=fast_forward,
        drafts=SimulatedDrafts(0.6, 0.7) if seed % 4 == 3 else None,
    )


def front_end(routing: RoutingName = "round_robin", disaggregate: Disaggregate = "auto") -> ClusterConfig:
    """A front end that lets every request in."""
    config = load_balancer(routing)
    return replace(config, routing=replace(config.routing, disaggregate=disaggregate))


def run(scenario: Scenario) -> SimulatedCluster:
    """To the end."""
    cluster = SimulatedCluster(scenario)
    cluster.run()
    return cluster


def check_laws(scenario: Scenario, cluster: SimulatedCluster) -> None:
    """Nothing is lost, nothing is counted twice, no block leaks, times are causal."""
    table = cluster.collector.requests
    specs = list(scenario.workload)  # type: ignore[arg-type]
    assert sorted(table.number) == list(range(len(specs))), "each request ends exactly once"
    for row in range(len(table)):
        check_row(table, row, specs[table.number[row]], scenario)
    for worker in cluster.workers:
        check_is_empty(worker.engine)
        usage = worker.usage
        assert 0 <= usage.kv_peak_blocks <= usage.num_blocks
        assert usage.busy_prefill_ns + usage.busy_decode_ns + usage.busy_mixed_ns <= cluster.environment.now
    assert cluster.log is not None
    check_log(cluster.log, scenario)
    cluster.core.check_idle()


def check_row(table: RequestTable, row: int, spec: RequestSpec, scenario: Scenario) -> None:
    """One request: what came out fits what went in."""
    assert min(table.queue_ns[row], table.prefill_ns[row], table.decode_ns[row]) >= 0
    reason = REASONS[table.reason[row]]
    if table.is_completed(row):
        room = scenario.engine.max_model_len - spec.prompt_tokens
        allowed = min(spec.max_tokens or spec.output_tokens, room)
        assert table.output_tokens[row] == min(spec.output_tokens, allowed)
        assert reason is (FinishReason.STOP if spec.output_tokens < allowed else FinishReason.LENGTH)
        assert table.prompt_tokens[row] == spec.prompt_tokens
        assert table.cached_tokens[row] < spec.prompt_tokens
    if reason is FinishReason.ABORT:
        assert spec.abort_after_ns is not None


def check_is_empty(core: EngineCore) -> None:
    """A worker after the last request has gone."""
    core.kv.check()
    assert not core.requests
    assert core.kv.pool.num_used == 0
    assert core.kv.host.num_available == core.kv.host.num_blocks
    assert not core.kv._in_progress


def check_log(log: EventLog, scenario: Scenario) -> None:
    """Steps of a worker do not overlap, tokens are causal, workers end each request at most once."""
    step_end: Counter[int] = Counter()
    first: dict[str, int] = {}
    ended: set[tuple[bool, str]] = set()
    last_ns = 0
    for worker, event in log:
        time_ns = event.end_ns if isinstance(event, StepFinished) else event.time_ns
        assert time_ns >= last_ns
        last_ns = time_ns
        if isinstance(event, StepFinished):
            assert event.start_ns >= step_end[worker], "steps of one worker overlap"
            assert event.end_ns >= event.start_ns + event.num_steps
            step_end[worker] = event.end_ns
        elif isinstance(event, FirstToken):
            assert event.request_id not in first
            first[event.request_id] = event.time_ns
        elif isinstance(event, RequestFinished):
            key = (worker == FRONT_END, event.request_id)
            assert key not in ended
            ended.add(key)
            if event.latency.num_output_tokens and worker != FRONT_END:
                assert event.time_ns >= first[event.request_id]
