"""Blocks, hashes, demand."""

import random

import pytest

from diptych.control.engine.kvcache.block_pool import BlockPool
from diptych.control.engine.kvcache.demand import future_peak_blocks
from diptych.control.engine.kvcache.prefix_cache import hash_block, hash_blocks, root_hash


def test_a_hash_covers_everything_before_it_and_the_tenant() -> None:
    first = hash_blocks(list(range(64)), 16)
    second = hash_blocks([999, *range(1, 64)], 16)
    assert [len(block_hash) for block_hash in first] == [16] * 4
    assert not set(first) & set(second)
    assert not set(first) & set(hash_blocks(list(range(64)), 16, salt="tenant"))
    assert root_hash("") != root_hash(None)


def test_hashing_block_by_block_gives_the_same_chain() -> None:
    tokens = [random.Random(5).randrange(200_000) for _ in range(70)]
    parent = root_hash("x")
    chain = []
    for start in range(0, 64, 16):
        parent = hash_block(parent, tokens[start : start + 16])
        chain.append(parent)
    assert tuple(chain) == hash_blocks(tokens, 16, "x")


def test_the_least_recently_released_block_is_evicted_first_and_tails_before_prefixes() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for index, block in enumerate(blocks):
        pool.remember(bytes([index]) * 16, block)
    pool.drain_changes()
    pool.release(blocks[2:])
    pool.release(blocks[:2])
    assert pool.allocate(3) == [blocks[3], blocks[2], blocks[1]]
    assert pool.drain_changes()[1] == (b"\x03" * 16, b"\x02" * 16, b"\x01" * 16)
    pool.check()


def test_free_blocks_are_given_out_in_order_and_those_released_last_come_first() -> None:
    pool = BlockPool(6, first_block=7)
    first = pool.allocate(3)
    assert first == [7, 8, 9]
    pool.release(first)
    assert pool.allocate(2) == [7, 8]
    assert [pool.take_one() for _ in range(4)] == [9, 10, 11, 12]
    assert pool.take_one() is None and pool.num_available == 0
    pool.check()


def test_a_shared_block_lives_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    block = pool.allocate(1)
    pool.remember(b"h" * 16, block[0])
    pool.share(block)
    pool.release(block)
    assert pool.num_used == 1
    pool.release(block)
    assert pool.num_used == 0
    assert pool.prefix_cache.longest_prefix([b"h" * 16]) == block


def test_equal_content_is_registered_once() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.remember(b"h" * 16, first)
    assert pool.drain_changes() == ((b"h" * 16,), ())
    pool.remember(b"h" * 16, second)
    assert pool.prefix_cache.get(b"h" * 16) == first
    assert pool.drain_changes() == ((), ())
    pool.release([second])
    pool.check()


def test_the_future_peak_is_that_of_a_simulation() -> None:
    rng = random.Random(6)
    for _ in range(50):
        demands = [(rng.randrange(1, 20), rng.randrange(0, 60)) for _ in range(rng.randrange(1, 12))]
        simulated = max(
            sum(blocks + -(-step // 4) for blocks, remaining in demands if remaining >= step) for step in range(61)
        )
        assert future_peak_blocks(demands, 4) == simulated


def test_releasing_twice_is_caught() -> None:
    pool = BlockPool(1)
    block = pool.allocate(1)
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


def test_a_block_that_came_and_went_between_two_publications_is_never_heard_of() -> None:
    pool = BlockPool(2)
    (first, second) = pool.allocate(2)
    pool.remember(b"a", first)
    assert pool.drain_changes() == ((b"a",), ())
    pool.remember(b"b", second)
    pool.release([second])
    pool.release([first])
    pool.allocate(1)  # takes the block of "b", which was released first
    assert pool.drain_changes() == ((), ())
    pool.allocate(1)
    assert pool.drain_changes() == ((), (b"a",))
