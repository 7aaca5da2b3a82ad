"""Models with layers that attend to a window: what has left it is free, and nothing that is still read ever is."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.control.config import CacheConfig, EngineConfig, SchedulerConfig, shape_preset
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.errors import ConfigError
from diptych.control.events import Event, KVEvents, KVSnapshot, RequestAdmitted, RequestFinished
from diptych.control.kv_layout import GroupKind, KVGroup, KVLayout
from diptych.control.request import FinishReason, Request
from diptych.control.step import SchedulerOutput
from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
from diptych.simulation.replay import replay
from tests.control.checking_executor import token_at
from tests.control.driver import Driver, in_groups
from tests.control.test_conservation import check_scenario, random_config, run_scenario
from tests.laws import law
from tests.simulation.scenarios import random_scenario
from tests.simulation.test_replay import record_scenario

WINDOW = GroupKind.WINDOW


def with_windows(config: EngineConfig, rng: random.Random) -> EngineConfig:
    """A model of the same memory whose layers are of several groups."""
    size = config.cache.block_size
    full = [KVGroup(size)] * rng.choice((0, 1, 1, 1, 2))
    window = [KVGroup(size, WINDOW, rng.choice((1, 3, 16, 17, 40)))] * rng.choice((1, 1, 2, 5))
    groups = tuple(rng.sample([*full, *window], len(full) + len(window)))
    return replace(config, cache=in_groups(config.cache, groups, rng.choice((1, 5, 16, 64))))


def random_windows(rng: random.Random) -> EngineConfig:
    """Any policies, any windows."""
    return with_windows(random_config(rng), rng)


class Watched(Driver):
    """Looks at what each request holds."""

    def check_step(self, output: SchedulerOutput) -> None:
        """No request holds more than its layout says, but for blocks that it got early for drafts."""
        super().check_step(output)
        layout, kv = self.core.kv.layout, self.core.kv
        rows = {extra.request_id: extra.num_tokens for extra in output.verify_rows}
        for chunk in output.prefills:
            assert chunk.num_tokens <= kv.longest_chunk
        for request in self.core.scheduler.batch:
            num_tokens = self.core.scheduler.batch.num_computed(request)
            for group, block_ids, first in zip(layout.groups, request.block_tables, request.first_blocks, strict=True):
                assert group.first_live(num_tokens) >= first, "a block has expired that is still read"
                if self.executor.guesses is None:
                    assert len(block_ids) <= group.peak_pages(num_tokens + 1 + rows.get(request.request_id, 0), 1)


@law(weight=1.0)
def test_nothing_that_is_read_expires_and_nothing_is_lost_whatever_happens(seed: int) -> None:
    check_scenario(run_scenario(seed, config_of=random_windows, make=Watched))


def published(events: list[Event]) -> set[bytes]:
    """The boundaries of which a worker has said that they are there."""
    known: set[bytes] = set()
    for event in events:
        if isinstance(event, KVEvents):
            known = (known - set(event.evicted)) | set(event.stored)
        elif isinstance(event, KVSnapshot):
            assert known == set(event.hashes)
    return known


@law(weight=0.3)
def test_what_a_worker_says_of_its_boundaries_is_what_it_has(seed: int) -> None:
    driver = run_scenario(seed, config_of=random_windows, make=Watched)
    kv = driver.core.kv
    assert published(driver.log + driver.core.kv_snapshot(driver.now)) == set(kv.boundaries)
    for block_hash in kv.boundaries:
        for key in kv.boundaries.window_pages(block_hash):
            assert kv.pool.prefix_cache.get(key) is not None, "a boundary is there and its window is not"


@law(weight=0.5)
def test_steps_that_are_taken_at_once_decide_as_steps_one_by_one(seed: int) -> None:
    digests = []
    for fast_forward in (True, False):
        scenario = random_scenario(seed, fast_forward=fast_forward)
        scenario = replace(scenario, engine=with_windows(scenario.engine, random.Random(seed)))
        cluster = SimulatedCluster(scenario)
        cluster.run()
        assert cluster.log is not None
        digests.append(cluster.log.digest())
    assert digests[0] == digests[1]


@law(weight=0.3)
def test_a_recording_replays_to_the_same_decisions(seed: int, tmp_path: Path) -> None:
    path = tmp_path / f"{seed}.jsonl"
    driver = record_scenario(seed, path, random_windows)
    report = replay(path)
    assert report.is_identical, report.difference
    assert report.is_complete and report.config == driver.config


@law(weight=0.2)
def test_one_group_that_attends_to_everything_decides_as_a_model_without_groups(seed: int) -> None:
    def in_one_group(rng: random.Random) -> EngineConfig:
        config = random_config(rng)
        return replace(config, cache=replace(config.cache, groups=(KVGroup(config.cache.block_size),)))

    plain, grouped = run_scenario(seed), run_scenario(seed, config_of=in_one_group)
    assert plain.outputs == grouped.outputs
    assert plain.log == grouped.log


def long_runner(num_blocks: int, *, shape: str = "chunked", window_chunk: int = 64) -> Driver:
    """One layer in six attends to everything, the others to 64 tokens."""
    groups = (KVGroup(16), *[KVGroup(16, WINDOW, 64)] * 5)
    cache = CacheConfig(num_blocks, 16, watermark_blocks=0, groups=groups, window_chunk=window_chunk)
    scheduler = shape_preset("unified" if shape == "unified" else "chunked")
    return Driver(EngineConfig(cache, scheduler, max_model_len=4000))


@pytest.mark.parametrize("shape", ["unified", "chunked"])
def test_a_long_sequence_lies_in_memory_that_would_not_hold_half_of_it(shape: str) -> None:
    driver = long_runner(44 + 5 * 9, shape=shape)
    request = driver.add("r", 500, 200)
    held = []
    while (output := driver.step()) is not None:
        if output.num_decodes:
            held.append([len(block_ids) for block_ids in request.block_tables])
    assert driver.finished()["r"].reason is FinishReason.LENGTH
    assert held[0][1:] == [5] * 5 and all(max(tables[1:]) <= 5 for tables in held if tables)
    assert max(tables[0] for tables in held if tables) == -(-699 // 16)


def test_blocks_that_a_window_has_left_are_free_for_another_request_at_once() -> None:
    driver = long_runner(120)
    first = driver.add("first", 400, 100)
    while not first.num_output_tokens:
        driver.step()
    driver.step()
    assert first.num_blocks == 26 + 5 * 5
    second = driver.add("second", 350, 2)
    driver.step()
    assert second.block_tables, "69 blocks are left, and it takes 22 and five windows of 9"
    driver.run()
    assert {event.reason for event in driver.finished().values()} == {FinishReason.LENGTH}


def test_what_a_request_is_refused_for_counts_windows_as_windows() -> None:
    most = long_runner(100 + 5 * 9).core.kv.capacity_tokens
    assert most == 1600
    core = long_runner(100 + 5 * 9).core
    (refused,) = core.add_request(Request("long", 1500, 101), 0)
    assert isinstance(refused, RequestFinished) and "holds 1600" in refused.message
    assert not isinstance(core.add_request(Request("fits", 1500, 100), 0)[0], RequestFinished)


def cached_tokens(driver: Driver) -> dict[str, int]:
    """What each request found at its first admission."""
    return {event.request_id: event.num_cached_tokens for event in driver.log if isinstance(event, RequestAdmitted)}


def tokens_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(990) for _ in range(length)]


def answered(prompt: list[int], count: int) -> list[int]:
    """A prompt and the answer to it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(token_at(tokens))
    return tokens


def add_with_stem(driver: Driver, number: int) -> None:
    """Add a request whose prompt has the same 320 tokens first, and then 100 of its own."""
    driver.add(f"r{number}", tokens_of(320, 1) + tokens_of(100, 10 + number), 20)


@pytest.mark.parametrize("shape", ["unified", "chunked"])
def test_a_prompt_that_comes_again_is_found_and_so_is_the_next_turn(shape: str) -> None:
    driver = long_runner(600, shape=shape)
    prompt = tokens_of(500, 1)
    driver.add("first", prompt, 60)
    driver.run()
    driver.add("again", prompt, 8)
    driver.run()
    driver.add("next turn", answered(prompt, 60) + tokens_of(30, 2), 8)
    driver.run()
    assert cached_tokens(driver) == {"first": 0, "again": 496, "next turn": 544}


def test_what_prompts_begin_with_is_found_from_the_second_on_while_there_is_memory() -> None:
    driver = long_runner(2000)
    for number in range(6):
        add_with_stem(driver, number)
        driver.run()
    assert [*cached_tokens(driver).values()] == [0, 320, 320, 320, 320, 320]


def test_what_prompts_begin_with_is_found_from_the_third_on_in_memory_that_is_full() -> None:
    """The second shows where they part."""
    driver = long_runner(230)
    for number in range(4):
        driver.add(f"f{number}", tokens_of(700, 50 + number), 20)
        driver.run()
    for number in range(6):
        add_with_stem(driver, number)
        driver.run()
    assert [*cached_tokens(driver).values()][6:] == [320, 320, 320, 320]


def test_what_is_left_of_windows_takes_no_memory_from_others() -> None:
    """It is evicted before anything that was cached on purpose."""
    driver = long_runner(44 + 5 * 9 + 40)
    driver.add("first", tokens_of(300, 1), 8)
    driver.run()
    kv = driver.core.kv
    before = set(kv.boundaries)
    assert kv.pool.num_available == kv.pool.num_blocks
    kept = len(kv.pool.prefix_cache) - 18 - sum(len(kv.boundaries.window_pages(found)) for found in before)
    assert kept > 0, "there is memory that nothing is in"
    kv.pool.release(kv.pool.allocate(kv.pool.num_free + kept))
    assert set(kv.boundaries) == before


def test_prompts_that_come_together_wait_for_what_they_share() -> None:
    driver = long_runner(2000)
    for number in range(16):
        add_with_stem(driver, number)
    driver.run()
    assert sorted(cached_tokens(driver).values()) == [0] + [320] * 15


def test_nobody_waits_for_a_prompt_whose_client_has_gone() -> None:
    driver = long_runner(2000)
    prompt = tokens_of(600, 1)
    driver.add("first", prompt, 20)
    driver.step()
    driver.add("second", prompt, 20)
    driver.step()
    driver.abort("first")
    driver.run()
    assert driver.finished()["second"].reason is FinishReason.LENGTH


def test_a_boundary_goes_with_the_first_of_its_blocks() -> None:
    driver = long_runner(44 + 5 * 9)
    prompt = tokens_of(300, 1)
    driver.add("first", prompt, 8)
    driver.run()
    driver.add("large", tokens_of(600, 2), 8)
    driver.run()
    driver.add("again", prompt, 8)
    driver.run()
    assert cached_tokens(driver) == {"first": 0, "large": 0, "again": 0}
    assert {event.reason for event in driver.finished().values()} == {FinishReason.LENGTH}


def test_tiers_look_again_at_what_is_evicted_next_when_a_boundary_has_ended() -> None:
    driver = long_runner(600)
    for number in range(2):
        driver.add(f"r{number}", tokens_of(300, number), 8)
        driver.run()
    pool = driver.core.kv.pool
    newest = list(driver.core.kv.boundaries)[-1]
    before, version = pool.oldest_cached(600), pool.version
    pool.end_boundary(newest)
    after = pool.oldest_cached(600)
    assert after != before and sorted(after) == sorted(before) and pool.version != version


def test_a_prompt_that_only_fits_without_what_is_cached_is_computed_anew() -> None:
    driver = long_runner(44 + 5 * 9)
    prompt = tokens_of(400, 1)
    driver.add("first", prompt, 8)
    driver.run()
    driver.add("long", prompt + tokens_of(290, 2), 8)
    driver.run()
    assert driver.finished()["long"].reason is FinishReason.LENGTH


def test_a_conversation_is_lost_from_its_end() -> None:
    """What is left of it while memory is short can be gone on from."""
    driver = long_runner(200)
    prompt = tokens_of(496, 1)
    driver.add("first", prompt, 60)
    driver.run()
    kv = driver.core.kv
    num_left = len(kv.pool.prefix_cache) - 34 - 2 * 20  # but for what leads to 544, and the windows of both boundaries
    kv.pool.release(kv.pool.allocate(kv.pool.num_free + num_left + 20))
    turn = Request("next turn", 600, 8, block_hashes=hash_blocks(answered(prompt, 60) + tokens_of(44, 2), 16))
    assert kv.longest_hit(turn).num_tokens == 480, "what leads to 544 is gone, and nothing else"


def test_what_many_begin_with_stays_while_a_conversation_goes_on() -> None:
    """A conversation that began with the system prompt goes on behind it and never looks at its windows again."""
    driver = long_runner(260)
    system = tokens_of(320, 1)
    for number in range(4):
        driver.add(f"r{number}", system + tokens_of(40, 10 + number), 8)
        driver.run()
    talk = system + tokens_of(40, 13)
    for turn in range(20):
        talk = answered(talk, 8) + tokens_of(24, 100 + turn)
        driver.add(f"turn{turn}", talk, 8)
        driver.run()
    driver.add("new", system + tokens_of(40, 99), 8)
    driver.run()
    assert cached_tokens(driver)["new"] == 320


@law(weight=0.3)
def test_a_hit_leaves_the_answers_and_the_memory_as_they_were(seed: int) -> None:
    """Prompts of a few families, one by one: what is found is never more than they share, and nothing stays held."""
    rng = random.Random(seed)
    groups = tuple(
        rng.sample([KVGroup(16), *[KVGroup(16, WINDOW, rng.choice((1, 16, 17, 70)))] * 3], rng.randrange(2, 5))
    )
    cache = CacheConfig(rng.choice((120, 300, 900)), 16, watermark_blocks=rng.choice((0, 4)), groups=groups)
    cache = replace(cache, window_chunk=rng.choice((16, 50, 64)))
    driver = Driver(EngineConfig(cache, shape_preset(rng.choice(("unified", "chunked"))), max_model_len=4000))
    roots = [tokens_of(rng.randrange(1, 200), number) for number in range(3)]
    for number in range(12):
        prompt = rng.choice(roots) + tokens_of(rng.randrange(1, 120), rng.randrange(4))
        driver.add(f"r{number}", prompt, rng.randrange(1, 60))
        if rng.random() < 0.6:
            driver.run()
    driver.run()
    assert {event.reason for event in driver.finished().values()} == {FinishReason.LENGTH}
    driver.core.kv.check()
    assert not driver.core.kv.pool.num_used and driver.core.kv.is_unused


def test_pages_of_another_size_than_the_block_are_refused() -> None:
    with pytest.raises(ConfigError, match="groups has pages of 32 tokens; block_size is 16"):
        CacheConfig(100, 16, groups=(KVGroup(16), KVGroup(32, WINDOW, 64)))
    with pytest.raises(ConfigError, match="window_chunk is 0"):
        CacheConfig(100, 16, window_chunk=0)
    assert EngineCore(EngineConfig(CacheConfig(100, 16), SchedulerConfig())).kv.layout == KVLayout.dense(16)
