"""Blocks that another worker of the host holds: when they are read from there, and what becomes of a load that gives
less than was hoped for."""

import random
from pathlib import Path
from typing import Any

import pytest

from diptych.control.cluster.attempts import Attempt
from diptych.control.cluster.cluster_recording import canonical_command
from diptych.control.commands import Prefill, Reserve, Serve
from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig, TierConfig
from diptych.control.engine.kvcache.load_source import SLOW_LOADS
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.engine.kvcache.tier_records import NO_PEER
from diptych.control.engine.recording import RecordingEngineCore
from diptych.control.events import RequestFinished
from diptych.control.request import FinishReason, PeerRun, Request
from diptych.serving.link.recorder import record_engine
from diptych.simulation.replay import replay
from tests.control.test_tiers import BLOCK, COPY_NS, cached_tokens, prompt, settle
from tests.control.test_tiers import make as make_alone
from tests.control.tiered_driver import TieredDriver
from tests.laws import law


def make(
    num_blocks: int = 40,
    num_host_blocks: int = 60,
    *,
    has_disk: bool = False,
    peer_block_ns: int = 60_000,
    **settings: Any,
) -> TieredDriver:
    tiers = TierConfig(COPY_NS, 24, has_disk, load_block_ns=100_000, shares_host=True, peer_block_ns=peer_block_ns)
    cache = CacheConfig(num_blocks, BLOCK, num_host_blocks, watermark_blocks=1, tiers=tiers)
    scheduler = SchedulerConfig(budget=BudgetConfig("fixed", 256), max_num_seqs=8)
    return TieredDriver(EngineConfig(cache, scheduler, max_model_len=600), **settings)


def holder() -> TieredDriver:
    """A worker whose host blocks hold the prompts 0 to 2 after it has computed them, and others."""
    driver = make(num_host_blocks=100)
    for number in range(4):
        driver.add(f"r{number}", prompt(number))
        settle(driver)
    return driver


def ask(driver: TieredDriver, name: str, tokens: list[int], run: PeerRun | None) -> Request:
    """A request comes, of which the router says that a peer holds this run."""
    return driver.add(name, tokens, peer_run=run)


def prompt_hashes(number: int) -> list[bytes]:
    return list(hash_blocks(prompt(number), BLOCK))


WHOLE = PeerRun(0, 0, 19)


def reader(**settings: Any) -> TieredDriver:
    return make(peers={0: holder().shared}, **settings)


def test_what_a_peer_holds_is_read_instead_of_being_computed() -> None:
    driver = reader()
    ask(driver, "a", prompt(1), WHOLE)
    driver.run()
    assert [(load.peer, len(load.hashes)) for load in driver.loads] == [(0, 19)]
    assert cached_tokens(driver, "a") == 19 * BLOCK
    tiers = driver.core.stats().tiers
    assert (tiers.peer_hit_tokens, tiers.peer_missed_blocks, tiers.disk_hit_tokens) == (19 * BLOCK, 0, 0)
    assert tiers.host_hit_tokens == 19 * BLOCK
    assert {entry[0] for entry in driver.shared.values()} >= set(driver.loads[0].hashes)  # and others may read it here


def test_a_run_counts_from_where_this_worker_needs_it() -> None:
    for run, loaded in ((PeerRun(0, 0, 10), 10), (PeerRun(0, 1, 18), 0), (PeerRun(0, 0, 0), 0), (None, 0)):
        driver = reader()
        ask(driver, "a", prompt(1), run)
        driver.run()
        assert cached_tokens(driver, "a") == loaded * BLOCK
    driver = reader()
    driver.add("first", prompt(1)[: 5 * BLOCK])
    driver.run()
    ask(driver, "a", prompt(1), WHOLE)  # of which 5 blocks are in its cache
    driver.run()
    assert [len(load.hashes) for load in driver.loads] == [14]
    assert cached_tokens(driver, "a") == 19 * BLOCK


@pytest.mark.parametrize(("price_ns", "is_read"), [(60_000, True), (300_000, True), (600_000, False), (10**9, False)])
def test_a_peer_is_read_only_where_that_takes_less_than_half_the_time_of_computing(
    price_ns: int, is_read: bool
) -> None:
    driver = reader(peer_block_ns=price_ns)  # a block takes 0.8 ms to compute, and 50 us to copy up
    ask(driver, "a", prompt(1), WHOLE)
    driver.run()
    assert bool(driver.loads) is is_read
    assert cached_tokens(driver, "a") == 19 * BLOCK * is_read


@pytest.mark.parametrize(("price_ns", "source"), [(60_000, 0), (200_000, NO_PEER)])
def test_of_disk_and_peer_the_cheaper_one_is_read(price_ns: int, source: int) -> None:
    stored = make(has_disk=True)
    stored.add("first", prompt(1))
    settle(stored)
    driver = reader(has_disk=True, contents=stored.contents, peer_block_ns=price_ns)
    ask(driver, "a", prompt(1), WHOLE)
    driver.run()
    assert [load.peer for load in driver.loads] == [source]
    assert cached_tokens(driver, "a") == 19 * BLOCK


def test_what_the_peer_does_not_have_is_read_from_disk_afterwards() -> None:
    stored = make(has_disk=True)
    stored.add("first", prompt(1))
    settle(stored)
    driver = reader(has_disk=True, contents=stored.contents)
    driver.lose(prompt_hashes(1)[0])
    ask(driver, "a", prompt(1), PeerRun(0, 0, 8))
    driver.run()
    assert [(load.peer, len(load.hashes)) for load in driver.loads] == [(0, 8), (NO_PEER, 11)]
    assert cached_tokens(driver, "a") == 19 * BLOCK


@pytest.mark.parametrize("there", [0, 7])
def test_what_a_peer_no_longer_has_is_computed_and_it_is_not_asked_again(there: int) -> None:
    peer = holder()
    known = {entry[0]: block for block, entry in peer.shared.items()}
    driver = make(peers={0: peer.shared})
    request = ask(driver, "a", prompt(1), WHOLE)
    for block_hash in request.block_hashes[there:]:
        peer.shared.pop(known.get(block_hash, -1), None)
    driver.run()
    assert len(driver.loads) == 1
    assert cached_tokens(driver, "a") == there * BLOCK
    assert driver.core.stats().tiers.peer_missed_blocks == 19 - there


def test_a_load_that_takes_longer_than_computing_is_given_up() -> None:
    driver = reader(delay_ns=10**10)
    ask(driver, "a", prompt(1), WHOLE)
    driver.run()
    assert driver.cancelled == {1} and cached_tokens(driver, "a") == 0
    assert driver.core.stats().tiers.cancelled_loads == 1


def test_peers_that_are_always_late_are_left_alone_for_a_while_and_the_disk_is_not() -> None:
    driver = reader(delay_ns=10**10, num_host_blocks=200)
    for number in range(SLOW_LOADS + 2):
        ask(driver, f"r{number}", prompt(10 + number), WHOLE)
        while f"r{number}" in driver.core.requests:
            assert driver.step() is not None
    assert len(driver.loads) == SLOW_LOADS
    assert driver.core.load(driver.now).peer_block_ns == 0
    assert driver.core.load(driver.now + 40 * 10**9).peer_block_ns > 0
    driver.run()


def test_a_request_that_ends_cancels_its_load_and_its_blocks_come_back() -> None:
    driver = reader()
    ask(driver, "a", prompt(1), WHOLE)
    driver.act()
    driver.abort("a")
    driver.run()
    assert driver.cancelled == {1}
    assert driver.core.kv.host.num_available == driver.core.kv.host.num_blocks


def test_two_prompts_that_begin_alike_wait_for_one_load_also_if_only_one_knows_of_the_peer() -> None:
    driver = reader()
    ask(driver, "a", prompt(1), WHOLE)
    ask(driver, "b", prompt(1), WHOLE)
    ask(driver, "c", prompt(1), None)
    assert driver.core.stats().num_waiting == 3
    driver.run()
    assert len(driver.loads) == 1
    assert [cached_tokens(driver, name) for name in "abc"] == [19 * BLOCK] * 3


def test_a_worker_that_shares_nothing_reads_nothing_and_says_nothing() -> None:
    driver = make_alone(has_disk=False)
    ask(driver, "a", prompt(1), WHOLE)
    for number in range(4):
        driver.add(f"r{number}", prompt(number))
        driver.run()
    assert not driver.loads and not driver.shared
    assert driver.core.load(driver.now).peer_block_ns == 0


def peers_in_trouble(seed: int) -> list[TieredDriver]:
    """Three workers that read from each other and lose what they hold, at the end of their work; the executor has
    checked what each slot held."""
    rng = random.Random(seed)
    workers = [
        make(num_host_blocks=rng.choice((30, 60)), has_disk=rng.random() < 0.4, seed=seed, fault_share=0.2,
             delay_ns=rng.choice((0, 10**6, 10**8)))
        for _ in range(3)
    ]  # fmt: skip
    for number, worker in enumerate(workers):
        worker.peers = {other: workers[other].shared for other in range(3) if other != number}
    for number in range(60):
        at = rng.randrange(3)
        worker, name = workers[at], f"r{number}"
        tokens = prompt(rng.randrange(6), rng.randrange(1, 25) * BLOCK)
        run = PeerRun(rng.choice([peer for peer in range(4) if peer != at]), rng.choice((0, 0, 3)), rng.randrange(25))
        ask(worker, name, tokens, rng.choice((run, run, None)))
        for other in workers:
            for _ in range(rng.randrange(5)):
                other.step()
        if rng.random() < 0.2:
            worker.abort(name)
        if rng.random() < 0.1 and workers[0].shared:
            workers[0].shared.pop(rng.choice(list(workers[0].shared)))
    for worker in workers:
        worker.run()
        ends = [event for event in worker.log if isinstance(event, RequestFinished)]
        assert {event.reason for event in ends} <= {FinishReason.LENGTH, FinishReason.ABORT}
    return workers


@law(weight=0.4)
def test_every_token_is_right_whatever_peers_hold_lose_and_are_said_to_hold(seed: int) -> None:
    peers_in_trouble(seed)


def test_peers_in_trouble_do_read_from_each_other() -> None:
    workers = [worker for seed in range(4) for worker in peers_in_trouble(seed)]
    assert sum(load.peer != NO_PEER for worker in workers for load in worker.loads) > 3
    assert sum(worker.core.stats().tiers.peer_hit_tokens for worker in workers) > 0


def test_a_copy_of_what_a_peer_holds_gives_way_before_what_only_this_worker_has() -> None:
    driver = reader(num_host_blocks=40)
    driver.add("own", prompt(20, 15 * BLOCK))
    settle(driver)
    for number in range(2):  # copy the prompt down
        driver.add(f"r{number}", prompt(30 + number))
        settle(driver)
    own = list(hash_blocks(prompt(20, 15 * BLOCK), BLOCK))
    here = driver.core.kv.host.prefix_cache
    assert all(here.get(block_hash) is not None for block_hash in own)
    ask(driver, "a", prompt(1), WHOLE)
    driver.run()
    copies = set(driver.loads[0].hashes)
    next_ones = driver.core.kv.host.oldest_cached(5)
    assert set(next_ones) <= copies


def test_a_recording_with_a_peer_is_replayed(tmp_path: Path) -> None:
    driver = reader()
    recorder = record_engine(tmp_path / "recording.jsonl", driver.config)
    driver.core = RecordingEngineCore(driver.config, recorder.write)
    ask(driver, "a", prompt(1), WHOLE)
    ask(driver, "b", prompt(2), PeerRun(0, 0, 4))
    driver.run()
    recorder.close()
    assert [load.peer for load in driver.loads] == [0, 0]
    report = replay(recorder.path)
    assert report.difference is None and report.num_steps > 5


def test_the_commands_of_an_attempt_say_which_peer_each_worker_may_read() -> None:
    here, there = PeerRun(3, 0, 9), PeerRun(4, 2, 5)
    whole = Attempt("a", "a", 0, 1, 1, False, 0, here, here)
    assert [getattr(command, "peer_run", None) for command in whole.begin()] == [here]
    for is_borrowed in (False, True):
        attempt = Attempt("a", "a", 0, 1, 2, is_borrowed, 0, here, there)
        commands = [*attempt.begin(), *attempt.on_reserved(0, ((7, 8),))]
        said = {type(command): command.peer_run for command in commands if isinstance(command, Reserve | Prefill)}
        assert said == {Reserve: there, Prefill: here}


def test_a_command_that_names_no_peer_is_recorded_as_before_there_were_peers() -> None:
    assert canonical_command(Serve(0, "a", "a", 1)) == (
        "Serve(worker=0, request_id='a', attempt_id='a', num_output_tokens=1)"
    )
    assert "PeerRun(peer=3" in canonical_command(Serve(0, "a", "a", 1, PeerRun(3, 0, 9)))
