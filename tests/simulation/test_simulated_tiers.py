"""Tiers under virtual time: the decisions of control at the pace of links and disks."""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.advisor.tier_worth import tier_sizes, worth_table
from diptych.cli import main as cli
from diptych.cli.simulate import overrides
from diptych.control.config import (
    BudgetConfig,
    CacheConfig,
    EngineConfig,
    PreemptionConfig,
    SchedulerConfig,
    TierConfig,
)
from diptych.control.engine.kvcache.block_pool import BlockPool
from diptych.control.engine.kvcache.tier_records import (
    CancelLoad,
    DiskContents,
    LoadBlocks,
    RunLoaded,
    RunStored,
    ShareBlocks,
    StoreBlocks,
    TierEvent,
)
from diptych.control.errors import ConfigError
from diptych.control.events import HandoffReserved
from diptych.control.router.cost_router import CostRouter
from diptych.control.router.tier_index import TierIndex
from diptych.control.router.topology import Role
from diptych.simulation.environment import Environment
from diptych.simulation.faults import Fault
from diptych.simulation.fleet.pools import Pool, Pools
from diptych.simulation.fleet.simulated_disk import DiskModel, SimulatedDisk
from diptych.simulation.fleet.simulated_hosts import SharedContents, SimulatedPeerReader
from diptych.simulation.prepare import prepare
from diptych.simulation.results import SimulationResult, summarize
from diptych.simulation.run import simulate, simulate_with_log
from diptych.simulation.scenario import Scenario
from diptych.simulation.settings import read_settings
from diptych.workload.spec import RequestSpec
from tests.simulation import scenarios
from tests.simulation.linear_cost import LinearCost

BLOCK = 16
BLOCK_BYTES = 1 << 20
TURNS = 6


def conversations(count: int, seed: int = 1) -> list[RequestSpec]:
    """Each turn repeats all that was said before; the conversations take turns."""
    rng, specs, at_ns = random.Random(seed), [], 0
    lengths = [rng.randrange(100, 300) for _ in range(count)]
    for turn in range(TURNS):
        for number in range(count):
            prompt = lengths[number] + 64 * turn
            ids = tuple(1000 * number + index for index in range((prompt + 32) // BLOCK))
            specs.append(
                RequestSpec(
                    arrival_ns=at_ns, prompt_tokens=prompt, output_tokens=32, hash_ids=ids, hash_block_tokens=BLOCK
                )
            )
            at_ns += 60_000_000
    return specs


def scenario(
    num_host_blocks: int = 0, disk_blocks: int = 0, *, peer_block_ns: int | None = None, **changes: object
) -> Scenario:
    """peer_block_ns: the workers read each other's host blocks."""
    disk = DiskModel(disk_blocks * BLOCK_BYTES, BLOCK_BYTES, 10**9, 10**9, 100_000) if disk_blocks else None
    price = disk.read_block_ns if disk else 0
    tiers = TierConfig(
        50_000, 60, disk is not None, price, shares_host=peer_block_ns is not None, peer_block_ns=peer_block_ns or 0
    )
    cache = CacheConfig(150, BLOCK, num_host_blocks, watermark_blocks=2, tiers=tiers)
    settings = SchedulerConfig(budget=BudgetConfig("fixed", 256), preemption=PreemptionConfig("swap"), max_num_seqs=16)
    return Scenario(
        engine=EngineConfig(cache, settings, max_model_len=2000),
        cost=LinearCost(5e6, 2e5, 0.0, 1e5, 20.0),
        workload=conversations(30),
        swap_block_ns=50_000,
        disk=disk,
        record_events=True,
        **changes,  # type: ignore[arg-type]
    )


def slow(*values: object) -> Any:
    """Parameters of a slow test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def share(result: SimulationResult) -> float:
    return float(summarize(result)["cached_token_share"])


def test_a_tier_that_holds_all_conversations_finds_them_and_a_small_one_does_not() -> None:
    device, small, host, disk = (simulate(scenario(*sizes)) for sizes in ((), (100,), (1200,), (200, 4000)))

    assert share(device) <= share(small) < 0.1
    assert share(host) > 0.6
    assert share(disk) > 0.6
    assert summarize(disk)["disk_token_share"] > 0.1
    assert "disk_token_share" not in summarize(device)


@pytest.mark.parametrize(
    ("host", "disk"),
    [slow(40, 0), slow(300, 0), (100, 300), slow(300, 4000)],  # two workers below take other sizes
)
def test_steps_one_by_one_give_the_same_log(host: int, disk: int) -> None:
    fast, slow = (simulate_with_log(scenario(host, disk, fast_forward=way))[0] for way in (True, False))
    assert fast.requests == slow.requests
    assert fast.workers[0].disk_stored_blocks == slow.workers[0].disk_stored_blocks


def test_a_worker_that_crashed_finds_what_it_had_stored() -> None:
    crash = Fault(at_ns=4_000_000_000, worker=0, kind="crash", duration_ns=500_000_000)
    lost, kept = simulate(scenario(300, faults=(crash,))), simulate(scenario(300, 4000, faults=(crash,)))
    assert share(lost) + 0.05 < share(kept)


class Reports(list[TierEvent]):
    def __init__(self, environment: Environment) -> None:
        super().__init__()
        self.environment = environment
        self.times: list[int] = []

    def __call__(self, event: TierEvent) -> None:
        self.append(event)
        self.times.append(self.environment.now)


def test_the_disk_reads_one_load_after_the_other_and_keeps_its_capacity() -> None:
    environment = Environment()
    reports = Reports(environment)
    disk = SimulatedDisk(DiskModel(400 * BLOCK_BYTES, BLOCK_BYTES, 10**9, 10**9, 1000), environment, reports)
    runs = [tuple(bytes([number, index]) * 8 for index in range(60)) for number in range(10)]
    for number, run in enumerate(runs):
        disk.act(StoreBlocks(number, run, tuple(range(60))))
    environment.run()
    removed = [h for event in reports if isinstance(event, DiskContents) for h in event.removed]
    assert 600 - len(removed) <= 400 and removed[:60] == list(runs[0])
    assert sum(isinstance(event, RunStored) for event in reports) == 10
    reports.clear()
    reports.times.clear()
    begun_ns = environment.now
    disk.act(LoadBlocks(1, runs[9][:10], tuple(range(10))))
    disk.act(LoadBlocks(2, runs[9][10:20], tuple(range(10))))
    disk.act(LoadBlocks(3, runs[0][:5], tuple(range(5))))
    environment.run()
    block_ns = BLOCK_BYTES * 10**9 // 10**9
    assert [event.num_blocks for event in reports if isinstance(event, RunLoaded)] == [10, 10, 0]
    assert reports.times[:2] == [begun_ns + 1000 + 10 * block_ns, begun_ns + 2000 + 20 * block_ns]


def test_a_cancelled_load_is_answered_with_what_was_read() -> None:
    environment = Environment()
    reports = Reports(environment)
    disk = SimulatedDisk(DiskModel(400 * BLOCK_BYTES, BLOCK_BYTES, 10**9, 10**9), environment, reports)
    run = tuple(bytes([7, index]) * 8 for index in range(60))
    disk.act(StoreBlocks(1, run, tuple(range(60))))
    environment.run()
    reports.clear()
    disk.act(LoadBlocks(1, run, tuple(range(60))))
    environment.at(environment.now + 5 * BLOCK_BYTES + 1, 0, lambda: disk.act(CancelLoad(1)))
    environment.run()
    (event,) = reports
    assert isinstance(event, RunLoaded) and event.num_blocks == 5


def test_the_options_size_the_tiers() -> None:
    given = {"kv_host_gb": 2, "kv_disk_gb": 100.0, "disk": "virtual"}
    base = {"model": "llama-3.1-8b", "hardware": "h100"}
    pool = prepare(read_settings(None, overrides({**base, **given}))).pools[0]
    assert pool.disk is not None and pool.disk.read_bytes_per_s == 700_000_000
    block_bytes = 32 * 131072
    assert pool.engine.cache.num_host_blocks == 2 * 10**9 // block_bytes
    assert pool.engine.cache.tiers.load_block_ns == block_bytes * 10**9 // 700_000_000
    with pytest.raises(ConfigError, match="disk is 'tape'"):
        prepare(read_settings(None, overrides({**base, **given, "disk": "tape"})))


def test_a_plan_says_what_gigabytes_would_be_worth(tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": 150 * number,
            "input_length": 2048,
            "output_length": 8,
            "hash_ids": [4 * (number % 40) + i for i in range(4)],
        }
        for number in range(160)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = [
        "plan",
        "--model",
        "llama-3-8b",
        "--hardware",
        "h100",
        "--parallel",
        "tp1",
        "--devices",
        "1",
        "--processes",
        "1",
    ]
    load = ["--trace", str(trace), "--ttft-slo-ms", "2000", "--tpot-slo-ms", "50", "--shapes", "chunked", "--json"]
    load += ["--set", "memory.kv_cache_tokens=20000", "--tolerance", "0.5", "--probe", "20s"]
    result = CliRunner().invoke(cli.app, [*base, *load, "--kv-host-gb", "20", "--kv-disk-gb", "50"])
    assert result.exit_code == 0, result.output
    none, host, disk = json.loads(result.stdout)["tiers"]
    assert none["below"] == 0 and none["found"] < 0.1
    assert host["below"] > 0.5
    assert host["prefill"] < none["prefill"]
    assert disk["below"] == 0  # to read from it is not much faster than to compute there, so nothing is
    assert disk["ttft_mean_ms"] < 1.01 * none["ttft_mean_ms"]
    assert "host GB" in worth_table([none, host, disk]).columns


@pytest.mark.parametrize("text", ["a", "-1", "1,,2"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_disk_gb"):
        tier_sizes("4", text)


def test_a_prefetch_is_as_random_as_its_seed() -> None:
    one, two = simulate(scenario(100, 300)), simulate(scenario(100, 300))
    assert one.requests == two.requests
    assert one.requests != simulate(replace(scenario(100, 300), workload=conversations(30, 2))).requests


def two_workers(num_host_blocks: int, disk_blocks: int = 0, **changes: object) -> Scenario:
    """The same load for two workers, each of whose tiers holds about half of all conversations."""
    changes = {"num_workers": 2, "cluster": scenarios.front_end("kv_aware"), **changes}
    return scenario(num_host_blocks, disk_blocks, **changes)


@pytest.mark.skipif(TierIndex.run.__class__ is not FunctionType, reason="compiled methods cannot be replaced")
@pytest.mark.parametrize(("host", "disk"), [(700, 0), (300, 2000)])
def test_conversations_return_to_the_worker_whose_tiers_hold_them(
    host: int, disk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    aware = share(simulate(two_workers(host, disk)))
    monkeypatch.setattr(TierIndex, "run", lambda *_: 0)
    assert aware > share(simulate(two_workers(host, disk))) + 0.05


@pytest.mark.parametrize(("host", "disk", "crash"), [(700, 0, True), (100, 300, False), (300, 2000, True)])
def test_the_router_knows_exactly_what_lies_below(host: int, disk: int, crash: bool) -> None:
    faults = (Fault(at_ns=4_000_000_000, worker=1, kind="crash", duration_ns=500_000_000),) if crash else ()
    made = two_workers(host, disk, faults=faults)
    cluster = scenarios.run(made)
    scenarios.check_laws(made, cluster)
    router = cluster.core.router
    assert isinstance(router, CostRouter)
    for worker in cluster.workers:
        bit, kv = 1 << worker.number, worker.engine.kv
        for index, held in ((router.host, kv.host.prefix_cache), (router.disk, kv.tiers.loads.hashes)):
            assert {block for block, mask in index._masks.items() if mask & bit} == set(held)


@pytest.mark.parametrize(("host", "disk"), [(700, 0), slow(100, 300)])
def test_a_fleet_with_tiers_is_the_same_step_by_step(host: int, disk: int) -> None:
    digests = []
    for fast_forward in (True, False):
        log = simulate_with_log(two_workers(host, disk, fast_forward=fast_forward))[1]
        assert log is not None
        digests.append(log.digest())
    assert digests[0] == digests[1]


def one_to_one(host: int, disk: int, **changes: object) -> Scenario:
    """A worker that prefills and one that decodes, in one memory, which hands over all prompts."""
    model = scenario(host, disk).disk
    roles: tuple[Role, ...] = ("prefill", "decode")
    named = tuple(Pool(name=role, role=role, disk=model, swap_block_ns=50_000) for role in roles)
    pools = Pools(kv_bytes_per_token=BLOCK_BYTES // BLOCK, link="shared_memory", named=named)
    return scenario(host, disk, pools=pools, cluster=scenarios.front_end("kv_aware", "always"), **changes)


@pytest.mark.parametrize(
    ("host", "disk", "crash"), [slow(700, 0, None), (200, 2000, None), slow(200, 2000, 0), (200, 2000, 1)]
)
def test_a_decode_worker_brings_up_what_it_has_before_it_lends_its_blocks(
    host: int, disk: int, crash: int | None
) -> None:
    faults: tuple[Fault, ...] = ()
    if crash is not None:
        faults = (Fault(at_ns=4_000_000_000, worker=crash, kind="crash", duration_ns=500_000_000),)
    cluster = scenarios.run(made := one_to_one(host, disk, faults=faults))
    scenarios.check_laws(made, cluster)
    assert cluster.log is not None
    reserved = [event for worker, event in cluster.log if worker == 1 and isinstance(event, HandoffReserved)]
    assert sum(event.num_tier_tokens for event in reserved) > 100 * BLOCK
    assert (cluster.hit_error or 0) < 0.2
    if crash is None:
        slow = scenarios.run(one_to_one(host, disk, fast_forward=False))
        assert slow.log is not None and slow.log.digest() == cluster.log.digest()


# -- host blocks that other workers read -------------------------------------------------------------------------------


def crowded(peer_block_ns: int | None, **changes: object) -> Scenario:
    """Conversations come so fast that the worker that holds one has often too much to do."""
    return replace(two_workers(700, peer_block_ns=peer_block_ns, **changes), workload=faster(conversations(30)))


def faster(specs: list[RequestSpec]) -> list[RequestSpec]:
    return [replace(spec, arrival_ns=spec.arrival_ns * 6 // 10) for spec in specs]


def peer_share(result: SimulationResult) -> float:
    return float(summarize(result).get("peer_token_share", 0.0))


def test_workers_of_a_host_read_from_each_other_what_would_be_computed_twice() -> None:
    alone, together, dear = (simulate(crowded(price)) for price in (None, 50_000, 10**9))
    assert peer_share(alone) == peer_share(dear) == 0
    assert peer_share(together) > 0.01
    assert share(together) > share(alone) + 0.05
    assert summarize(together)["ttft_ms"]["mean"] < summarize(alone)["ttft_ms"]["mean"]


@pytest.mark.parametrize("crash", [False, True])
def test_with_peers_the_laws_hold_and_the_router_knows_exactly_what_lies_below(crash: bool) -> None:
    faults = tuple(
        Fault(at_ns=at_ns, worker=worker, kind="crash", duration_ns=100_000_000)
        for at_ns, worker in ((1_000_000_000, 0), (2_000_000_000, 1), (3_000_000_000, 0))
    )
    made = crowded(50_000, faults=faults if crash else ())
    cluster = scenarios.run(made)
    scenarios.check_laws(made, cluster)
    router = cluster.core.router
    assert isinstance(router, CostRouter)
    for worker in cluster.workers:
        assert {block for block, mask in router.host._masks.items() if mask >> worker.number & 1} == set(
            worker.engine.kv.host.prefix_cache
        )
        worker.engine.kv.check()
    assert sum(worker.engine.stats().tiers.peer_hit_tokens for worker in cluster.workers) > 0


def test_a_fleet_that_reads_from_peers_is_the_same_step_by_step() -> None:
    digests = []
    for fast_forward in (True, False):
        log = simulate_with_log(crowded(50_000, fast_forward=fast_forward))[1]
        assert log is not None
        digests.append(log.digest())
    assert digests[0] == digests[1]


def test_a_decode_worker_brings_up_what_its_peer_holds_before_it_lends_its_blocks() -> None:
    """Two decode workers: a conversation that comes back to the other one is not computed again."""
    roles: tuple[Role, ...] = ("prefill", "decode", "decode")
    named = tuple(Pool(name=f"{role} {at}", role=role, swap_block_ns=50_000) for at, role in enumerate(roles))
    pools = Pools(kv_bytes_per_token=BLOCK_BYTES // BLOCK, link="shared_memory", named=named)
    changes = {"pools": pools, "cluster": scenarios.front_end("kv_aware", "always")}
    made = scenario(700, peer_block_ns=20_000, **changes)
    made = replace(made, workload=faster(conversations(30)))
    cluster = scenarios.run(made)
    scenarios.check_laws(made, cluster)
    hits = [worker.engine.stats().tiers.peer_hit_tokens for worker in cluster.workers]
    assert sum(hits) > 0


def test_what_was_overwritten_or_lost_with_its_owner_is_a_miss() -> None:
    environment, pool = Environment(), BlockPool(4)
    shared, reports = SharedContents(), Reports(environment)
    shared.begin(0, pool)
    (block,) = pool.allocate(1)
    pool.remember(b"a", block)
    assert not shared.has(0, b"a")  # its copy is not done
    shared.share(0, ShareBlocks((b"a",), (block,)))
    reader = SimulatedPeerReader(1, shared, 1000, environment, reports)
    reader.restart(BlockPool(4))
    reader.act(LoadBlocks(1, (b"a", b"b"), (0, 1), peer=0))
    environment.run()
    pool.release([block])
    pool.allocate(4)
    reader.act(LoadBlocks(2, (b"a",), (0,), peer=0))
    reader.act(LoadBlocks(3, (b"a",), (0,)))  # from a disk
    environment.run()
    assert reports == [RunLoaded(1, 1, 2000), RunLoaded(2, 0, 1000)]
    shared.begin(0, BlockPool(4))
    assert not shared.has(0, b"a")


def test_workers_that_share_host_blocks_are_of_one_device_and_have_some() -> None:
    base = {"model": "llama-3.1-8b", "hardware": "h100", "assign": ["memory.shares_host=true"]}
    with pytest.raises(ConfigError, match="host_bytes is 0"):
        prepare(read_settings(None, overrides(base)))
    with pytest.raises(ConfigError, match="replicas of 2 devices"):
        prepare(read_settings(None, overrides({**base, "kv_host_gb": 2, "tensor_parallel": 2})))
    pool = prepare(read_settings(None, overrides({**base, "kv_host_gb": 2}))).pools[0]
    tiers = pool.engine.cache.tiers
    assert tiers.shares_host and tiers.peer_block_ns == 32 * 131072 // 10


def test_pools_without_a_disk_of_their_own_have_that_of_the_scenario() -> None:
    short = Pools(kv_bytes_per_token=BLOCK_BYTES // BLOCK, num_both=2)
    changes = {"cluster": scenarios.front_end("kv_aware"), "pools": short}
    with_disk = simulate(scenario(200, 4000, **changes))
    assert sum(usage.disk_stored_blocks for usage in with_disk.workers) > 100
    with pytest.raises(ConfigError, match="there is no disk"):
        simulate(replace(scenario(200, 4000, **changes), disk=None))
