"""An engine's blocks in our hashes: what is told is never more than what the engine holds."""

import random
from typing import Any

import pytest

from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.router.assumed_cache import AssumedCache
from diptych.control.router.kv_bridge import BlocksRemoved, CacheCleared, EngineBlocksStored, EngineHash, KVBridge
from diptych.control.router.kv_source import KVSource, SourceState
from tests.laws import law

TOKENS = list(range(100, 164))


def stored(tokens: list[int], size: int, names: str = "e", parent: EngineHash | None = None) -> EngineBlocksStored:
    """Blocks named e0, e1 ..."""
    hashes = [f"{names}{number}".encode() for number in range(len(tokens) // size)]
    return EngineBlocksStored(hashes, parent, tokens[: len(hashes) * size], size)


@pytest.mark.parametrize("size", [8, 16, 32, 4])
def test_blocks_of_any_size_give_our_hashes(size: int) -> None:
    bridge = KVBridge(16, 1000)
    added, gone = bridge.apply([stored(TOKENS, size)])
    assert (added, gone) == (hash_blocks(TOKENS, 16), ())


@pytest.mark.parametrize("size", [8, 16, 4])
def test_a_block_of_ours_goes_with_the_first_engine_block_that_holds_a_part_of_it(size: int) -> None:
    bridge = KVBridge(16, 1000)
    bridge.apply([stored(TOKENS, size)])
    last = f"e{len(TOKENS) // size - 1}".encode()
    assert bridge.apply([BlocksRemoved([last])]) == ((), hash_blocks(TOKENS, 16)[3:])
    assert bridge.apply([BlocksRemoved([last])]) == ((), ())


def test_a_prompt_that_is_stored_in_pieces_is_one_chain() -> None:
    bridge = KVBridge(16, 1000)
    bridge.apply([stored(TOKENS[:24], 8)])
    added, _ = bridge.apply([stored(TOKENS[24:], 8, "f", parent=b"e2")])
    assert added == hash_blocks(TOKENS, 16)[1:]


def test_a_block_without_a_known_parent_does_not_count_nor_do_its_children() -> None:
    bridge = KVBridge(16, 1000)
    assert bridge.apply([stored(TOKENS, 16, parent=b"unknown")]) == ((), ())
    assert bridge.apply([EngineBlocksStored([b"x"], None, TOKENS[:10], 16)]) == ((), ())  # fewer tokens than a block


def test_stored_and_removed_in_one_batch_is_no_change_and_clearing_is() -> None:
    bridge = KVBridge(16, 1000)
    assert bridge.apply([stored(TOKENS[:16], 16), BlocksRemoved([b"e0"])]) == ((), ())
    bridge.apply([stored(TOKENS, 16)])
    added, gone = bridge.apply([CacheCleared(), stored(TOKENS[:16], 16)])
    assert added == () and set(gone) == set(hash_blocks(TOKENS, 16)[1:])
    assert bridge.hashes == hash_blocks(TOKENS[:16], 16)


def test_batches_from_number_0_are_exact_and_a_gap_is_asked_for_once() -> None:
    source = KVSource(KVBridge(16, 1000), can_replay=True)
    source.on_batch(0, [stored(TOKENS[:16], 16)])
    assert source.state is SourceState.EXACT
    change = source.on_batch(3, [])
    assert change.replay_from == 1
    assert source.on_batch(4, []).replay_from is None
    assert source.on_replayed(1, [stored(TOKENS[16:32], 16, "f", b"e0")]).stored == hash_blocks(TOKENS[:32], 16)[1:]
    source.on_replayed(2, [BlocksRemoved([b"f0"])])
    source.on_replay_end()
    assert source.state is SourceState.EXACT and source.num_gaps == 0
    assert source.on_batch(5, []).replay_from is None


def test_a_gap_that_is_not_filled_forgets_everything_until_the_cache_is_cleared() -> None:
    source = KVSource(KVBridge(16, 1000), can_replay=True)
    source.on_batch(0, [stored(TOKENS, 16)])
    source.on_batch(2, [stored(TOKENS[:16], 16, "g")])
    change = source.on_replay_end()
    assert source.state is SourceState.DEGRADED and source.num_gaps == 1
    assert set(change.evicted) == set(hash_blocks(TOKENS, 16)[1:]) and change.stored == ()
    source.on_batch(3, [CacheCleared()])
    assert source.state is SourceState.EXACT


def test_a_number_that_falls_is_another_life_of_the_engine() -> None:
    source = KVSource(KVBridge(16, 1000), can_replay=False)
    source.on_batch(0, [stored(TOKENS, 16)])
    source.on_batch(1, [])
    change = source.on_batch(0, [stored(TOKENS[:16], 16)])
    assert source.num_restarts == 1 and source.state is SourceState.EXACT
    assert source.bridge.hashes == hash_blocks(TOKENS[:16], 16)
    assert set(change.evicted) == set(hash_blocks(TOKENS, 16)[1:]) and change.stored == ()


def test_a_source_that_begins_in_the_middle_is_degraded_without_a_replay_and_exact_with_one() -> None:
    for can_replay in (False, True):
        source = KVSource(KVBridge(16, 1000), can_replay=can_replay)
        source.on_connected()
        if can_replay:
            source.on_replayed(0, [stored(TOKENS[:16], 16)])
            source.on_replay_end()
        source.on_batch(1, [stored(TOKENS[:16], 16, "f")])
        assert source.state is (SourceState.EXACT if can_replay else SourceState.DEGRADED)


@pytest.mark.parametrize("can_replay", [True, False])
def test_a_batch_that_cannot_be_read_is_a_gap_that_is_not_asked_for(can_replay: bool) -> None:
    source = KVSource(KVBridge(16, 1000), can_replay=can_replay)
    source.on_batch(0, [stored(TOKENS, 16)])
    change = source.on_batch(1, None)
    assert (set(change.evicted), change.replay_from) == (set(hash_blocks(TOKENS, 16)), None)
    assert (source.state, source.num_gaps) == (SourceState.DEGRADED, 1)
    assert source.on_batch(2, [stored(TOKENS[:16], 16, "f")]).stored == hash_blocks(TOKENS[:16], 16)
    assert (source.num_gaps, source.on_connected().replay_from) == (1, 3 if can_replay else None)


def test_a_batch_that_cannot_be_read_is_skipped_in_a_replay_and_behind_one() -> None:
    source = KVSource(KVBridge(16, 1000), can_replay=True)
    assert source.on_connected().replay_from == 0
    source.on_replayed(0, None)
    assert source.state is SourceState.DEGRADED  # also the first one: it may have stored what is not known
    assert source.on_replayed(1, [stored(TOKENS, 16)]).stored == hash_blocks(TOKENS, 16)
    source.on_replayed(1, None)  # it was there already
    assert source.on_replay_end().evicted == () and source.num_gaps == 1
    assert source.on_batch(3, None).replay_from == 2
    source.on_replayed(2, [])
    assert set(source.on_replay_end().evicted) == set(hash_blocks(TOKENS, 16))
    assert (source.state, source.num_gaps, source.on_batch(4, []).replay_from) == (SourceState.DEGRADED, 2, None)


def test_more_blocks_than_the_engine_has_are_not_believed() -> None:
    source = KVSource(KVBridge(16, 2), can_replay=False)
    source.on_batch(0, [stored(TOKENS[:32], 16)])
    change = source.on_batch(1, [stored(TOKENS, 16, "f")])
    assert len(source.bridge) == 0 and source.state is SourceState.DEGRADED
    assert set(change.evicted) == set(hash_blocks(TOKENS[:32], 16)) and change.stored == ()


class RandomEngine:
    """An engine's cache and its publisher, and what each batch left in the cache."""

    def __init__(self, rng: random.Random, size: int) -> None:
        self.rng, self.size = rng, size
        self.life = 0
        self.restart()

    def restart(self) -> None:
        self.life += 1
        self.blocks: dict[bytes, tuple[int, ...]] = {}  # name -> all tokens up to its end
        self.batches: list[list[object]] = []
        self.truth: list[frozenset[bytes]] = []

    def step(self) -> None:
        """Publish one batch."""
        rng, events = self.rng, []
        for _ in range(rng.randint(1, 3)):
            if self.blocks and rng.random() < 0.3:
                leaves = [name for name, tokens in self.blocks.items() if not self._has_child(tokens)]
                name = rng.choice(leaves)
                del self.blocks[name]
                events.append(BlocksRemoved([name]))
            elif rng.random() < 0.02:
                self.blocks.clear()
                events.append(CacheCleared())
            else:
                events += self._grow()
        self.batches.append(events)
        self.truth.append(frozenset(self.blocks.values()))

    def _has_child(self, tokens: tuple[int, ...]) -> bool:
        return any(len(other) > len(tokens) and other[: len(tokens)] == tokens for other in self.blocks.values())

    def _grow(self) -> list[object]:
        name = self.rng.choice([None, *self.blocks])
        tokens = self.blocks[name] if name else ()
        new = tokens + tuple(self.rng.randint(0, 1) for _ in range(self.size))
        if new in self.blocks.values():
            return []
        own = f"{self.life}/{len(self.batches)}/{self.rng.random()}".encode()
        self.blocks[own] = new
        return [EngineBlocksStored([own], name, list(new[len(tokens) :]), self.size)]


@law(weight=0.5)
def test_through_gaps_restarts_and_replays_nothing_is_believed_that_the_engine_does_not_hold(seed: int) -> None:
    """And what is EXACT is all that it holds. What the router was told is what the source knows."""
    rng = random.Random(seed)
    size, ours = rng.choice([(4, 4), (4, 8), (8, 4)])
    engine, can_replay = RandomEngine(rng, size), rng.random() < 0.7
    source = KVSource(KVBridge(ours, 10_000), can_replay=can_replay)
    told: set[bytes] = set()
    kept = rng.choice([3, 10, 1000])  # batches that the engine repeats
    unreadable: set[tuple[int, int]] = set()

    def batch_of(number: int) -> Any:
        return None if (engine.life, number) in unreadable else engine.batches[number]

    def take(change: object) -> None:
        told.difference_update(change.evicted)  # type: ignore[attr-defined]
        told.update(change.stored)  # type: ignore[attr-defined]
        if change.replay_from is not None:  # type: ignore[attr-defined]
            first = max(change.replay_from, len(engine.batches) - kept)  # type: ignore[attr-defined]
            if rng.random() < 0.9:
                for number in range(first, len(engine.batches)):
                    take(source.on_replayed(number, batch_of(number)))
            take(source.on_replay_end())

    take(source.on_connected())
    for _ in range(120):
        if rng.random() < 0.03:
            engine.restart()
            take(source.on_lost())
            take(source.on_connected())
        engine.step()
        if rng.random() < 0.1:
            continue  # lost on its way
        number = len(engine.batches) - 1
        if rng.random() < 0.02:
            unreadable.add((engine.life, number))
        take(source.on_batch(number, batch_of(number)))
        assert told == set(source.bridge.hashes)
        held = {block for tokens in engine.truth[number] for block in hash_blocks(tokens, ours)}
        if size >= ours:
            whole = held
        else:
            whole = {hash_blocks(tokens, ours)[-1] for tokens in engine.truth[number] if len(tokens) % ours == 0}
        assert told <= held
        if source.state is SourceState.EXACT:
            assert told == whole


def test_what_is_assumed_is_bounded_and_forgotten_in_time() -> None:
    cache = AssumedCache(3, 100)
    first, second = (b"a", b"b"), (b"a", b"c", b"d")
    assert cache.on_computed(first, 0) == ((b"a", b"b"), ())
    assert cache.on_computed(second, 10) == ((b"c", b"d"), (b"b",))  # the oldest has to go
    assert len(cache) == 3 and set(cache.hashes) == {b"a", b"c", b"d"}
    assert set(cache.expire(110)) == {b"a", b"c", b"d"} and len(cache) == 0
    assert cache.on_computed((b"1", b"2", b"3", b"4"), 200)[0] == (b"1", b"2", b"3")  # longer than the cache
