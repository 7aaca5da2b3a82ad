"""Tiers below a cache whose layers are of several groups: what comes up ends where all that is needed can be found."""

import random
from dataclasses import replace
from typing import Any

import pytest

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig, TierConfig
from diptych.control.engine.kvcache.prefix_cache import HASH_BYTES, hash_blocks, page_key
from diptych.control.events import RequestAdmitted
from diptych.control.kv_layout import GroupKind, KVGroup
from diptych.control.request import FinishReason
from tests.control.driver import in_groups
from tests.control.test_tiers import BLOCK, COPY_NS, cached_tokens, prompt, random_driver, settle
from tests.control.test_windows import answered
from tests.control.tiered_driver import TieredDriver
from tests.laws import law

GROUPS = (KVGroup(BLOCK), *[KVGroup(BLOCK, GroupKind.WINDOW, 3 * BLOCK)] * 2)


def make(num_blocks: int = 80, num_host_blocks: int = 200, *, has_disk: bool = False, **settings: Any) -> TieredDriver:
    tiers = TierConfig(COPY_NS, clean_blocks=48, has_disk=has_disk, load_block_ns=100_000)
    cache = CacheConfig(num_blocks, BLOCK, num_host_blocks, watermark_blocks=1, tiers=tiers, groups=GROUPS,
                        window_chunk=4 * BLOCK)  # fmt: skip
    scheduler = SchedulerConfig(budget=BudgetConfig("fixed", 256), max_num_seqs=8)
    return TieredDriver(EngineConfig(cache, scheduler, max_model_len=600), **settings)


def test_names_of_blocks_are_hashes_that_differ_by_group() -> None:
    hashes = hash_blocks(range(64), 16)
    names = {page_key(block_hash, number) for block_hash in hashes for number in range(300)}
    assert len(names) == 4 * 300 and {len(name) for name in names} == {HASH_BYTES}
    assert not names & set(hashes)


def test_what_was_evicted_comes_up_from_the_host() -> None:
    driver = make()
    for number in range(5):
        driver.add(f"first {number}", prompt(number))
        settle(driver)
    driver.add("again", prompt(1))
    driver.run()
    assert cached_tokens(driver, "again") == 19 * BLOCK
    (admitted,) = [e for e in driver.log if isinstance(e, RequestAdmitted) and e.request_id == "again"]
    assert admitted.num_tier_tokens > 0 and driver.core.kv.tiers.host_hit_tokens > 0
    raised = sum(len(output.swap_in) for output in driver.outputs)
    assert 0 < raised <= 19 + 2 * 4  # of windows, the last one


def test_a_prompt_and_the_next_turn_are_found_on_disk_after_a_restart() -> None:
    driver = make(has_disk=True)
    driver.add("first", prompt(1, 150), max_tokens=300)
    settle(driver)
    turn = answered(prompt(1, 150), 300) + prompt(2, 40)
    for tokens, num_blocks in ((prompt(1, 150), 9), (turn, 28)):
        after = make(has_disk=True, contents=dict(driver.contents))
        after.add("again", tokens)
        after.run()
        assert cached_tokens(after, "again") == num_blocks * BLOCK
        assert [len(load.hashes) for load in after.loads] == [num_blocks + 2 * 3]


def test_a_boundary_of_which_a_block_is_missing_is_none() -> None:
    driver = make(has_disk=True)
    driver.add("first", prompt(1, 150), max_tokens=2)
    settle(driver)
    hashes = hash_blocks(prompt(1, 150), BLOCK)
    contents = dict(driver.contents)
    del contents[page_key(hashes[8], 1)]
    after = make(has_disk=True, contents=contents)
    after.add("again", prompt(1, 150))
    after.run()
    assert cached_tokens(after, "again") == 0


@pytest.mark.parametrize("lost", [0, 5, 12])
def test_what_cannot_be_read_is_computed(lost: int) -> None:
    driver = make(has_disk=True)
    driver.add("first", prompt(1, 150), max_tokens=2)
    settle(driver)
    after = make(has_disk=True, contents=driver.contents)
    after.add("again", prompt(1, 150))
    del after.contents[sorted(after.contents)[lost]]  # and nobody says so
    after.run()
    assert cached_tokens(after, "again") in (0, 9 * BLOCK)
    assert {event.reason for event in after.finished().values()} == {FinishReason.LENGTH}


def random_windows(seed: int) -> TieredDriver:
    """The same days as of a cache whose layers are all alike."""
    plain, rng = random_driver(seed), random.Random(seed)
    cache = plain.config.cache
    full = [KVGroup(cache.block_size)] * rng.choice((0, 1, 1, 2))
    windows = [KVGroup(cache.block_size, GroupKind.WINDOW, rng.choice((1, 17, 40)))] * rng.choice((1, 2))
    groups = tuple(rng.sample([*full, *windows], len(full) + len(windows)))
    config = replace(plain.config, cache=in_groups(cache, groups, rng.choice((16, 50))))
    return TieredDriver(config, seed=seed, delay_ns=plain.delay_ns, fault_share=plain.fault_share)


@law(weight=0.6)
def test_every_token_is_right_whatever_the_tiers_do(seed: int) -> None:
    rng, driver = random.Random(seed), random_windows(seed)
    stems = [prompt(number, rng.randrange(1, 200)) for number in range(4)]
    for number in range(rng.choice((5, 20))):
        tokens = rng.choice(stems)[: rng.randrange(1, 200)] + prompt(rng.randrange(1000), rng.randrange(1, 60))
        tokens = tokens[: driver.config.max_model_len - 8]
        if rng.random() < 0.3 and driver.prompts:
            tokens = rng.choice(list(driver.prompts.values()))
        driver.add(f"r{number}", tokens, rng.choice((1, 5, 30)))
        for _ in range(rng.choice((0, 2, 30))):
            driver.step()
        if rng.random() < 0.1:
            driver.abort(f"r{rng.randrange(number + 1)}")
        if rng.random() < 0.1 and driver.contents:
            driver.lose(rng.choice(sorted(driver.contents)))
    driver.run()
    driver.core.kv.check()
    assert set(driver.finished()) == set(driver.prompts)
