"""The router's picture of the replicas, and what it does with it."""

import random

import pytest

from diptych.control.errors import ConfigError
from diptych.control.router.load import LoadReport
from diptych.control.router.picker import PICKERS, Picker
from diptych.control.router.prefix_index import PERIOD_NS, PrefixIndex
from diptych.control.router.router import Router, RouterConfig
from diptych.control.slo import NS_PER_MS, NS_PER_S


def blocks(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(4, "little") for number in numbers)


def test_a_replica_matches_as_far_as_it_holds_the_beginning() -> None:
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
    assert index.has_gap(0)
    assert index.matches(blocks(1), now=0) == [0]
    assert not index.on_events(0, 4, stored=blocks(4))
    index.on_snapshot(0, 5, blocks(1, 2))
    assert index.matches(blocks(1, 2), now=0) == [2]
    assert index.on_events(0, 6, evicted=blocks(1))


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


@pytest.mark.parametrize("seed", range(20))
def test_the_index_is_the_union_of_what_each_replica_says(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(4)
    held: list[set[int]] = [set() for _ in range(4)]
    sequence = [0] * 4
    for now in range(300):
        replica = rng.randrange(4)
        if rng.random() < 0.02:
            index.remove(replica)
            held[replica].clear()
            sequence[replica] = 0
            continue
        new, old = set(rng.sample(range(30), 4)), set(rng.sample(sorted(held[replica]), len(held[replica]) // 3))
        held[replica] = (held[replica] - old) | new
        sequence[replica] += 1
        index.on_events(replica, sequence[replica], blocks(*new), blocks(*old))
        index.check()
        prompt = rng.sample(range(30), 6)
        expected = [next((i for i, one in enumerate(prompt) if one not in mine), 6) for mine in held]
        assert index.matches(blocks(*prompt), now) == expected


def report(time_ns: int = 0, backlog_ms: int = 0, used: int = 0) -> LoadReport:
    return LoadReport(time_ns, backlog_ms * NS_PER_MS, 1000, used, token_ns=10_000.0, pair_ns=0.0)


def router(*reports: LoadReport, **config: int) -> Router:
    made = Router(len(reports), 16, RouterConfig(**config))
    for replica, one in enumerate(reports):
        made.on_report(replica, one)
    return made


def route(made: Router, request_id: str, tokens: int, hashes: tuple[bytes, ...] = (), now: int = 0) -> int:
    decision = made.route(request_id, tokens, hashes, now)
    assert decision is not None
    return decision.replica


def test_the_shorter_queue_wins() -> None:
    assert route(router(report(backlog_ms=50), report(backlog_ms=10)), "a", 100) == 1


def test_a_cached_prompt_goes_where_it_is_cached_unless_the_queue_there_costs_more() -> None:
    hashes = blocks(*range(100))
    made = router(report(backlog_ms=5), report())
    made.index.on_events(0, 1, stored=hashes)
    assert route(made, "a", 1601, hashes) == 0  # saves 16 ms of prefill
    busy = router(report(backlog_ms=30), report())
    busy.index.on_events(0, 1, stored=hashes)
    assert route(busy, "a", 1601, hashes) == 1


def test_its_own_dispatches_count_before_anybody_reports_them() -> None:
    made = router(report(), report(), report())
    assert [route(made, str(number), 1000) for number in range(6)] == [0, 1, 2, 0, 1, 2]
    made.on_report(1, report(time_ns=5))
    assert route(made, "next", 1000, now=6) == 1


def test_a_backlog_melts_with_time() -> None:
    made = router(report(backlog_ms=50), report(backlog_ms=40))
    made.on_report(1, report(time_ns=100 * NS_PER_MS, backlog_ms=40))
    assert route(made, "a", 100, now=100 * NS_PER_MS) == 0


def test_full_memory_is_dear() -> None:
    assert route(router(report(used=950), report(used=100, backlog_ms=100)), "a", 100) == 1


def test_equal_prompts_stay_together() -> None:
    hashes = blocks(*range(100))
    made = router(report(), report())
    first = route(made, "a", 1601, hashes)
    assert route(made, "b", 1601, hashes) == first


def test_who_is_down_stale_or_too_small_gets_nothing() -> None:
    made = router(report(), report(time_ns=NS_PER_S), stale_ns=NS_PER_S)
    assert route(made, "a", 100, now=2 * NS_PER_S) == 1
    made.set_up(1, False)
    assert made.route("b", 100, (), 2 * NS_PER_S) is None
    assert router(report()).route("c", 100, (), 0, num_blocks=1001) is None


def test_wrong_predictions_are_counted() -> None:
    made = router(report())
    made.index.on_events(0, 1, stored=blocks(1, 2))
    route(made, "a", 64, blocks(1, 2))
    made.on_admitted("a", 64, 0)
    assert made.hit_error == 0.5


@pytest.mark.parametrize("kind", PICKERS)
def test_a_picker_uses_all_that_are_up_and_none_that_is_not(kind: str) -> None:
    picker = Picker(kind, 4, seed=3)  # type: ignore[arg-type]
    picker.set_up(2, False)
    picks = [picker.pick() for _ in range(60)]
    assert set(picks) == {0, 1, 3}
    for pick in picks:
        assert pick is not None
        picker.ended(pick)
    picker.set_up(2, True)
    assert 2 in [picker.pick() for _ in range(20)]
    for replica in range(4):
        picker.set_up(replica, False)
    assert picker.pick() is None


def test_impossible_routers_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 replicas"):
        Router(0, 16)
    with pytest.raises(ConfigError, match="kv_price_ns"):
        RouterConfig(kv_price_ns=-1)
    with pytest.raises(ConfigError, match="round_robin"):
        Picker("nearest", 2)  # type: ignore[arg-type]
