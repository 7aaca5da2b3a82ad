"""The tiers below the KV cache: what goes down, what comes up, and when it pays."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.control.config import (
    BudgetConfig,
    CacheConfig,
    EngineConfig,
    PreemptionConfig,
    SchedulerConfig,
    TierConfig,
    shape_preset,
)
from diptych.control.engine.kvcache.tier_records import DiskContents, LoadBlocks
from diptych.control.engine.recording import RecordingEngineCore
from diptych.control.errors import ConfigError
from diptych.control.events import RequestAdmitted
from diptych.control.slo import NS_PER_MS
from diptych.serving.link.recorder import record_engine
from diptych.simulation.replay import replay
from tests.control.tiered_driver import TieredDriver
from tests.laws import law

BLOCK = 16
COPY_NS = 50_000


def make(
    num_blocks: int = 40, num_host_blocks: int = 60, *, has_disk: bool = True, budget: int = 256, **settings: Any
) -> TieredDriver:
    tiers = TierConfig(COPY_NS, clean_blocks=24, has_disk=has_disk, load_block_ns=100_000)
    cache = CacheConfig(num_blocks, BLOCK, num_host_blocks, watermark_blocks=1, tiers=tiers)
    scheduler = SchedulerConfig(budget=BudgetConfig("fixed", budget), max_num_seqs=8)
    return TieredDriver(EngineConfig(cache, scheduler, max_model_len=600), **settings)


def prompt(number: int, num_tokens: int = 20 * BLOCK) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(1000) for _ in range(num_tokens)]


def cached_tokens(driver: TieredDriver, request_id: str) -> int:
    admitted = [e for e in driver.log if isinstance(e, RequestAdmitted) and e.request_id == request_id]
    return admitted[0].num_cached_tokens


def settle(driver: TieredDriver) -> None:
    """Until nothing is left to copy or to store."""
    driver.run()
    while driver.core.kv.tiers.has_moves:
        assert driver.step() is not None


def test_what_was_evicted_is_copied_up_from_the_host_instead_of_being_computed() -> None:
    driver = make(num_host_blocks=100, has_disk=False)
    for number in range(4):  # 80 blocks of prompts through a cache of 40
        driver.add(f"first {number}", prompt(number))
        driver.run()
    driver.add("again", prompt(1))
    driver.run()
    assert cached_tokens(driver, "again") == 19 * BLOCK  # at least one token is computed
    assert driver.core.kv.tiers.host_hit_tokens > 0
    assert any(output.swap_in for output in driver.outputs)


def test_nothing_is_copied_while_the_cache_has_free_blocks() -> None:
    driver = make(num_blocks=400, has_disk=False)
    for number in range(4):
        driver.add(f"r{number}", prompt(number))
        driver.run()
    assert not any(output.swap_out for output in driver.outputs)


def test_copies_down_take_a_small_part_of_steps_that_compute() -> None:
    driver = make(num_blocks=60, num_host_blocks=200)
    for number in range(12):
        driver.add(f"r{number}", prompt(number, 5 * BLOCK), max_tokens=40)
        driver.step()
    while (output := driver.step()) is not None:
        if output.is_compute:
            alone_ns = output.predicted_ns - len(output.swap_out) * COPY_NS
            assert len(output.swap_out) * COPY_NS <= max(alone_ns * 200 // 1000, COPY_NS)


def test_a_prompt_is_found_on_disk_after_a_restart() -> None:
    driver = make()
    driver.add("first", prompt(1), max_tokens=20)
    settle(driver)
    after = make(contents=driver.contents)
    after.add("again", prompt(1))
    after.run()
    assert [len(load.hashes) for load in after.loads] == [19]
    assert cached_tokens(after, "again") == 19 * BLOCK


def test_the_answer_is_on_disk_too_so_that_the_next_turn_finds_it() -> None:
    driver = make()
    driver.add("first", prompt(1, 100), max_tokens=60)
    settle(driver)
    assert len(driver.contents) == (100 + 60 - 1) // BLOCK  # the last token's KV is never computed


def test_a_load_that_takes_longer_than_computing_is_not_begun() -> None:
    driver = make()
    driver.add("first", prompt(1))
    settle(driver)
    after = make(contents=driver.contents)
    after.core.kv.tiers.loads.disk.load_block_ns = 10**9
    after.add("again", prompt(1))
    after.run()
    assert not after.loads
    assert cached_tokens(after, "again") == 0


def test_two_requests_with_one_prefix_wait_for_one_load() -> None:
    driver = make()
    driver.add("first", prompt(1))
    settle(driver)
    after = make(contents=driver.contents)
    after.add("a", prompt(1))
    after.add("b", [*prompt(1), 7, 7, 7])
    assert after.core.stats().num_waiting == 2
    after.run()
    assert [len(load.hashes) for load in after.loads] == [19, 1]  # the longer prompt reads one block more
    assert cached_tokens(after, "a") == 19 * BLOCK
    assert cached_tokens(after, "b") >= 19 * BLOCK


def test_a_load_that_is_over_makes_its_request_runnable_at_once() -> None:
    """It goes before all that came meanwhile and have not begun."""
    scheduler = shape_preset("unified", budget=BudgetConfig("whole", 8 * BLOCK))
    driver = make()
    driver.add("first", prompt(1))
    settle(driver)
    config = replace(make().config, scheduler=scheduler)
    after = TieredDriver(config, contents=driver.contents)
    after.add("busy", prompt(5))
    after.step()
    after.add("again", prompt(1))
    for number in range(3):
        after.add(f"later {number}", prompt(10 + number, 8 * BLOCK))
    after.run()
    order = [e.request_id for e in after.log if isinstance(e, RequestAdmitted)]
    assert order.index("again") < order.index("later 1")


def test_a_cancelled_request_frees_the_host_blocks_when_the_load_is_answered() -> None:
    driver = make()
    driver.add("first", prompt(1))
    settle(driver)
    after = make(contents=driver.contents)
    after.add("again", prompt(1))
    after.act()
    assert after.core.kv.host.num_used == 19
    after.abort("again")
    assert after.core.kv.host.num_used == 19  # the disk still writes there
    after.run()
    assert after.cancelled == {1}
    assert after.core.kv.host.num_used == 0


def test_a_load_that_takes_too_long_is_computed_instead() -> None:
    driver = make()
    driver.add("first", prompt(1))
    settle(driver)
    after = make(contents=driver.contents, delay_ns=10**12)
    after.add("again", prompt(1))
    while "again" not in after.finished():
        after.step()
    assert cached_tokens(after, "again") == 0
    assert after.now < 10**11
    after.run()


def test_a_disk_that_is_always_late_is_left_alone() -> None:
    driver = make()
    for number in range(6):
        driver.add(f"first {number}", prompt(number))
        settle(driver)
    after = make(num_blocks=400, num_host_blocks=600, contents=driver.contents, delay_ns=10**12)
    for number in range(6):
        after.add(f"again {number}", prompt(number))
        while f"again {number}" not in after.finished():
            after.step()
    assert len(after.loads) == 4


def test_what_cannot_be_read_is_computed_and_not_asked_for_again() -> None:
    driver = make()
    driver.add("first", prompt(1))
    settle(driver)
    after = make(contents=driver.contents)
    gone = list(driver.contents)[5]
    del after.contents[gone]  # and the core has not heard of it
    for block_hash in list(after.contents)[5:]:
        del after.contents[block_hash]
    after.add("again", prompt(1))
    after.run()
    assert cached_tokens(after, "again") == 5 * BLOCK
    assert after.core.kv.tiers.loads.disk.missed_blocks == 14


def test_a_dead_disk_is_neither_read_nor_written() -> None:
    driver = make()
    driver.switch_off()
    driver.add("first", prompt(1))
    settle(driver)
    assert not driver.contents
    assert not driver.loads


def test_requests_that_do_not_read_the_prefix_cache_load_nothing() -> None:
    driver = make()
    driver.add("first", prompt(1))
    settle(driver)
    after = make(contents=driver.contents)
    request = after.add("again", prompt(1))
    request.reads_prefix_cache = False
    after.act()
    assert isinstance(after.loads[0], LoadBlocks)  # it was asked for at its arrival
    after.run()


def test_a_disk_without_host_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_host_blocks is 0"):
        CacheConfig(40, tiers=TierConfig(has_disk=True))


def test_an_admission_says_what_came_from_below_the_prefix_cache() -> None:
    driver = make()
    driver.add("first", prompt(1))
    settle(driver)
    after = make(contents=driver.contents)
    after.add("again", prompt(1))
    after.run()
    after.add("once more", prompt(1))
    after.run()
    found = {
        e.request_id: (e.num_cached_tokens, e.num_tier_tokens) for e in after.log if isinstance(e, RequestAdmitted)
    }
    assert found == {"again": (19 * BLOCK, 19 * BLOCK), "once more": (19 * BLOCK, 0)}


def test_a_recording_with_tiers_is_replayed_to_the_same_decisions(tmp_path: Path) -> None:
    driver = make()
    for number in range(3):
        driver.add(f"first {number}", prompt(number))
        settle(driver)
    after = make(contents=driver.contents, delay_ns=3 * NS_PER_MS)
    recorder = record_engine(tmp_path / "worker.jsonl", after.config)
    after.core = RecordingEngineCore(after.config, recorder.write)
    after.core.on_tier(DiskContents(added=tuple(driver.contents)), after.now)
    for number in range(5):
        after.add(f"again {number}", prompt(number))
        after.step()
    after.abort("again 4")
    settle(after)
    recorder.close()
    report = replay(recorder.path)
    assert report.difference is None, report.difference
    assert report.is_complete and report.num_steps > 10


def random_driver(seed: int) -> TieredDriver:
    rng = random.Random(seed)
    block = rng.choice([4, 16])
    kind = rng.choice(("whole", "fixed", "slo"))
    from_waiting = rng.random() < 0.3
    scheduler = SchedulerConfig(
        order="priority" if from_waiting else rng.choice(("fcfs", "shortest", "deadline")),
        budget=BudgetConfig(kind, rng.choice([33, 256]), rng.choice([6, 50]) * NS_PER_MS),
        preemption=PreemptionConfig(rng.choice(("recompute", "swap")), from_waiting=from_waiting, min_steps=1),
        max_num_seqs=rng.choice([2, 8]),
    )
    tiers = TierConfig(rng.choice([0, 10_000, 2_000_000]), rng.choice([0, 8, 64]), True, rng.choice([0, 50_000]))
    cache = CacheConfig(
        rng.choice([200, 500]) // block,
        block,
        rng.choice([8, 40, 200]),
        rng.choice([0, 2]),
        admission=rng.choice(("expected", "greedy")),
        tiers=tiers,
    )
    return TieredDriver(
        EngineConfig(cache, scheduler, max_model_len=150),
        seed=seed,
        delay_ns=rng.choice([0, 5, 500]) * NS_PER_MS,
        fault_share=rng.choice([0.0, 0.3]),
    )


@law(weight=0.6)
def test_every_token_is_right_whatever_the_tiers_do(seed: int) -> None:
    driver, rng = random_driver(seed), random.Random(seed)
    stems = [[rng.randrange(1000) for _ in range(120)] for _ in range(3)]
    for number in range(rng.choice([10, 40])):
        for _ in range(rng.choice([0, 1, 6, 30])):
            driver.step()
        stem = rng.choice(stems)[: rng.randrange(120)]
        tokens = stem + [rng.randrange(1000) for _ in range(rng.randrange(1, 15))]
        driver.add(f"r{number}", tokens, rng.choice([1, 5, 15]), priority=rng.choice([0, 3]))
        if rng.random() < 0.15:
            driver.abort(f"r{rng.randrange(number + 1)}")
        if rng.random() < 0.1 and driver.contents:
            driver.lose(rng.choice(list(driver.contents)))
        if seed % 7 == 0 and number == 30:
            driver.switch_off()
    settle(driver)
    driver.run()
    assert set(driver.finished()) == set(driver.prompts)
    tiers = driver.core.kv.tiers
    assert not tiers.loads.num_loading and not tiers.loads.num_waiting
    assert tiers.host.num_used == 0
