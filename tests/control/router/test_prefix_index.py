"""Who holds which blocks: events, gaps, snapshots, predictions."""

import random

from diptych.control.router.prefix_index import PERIOD_NS, PrefixIndex
from tests.laws import law


def blocks(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(4, "little") for number in numbers)


def test_a_worker_matches_as_far_as_it_holds_the_beginning() -> None:
    index = PrefixIndex(3)
    index.on_events(0, 1, stored=blocks(1, 2, 3))
    index.on_events(1, 1, stored=blocks(1, 3))
    assert index.matches(blocks(1, 2, 3, 4), now=0) == [3, 1, 0]
    index.on_events(0, 2, evicted=blocks(2))
    assert index.matches(blocks(1, 2, 3, 4), now=0) == [1, 1, 0]


def test_a_gap_is_noticed_and_a_snapshot_heals_it() -> None:
    index = PrefixIndex(1)
    index.on_events(0, 1, stored=blocks(1))
    assert not index.on_events(0, 3, stored=blocks(3))
    assert index.matches(blocks(1), now=0) == [0]
    assert not index.on_events(0, 4, stored=blocks(4))
    index.on_snapshot(0, 5, blocks(1, 2))
    assert index.matches(blocks(1, 2), now=0) == [2]
    assert index.on_events(0, 6, evicted=blocks(1))


def test_a_worker_that_comes_back_begins_with_its_first_event_whatever_was_missing_before() -> None:
    index = PrefixIndex(2)
    assert not index.on_events(0, 2, stored=blocks(1))
    index.predict(0, blocks(5, 6), now=0)
    index.remove(0)
    assert index.matches(blocks(5, 6), now=0) == [0, 0]
    assert index.on_events(0, 1, stored=blocks(1))
    assert index.matches(blocks(1), now=0) == [1, 0]


def test_what_was_heard_twice_counts_once() -> None:
    index = PrefixIndex(1)
    index.on_events(0, 1, stored=blocks(1))
    index.on_events(0, 2, evicted=blocks(1))
    assert index.on_events(0, 1, stored=blocks(1))
    assert index.matches(blocks(1), now=0) == [0]


def test_a_dispatched_prompt_counts_until_it_is_confirmed_or_expires() -> None:
    index = PrefixIndex(2)
    index.predict(1, blocks(1, 2), now=0)
    assert index.matches(blocks(1, 2), now=PERIOD_NS) == [0, 2]
    index.on_events(1, 1, stored=blocks(1))
    assert index.matches(blocks(1, 2), now=2 * PERIOD_NS) == [0, 1]
    index.predict(1, blocks(1, 2), now=2 * PERIOD_NS)
    index.on_events(1, 2, evicted=blocks(1))
    assert index.matches(blocks(1, 2), now=2 * PERIOD_NS) == [0, 0]


def test_predictions_that_follow_each_other_are_one_prefix() -> None:
    index = PrefixIndex(2)
    index.predict(1, blocks(1, 2, 3), now=0)
    index.predict(1, blocks(14, 15), now=0)  # after 1, 2
    assert index.matches(blocks(1, 2, 14, 15, 16), now=0) == [0, 4]
    index.predict(0, blocks(1, 2, 3, 4), now=0)
    index.on_events(0, 1, stored=blocks(1, 2))  # while 3 and 4 are still to be computed
    assert index.matches(blocks(1, 2, 3, 4, 5), now=0) == [4, 3]
    index.on_events(0, 2, evicted=blocks(3))
    assert index.matches(blocks(1, 2, 3, 4, 5), now=0) == [2, 3]


@law(weight=0.2)
def test_the_index_is_the_union_of_what_each_worker_says(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(4)
    held: list[set[int]] = [set() for _ in range(4)]
    sequence = [0] * 4
    for now in range(300):
        worker = rng.randrange(4)
        if rng.random() < 0.02:
            index.remove(worker)
            held[worker].clear()
            sequence[worker] = 0
            continue
        new, old = set(rng.sample(range(30), 4)), set(rng.sample(sorted(held[worker]), len(held[worker]) // 3))
        held[worker] = (held[worker] - old) | new
        sequence[worker] += 1
        index.on_events(worker, sequence[worker], blocks(*new), blocks(*old))
        index.check()
        prompt = rng.sample(range(30), 6)
        expected = [next((i for i, one in enumerate(prompt) if one not in mine), 6) for mine in held]
        assert index.matches(blocks(*prompt), now) == expected


@law(weight=0.2)
def test_of_a_worker_that_says_boundaries_alone_the_deepest_counts(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(4)
    sparse = {worker for worker in range(4) if rng.random() < 0.5}
    for worker in sparse:
        index.set_boundaries(worker, only=True)
    held: list[set[int]] = [set() for _ in range(4)]
    for sequence in range(1, 60):
        for worker in range(4):
            new, old = set(rng.sample(range(30), 3)), set(rng.sample(sorted(held[worker]), len(held[worker]) // 3))
            held[worker] = (held[worker] - old) | new
            index.on_events(worker, sequence, blocks(*new), blocks(*old))
        prompt = rng.sample(range(30), 6)
        found = index.matches(blocks(*prompt), sequence)
        for worker, mine in enumerate(held):
            run = next((i for i, one in enumerate(prompt) if one not in mine), 6)
            deepest = max((i + 1 for i, one in enumerate(prompt) if one in mine), default=0)
            assert found[worker] == (deepest if worker in sparse else run)


def test_a_worker_that_comes_back_without_windows_says_blocks_again() -> None:
    index = PrefixIndex(1)
    index.set_boundaries(0, only=True)
    index.on_events(0, 1, stored=blocks(3))
    assert index.matches(blocks(1, 2, 3, 4), now=0) == [3]
    index.remove(0)
    index.set_boundaries(0, only=False)
    index.on_events(0, 1, stored=blocks(3))
    assert index.matches(blocks(1, 2, 3, 4), now=0) == [0]


def test_behind_a_boundary_what_was_just_sent_counts() -> None:
    index = PrefixIndex(2)
    index.set_boundaries(1, only=True)
    index.on_events(1, 1, stored=blocks(2))
    index.predict(1, blocks(3, 4), now=0)
    assert index.matches(blocks(1, 2, 3, 4, 5), now=0) == [0, 4]
