"""Who can bring up which blocks from a tier below the KV caches: reports, gaps, snapshots, and the bound."""

import random

import pytest

from diptych.control.engine.kvcache import tier_changes
from diptych.control.engine.kvcache.disk_journal import DiskJournal
from diptych.control.engine.kvcache.tier_changes import TierChanges
from diptych.control.events import Event, KVEvents, KVSnapshot
from diptych.control.router.tier_index import TierIndex
from tests.control.test_tiers import make, prompt
from tests.control.tiered_driver import TieredDriver
from tests.laws import law


def blocks(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(4, "little") for number in numbers)


def index_of(num_workers: int, max_blocks: int = 1000) -> TierIndex:
    index = TierIndex(max_blocks)
    for _ in range(num_workers):
        index.add_worker()
    return index


def test_a_run_begins_where_the_cache_ends_and_stops_at_the_first_gap() -> None:
    index = index_of(2)
    index.on_events(0, 1, stored=blocks(3, 4, 6))
    assert [index.run(0, blocks(1, 2, 3, 4, 5, 6), start) for start in range(7)] == [0, 0, 2, 1, 0, 1, 0]
    assert index.run(1, blocks(3), 0) == 0
    index.on_events(0, 2, evicted=blocks(3))
    assert index.run(0, blocks(3, 4), 0) == 0
    assert index.run(0, blocks(3, 4), 1) == 1


def test_of_a_worker_with_a_gap_nothing_is_known_until_a_snapshot_comes() -> None:
    index = index_of(2)
    assert index.on_events(0, 1, stored=blocks(1)) and index.on_events(1, 1, stored=blocks(1))
    assert not index.on_events(0, 3, stored=blocks(2))
    assert not index.on_events(0, 4, stored=blocks(3))
    assert (index.run(0, blocks(1), 0), index.run(1, blocks(1), 0)) == (0, 1)
    index.on_snapshot(0, 4, blocks(1, 2))
    assert index.on_events(0, 5, evicted=blocks(2))
    assert index.run(0, blocks(1, 2), 0) == 1
    index.on_snapshot(0, 3, blocks(1, 2))  # older than what is known
    assert index.run(0, blocks(1, 2), 0) == 1
    index.remove(0)
    assert index.run(0, blocks(1), 0) == 0 and index.on_events(0, 1, stored=blocks(1))


def test_the_folder_of_many_workers_takes_one_entry_a_block_and_a_full_index_says_too_little() -> None:
    index = index_of(3, max_blocks=2)
    for worker in range(3):
        index.on_events(worker, 1, stored=blocks(1, 2, 3))
    assert len(index) == 2
    assert [index.run(worker, blocks(1, 2, 3), 0) for worker in range(3)] == [2, 2, 2]
    for worker in range(3):
        index.on_events(worker, 2, stored=blocks(4), evicted=blocks(1, 3))
    assert index.run(2, blocks(2, 4), 0) == 2 and index.run(0, blocks(2, 4), 0) == 1  # 4 came when there was room


def test_a_journal_gives_the_net_of_what_happened_in_parts() -> None:
    journal = DiskJournal()
    journal.add(b"early")
    assert not journal.has_changes
    journal.is_kept = True
    for block_hash in blocks(1, 2, 3):
        journal.add(block_hash)
    journal.remove(blocks(2)[0])
    journal.remove(b"old")
    assert journal.take(1) == (blocks(1), (b"old",))
    assert journal.take(9) == (blocks(3), ())
    journal.remove(b"a")
    journal.add(b"a")
    assert not journal.has_changes


class Follower:
    """An index that follows one worker's tiers, as a router would."""

    def __init__(self, driver: TieredDriver) -> None:
        self.kv = driver.core.kv
        self.changes = TierChanges(self.kv)
        self.host, self.disk = index_of(1, 10**6), index_of(1, 10**6)

    def tell(self, events: list[Event]) -> None:
        for event in events:
            assert isinstance(event, KVEvents | KVSnapshot)
            index = self.host if event.tier == "host" else self.disk
            if isinstance(event, KVEvents):
                assert index.on_events(0, event.sequence, event.stored, event.evicted)
            else:
                index.on_snapshot(0, event.sequence, event.hashes)

    def check(self) -> None:
        self.tell(self.changes.take(0))
        assert set(self.host._masks) == set(self.kv.host.prefix_cache)
        if not self.changes.has_more:
            assert set(self.disk._masks) == set(self.kv.tiers.loads.hashes)
        assert set(self.disk._masks) <= set(self.kv.tiers.loads.hashes)


@law(weight=0.4)
@pytest.mark.parametrize("most", [7, 65_536])
def test_an_index_that_follows_a_worker_says_exactly_what_its_tiers_hold(
    seed: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_changes, "MOST_HASHES", most)
    rng = random.Random(seed)
    driver = make(seed=seed, fault_share=0.3)
    follower = Follower(driver)
    for number in range(30):
        if rng.random() < 0.7:
            driver.add(
                f"r{number}", prompt(rng.randrange(8), rng.randrange(1, 20) * 16), max_tokens=rng.randrange(1, 20)
            )
        for _ in range(rng.randrange(6)):
            driver.step()
            follower.check()
        if driver.contents and rng.random() < 0.3:
            driver.lose(rng.choice(sorted(driver.contents)))
        if rng.random() < 0.1:
            follower.tell(follower.changes.snapshot(0))
        follower.check()
    driver.run()
    while follower.changes.has_more:
        follower.check()
    follower.check()
    assert len(follower.disk) and len(follower.host)
