"""Prompts of models with windows, computed on one worker and answered on another: only what is still read when the
prompt ends goes over, and nothing that is read is ever another's."""

import random
from dataclasses import replace

import pytest

from diptych.control.config import (
    BudgetConfig,
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    TierConfig,
    shape_preset,
)
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.outgoing import Outgoing
from diptych.control.errors import ContextLengthError
from diptych.control.events import HandoffReserved
from diptych.control.kv_layout import GroupKind, KVGroup, KVLayout
from diptych.control.request import NO_BLOCK, FinishReason, Request
from diptych.control.router.topology import LinkCost, LinkCosts
from diptych.control.step import ScheduledPrefill
from tests.control.driver import expect_answers
from tests.control.handoff_pair import HandoffPair
from tests.control.test_conservation import random_config
from tests.control.test_windows import answered, tokens_of, with_windows
from tests.laws import law

WINDOW = GroupKind.WINDOW
GROUPS = (KVGroup(16), *[KVGroup(16, WINDOW, 64)] * 5)


def random_pair(rng: random.Random) -> HandoffPair:
    """Two workers of one model, with policies of their own, and memory that is small enough to hurt."""
    first = with_windows(random_config(rng), rng)
    other = random_config(rng)
    if rng.random() < 0.4:  # what is evicted goes to the host, and comes up before blocks are lent
        tiers = TierConfig(rng.choice((0, 1000)), clean_blocks=rng.choice((8, 64)))
        first = replace(first, cache=replace(first.cache, num_host_blocks=200, tiers=tiers))
    cache = replace(first.cache, num_blocks=first.cache.num_blocks + rng.choice((0, 0, 40)))
    second = replace(first, scheduler=other.scheduler, cache=cache)
    if rng.random() < 0.2:  # all layers alike
        first, second = [replace(config, cache=replace(config.cache, groups=())) for config in (first, second)]
    pair = HandoffPair((first, second), rng, borrows=rng.random() < 0.5)
    if rng.random() < 0.4:
        for core in pair.cores:
            expect_answers(core.engine, 1)
    return pair


def run_pair(rng: random.Random) -> HandoffPair:
    """Random requests, which share beginnings, from one worker to the other or on one, and clients that leave."""
    pair = random_pair(rng)
    roots = [tokens_of(rng.randrange(1, 60), number) for number in range(3)]
    one_way = rng.random() < 0.6  # else a cluster would have to forbid circles
    for number in range(rng.choice((3, 12, 25))):
        prompt = (rng.choice(roots)[: rng.randrange(1, 60)] if rng.random() < 0.6 else []) + tokens_of(
            rng.randrange(1, 30), rng.randrange(4) if rng.random() < 0.5 else 100 + number
        )
        prefill, decode = rng.choice(((0, 1), (0, 1), (1, 1), (0, 0))) if one_way else rng.choice(((0, 1), (1, 1)))
        pair.start(f"r{number}", prompt, rng.choice((1, 2, 7, 30)), prefill, decode)
        for _ in range(rng.choice((0, 1, 6, 20))):
            pair.step(rng.randrange(2))
            if rng.random() < 0.6:
                pair.carry()
        if rng.random() < 0.15:
            pair.drop(f"r{rng.randrange(number + 1)}")
    pair.run()
    return pair


@law(weight=1.5)
def test_what_is_handed_over_is_whole_and_nothing_is_lost_whatever_happens(seed: int) -> None:
    pair = run_pair(random.Random(seed))
    for name, attempt in pair.attempts.items():
        assert attempt.end is not None or attempt.is_closing, name
        if attempt.end and attempt.end.reason is FinishReason.LENGTH:
            room = pair.cores[attempt.decode].engine.config.max_model_len - len(attempt.prompt)
            assert attempt.end.latency.num_output_tokens == min(attempt.max_tokens, room)


def pair_of(*, borrows: bool, num_blocks: int = 400, window_chunk: int = 64) -> HandoffPair:
    """One layer in six attends to everything, the others to 64 tokens."""
    cache = CacheConfig(num_blocks, 16, watermark_blocks=0, groups=GROUPS, window_chunk=window_chunk)
    config = EngineConfig(cache, shape_preset("chunked"), max_model_len=4000)
    return HandoffPair((config, config), random.Random(1), borrows=borrows)


@pytest.mark.parametrize("borrows", [False, True])
def test_a_prompt_that_fits_into_neither_memory_in_full_is_handed_over(borrows: bool) -> None:
    pair = pair_of(borrows=borrows, num_blocks=63 + 5 * 9)
    prompt = tokens_of(900, 1)
    attempt = pair.start("r", prompt, 60, 0, 1)
    pair.run()
    assert attempt.end is not None and attempt.end.reason is FinishReason.LENGTH
    assert attempt.end.latency.num_output_tokens == 60
    first = GROUPS[1].first_live(896) * 16
    assert attempt.rows == (0 if borrows else 900 + 5 * (900 - first))


@pytest.mark.parametrize("borrows", [False, True])
def test_the_decode_worker_finds_the_prompt_and_the_conversation_again(borrows: bool) -> None:
    pair = pair_of(borrows=borrows)
    prompt = tokens_of(500, 1)
    pair.start("first", prompt, 40, 0, 1)
    pair.run()
    again = pair.start("again", prompt, 40, 0, 1)
    pair.run()
    assert again.num_cached == 496 and pair.attempts["first"].num_cached == 0
    answer = list(prompt)
    for _ in range(40):
        answer.append((answer[-1] * 31 + answer[0] * 7 + len(answer)) % 997)
    following = pair.start("next turn", [*answer, *tokens_of(300, 2)], 8, 0, 1)
    pair.run()
    assert following.num_cached == 528
    assert following.end is not None and following.end.reason is FinishReason.LENGTH


def test_blocks_of_a_hit_that_windows_will_leave_are_lent_and_no_others() -> None:
    pair = pair_of(borrows=True)
    prompt = tokens_of(320, 1)
    pair.start("first", prompt, 8, 0, 1)
    pair.run()
    longer = prompt + tokens_of(400, 2)
    pair.start("longer", longer, 8, 0, 1)
    while "longer" not in pair.cores[0].engine.requests:
        pair.step(1)
    request, held = pair.cores[0].engine.requests["longer"], pair.cores[1].engine.requests["longer"]
    tables, hit, end = request.remote_block_tables, 20, 45
    assert request.num_remote_tokens == hit * 16
    handed_over = GROUPS[1].first_live(704)
    first = GROUPS[1].first_live(320)
    assert len(tables[0]) == end
    for window in tables[1:]:
        assert len(window) == end - first
        assert all(block != NO_BLOCK for block in window[: hit - first])
        assert set(window[hit - first : handed_over - first]) == {NO_BLOCK}
        assert all(block != NO_BLOCK for block in window[handed_over - first :])
    assert sum(map(len, held.lent_tables)) == 5 * (hit - first)
    pair.run()
    assert pair.attempts["longer"].end is not None


@pytest.mark.parametrize("borrows", [False, True])
@pytest.mark.parametrize("num_known", [0, 200])
def test_a_stream_that_moves_takes_what_its_worker_has_along(borrows: bool, num_known: int) -> None:
    """It was served whole on one worker, and goes on at another, which may know how it began."""
    pair = pair_of(borrows=borrows)
    prompt = tokens_of(500, 1)
    if num_known:
        pair.start("beginning", prompt[:num_known], 2, 1, 1)
        pair.run()
    pair.start("stream", prompt, 100, 0, 0)
    pair.run()
    moved = answered(prompt, 60)
    attempt = pair.start("stream~1", moved, 40, 0, 1)
    pair.run()
    assert attempt.end is not None and attempt.end.reason is FinishReason.LENGTH
    assert pair.admitted()["stream~1"] == 496
    again = pair.start("again", moved, 2, 1, 1)
    pair.run()
    assert again.end is not None and pair.admitted()["again"] == 544


@pytest.mark.parametrize("extra", [0, 100, 300])
def test_what_the_host_of_the_decode_worker_holds_is_there_before_it_lends_its_blocks(extra: int) -> None:
    """The windows of what is cached among it, also where the prompt's own end lies far behind."""
    groups = (KVGroup(16), *[KVGroup(16, WINDOW, 48)] * 2)
    tiers = TierConfig(50_000, clean_blocks=48)
    cache = CacheConfig(110, 16, 300, watermark_blocks=1, tiers=tiers, groups=groups, window_chunk=64)
    scheduler = SchedulerConfig(budget=BudgetConfig("fixed", 256), max_num_seqs=8)
    config = EngineConfig(cache, scheduler, max_model_len=900)
    pair = HandoffPair((config, config), random.Random(1), borrows=True)
    for number in range(6):
        pair.start(f"first {number}", tokens_of(320, number), 8, 1, 1)
        pair.run()
    attempt = pair.start("again", tokens_of(320, 1) + tokens_of(extra, 9), 8, 0, 1)
    pair.run()
    (event,) = [event for event in pair.log if isinstance(event, HandoffReserved)]
    assert event.num_cached_tokens == attempt.num_cached == (320 if extra else 304)
    assert event.num_tier_tokens > 0
    assert attempt.end is not None and attempt.end.reason is FinishReason.LENGTH


def test_what_windows_leave_is_free_while_the_kv_is_on_its_way() -> None:
    pair = pair_of(borrows=False)
    pair.start("r", tokens_of(500, 1), 8, 0, 1)
    while pair.step(0) or pair.step(1):
        pass  # and nothing is carried
    request = pair.cores[0].engine.requests["r"]
    kept = -(-500 // 16) - GROUPS[1].first_live(496)
    assert request.num_blocks == -(-500 // 16) + 5 * kept
    pair.run()


def test_a_prompt_whose_windows_do_not_fit_beside_the_borrowed_blocks_is_refused_by_name() -> None:
    cache = CacheConfig(30, 16, watermark_blocks=0, groups=GROUPS, window_chunk=64)
    core = EngineCore(EngineConfig(cache, shape_preset("chunked"), max_model_len=4000))
    request = Request("r", 900, 8)
    request.hands_off = True
    request.remote_block_tables = ((*range(100, 157),), *[(NO_BLOCK,) * 57] * 5)
    words = "windows of a prompt of 900 tokens take 45 blocks; the KV cache has 30"
    with pytest.raises(ContextLengthError, match=words):
        core.check_request(request)


def test_chunks_leave_out_what_windows_will_have_left() -> None:
    layout = KVLayout((KVGroup(16), KVGroup(16, WINDOW, 40)))
    outgoing = Outgoing(layout)
    outgoing.begin("a", 16, 200)
    tables = (tuple(range(13)), tuple(range(20, 33)))
    sent = []
    for start in range(0, 200, 50):
        step = [ScheduledPrefill("a", start, 50, tables, start == 150, (0, 0))]
        planned = outgoing.in_step(step)
        sent += outgoing.on_step(step)
        assert sent[-1:] == planned
    first = KVGroup(16, WINDOW, 40).first_live(192)
    assert [(chunk.start, chunk.num_tokens) for chunk in sent] == [(16, 32), (48, 48), (96, 48), (144, 56)]
    assert {chunk.first_blocks for chunk in sent} == {(0, first)}
    assert sent[-1].block_tables == (tables[0], tables[1][first:]) and sent[-1].is_last


def test_a_link_costs_what_windows_keep() -> None:
    link = LinkCost(1_000_000_000, 0)
    plain = LinkCosts(bytes_per_token=6000, chunk_tokens=512)
    windowed = replace(plain, windows=(0, 1024, 1024, 1024, 1024, 1024))
    assert [windowed.kv_bytes(count) for count in (0, 1000, 1024)] == [0, 6_000_000, 6_144_000]
    assert windowed.kv_bytes(10_240) == 10_240_000 + 5_120_000
    assert plain.kv_bytes(10_240) == 61_440_000
    assert plain.exposed_ns(link, 600, 10**9) == windowed.exposed_ns(link, 600, 10**9)
    assert windowed.exposed_ns(link, 10_240, 0) == 15_360_000 < plain.exposed_ns(link, 10_240, 0)
