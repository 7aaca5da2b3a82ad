"""Pages of a sequence, by groups of layers."""

import random
from collections.abc import Callable

import pytest

from diptych.control.config import CacheConfig
from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.errors import ConfigError
from diptych.control.kv_layout import UNLIMITED_TOKENS, GroupKind, KVGroup, KVLayout
from diptych.control.router.topology import ANY_LENGTH, WorkerInfo
from tests.laws import law

FULL, WINDOW = GroupKind.FULL, GroupKind.WINDOW
GEMMA = KVLayout((KVGroup(16), *[KVGroup(16, WINDOW, 1024)] * 6))


def random_group(seed: int) -> KVGroup:
    rng = random.Random(seed)
    kind = rng.choice((FULL, WINDOW))
    return KVGroup(rng.choice((1, 2, 3, 8, 16)), kind, rng.randrange(1, 70) if kind is WINDOW else 0)


def read_by(group: KVGroup, position: int) -> range:
    """The tokens that the one at this position attends to."""
    first = 0 if group.kind is FULL else max(0, position - group.window_tokens + 1)
    return range(first, position + 1)


@law(weight=0.2)
def test_no_page_expires_that_a_later_token_reads_and_none_stays_that_no_token_reads(seed: int) -> None:
    group = random_group(seed)
    size = group.tokens_per_page
    for committed in range(200):
        read = {token // size for token in read_by(group, committed)}
        assert group.first_live(committed) == min(read)
        for later in range(committed, committed + 80, 7):
            assert min(read_by(group, later)) // size >= group.first_live(committed)


@law(weight=0.2)
def test_the_peak_is_that_of_a_sequence_that_grows_in_any_steps(seed: int) -> None:
    rng, group = random.Random(seed), random_group(seed)
    step_tokens, length = rng.randrange(1, 60), rng.randrange(1, 400)
    committed, most = 0, 0
    while committed < length:
        step = min(rng.randrange(1, step_tokens + 1), length - committed)
        most = max(most, group.num_pages(committed, committed + step))
        committed += step
    assert most <= group.peak_pages(length, step_tokens)
    places = [group.num_pages(begin, begin + step_tokens) for begin in range(1000, 1000 + 2 * group.tokens_per_page)]
    if group.kind is WINDOW:
        assert max(places) == group.peak_pages(10**6, step_tokens), "it is reached, not only never passed"


@law(weight=0.2)
def test_the_longest_sequence_that_fits_is_the_last_one_whose_peak_does(seed: int) -> None:
    rng = random.Random(seed)
    layout = KVLayout(tuple(random_group(rng.randrange(10**9)) for _ in range(rng.randrange(1, 4))))
    num_pages, step_tokens = rng.randrange(-1, 60), rng.randrange(1, 40)
    peaks = [layout.peak_pages(length, step_tokens) for length in range(1200)]
    assert peaks == sorted(peaks)
    longest = layout.capacity_tokens(num_pages, step_tokens)
    if longest == UNLIMITED_TOKENS:
        assert max(peaks) <= num_pages and all(group.kind is WINDOW for group in layout.groups)
    else:
        assert longest == max((length for length, peak in enumerate(peaks) if peak <= num_pages), default=-1)
    num_blocks, context = max(1, num_pages), rng.choice((1, rng.randrange(1, 1200), ANY_LENGTH))
    worker = WorkerInfo(0, "both", num_blocks, 16, max_model_len=context, groups=layout.groups)
    assert worker.max_sequence_tokens == min(context, layout.capacity_tokens(num_blocks))


def test_a_dense_model_has_blocks_and_nothing_else() -> None:
    layout = KVLayout.dense(16)
    assert layout.is_dense and not GEMMA.is_dense
    assert [layout.peak_pages(tokens) for tokens in (0, 1, 16, 17, 160)] == [0, 1, 1, 2, 10]
    assert (layout.capacity_tokens(10), layout.capacity_tokens(0)) == (160, 0)
    assert (layout.hash_tokens, layout.hit_tokens) == (16, 16)
    kv = KVCacheManager(CacheConfig(14, 16, watermark_blocks=4))
    assert kv.layout == layout and kv.capacity_tokens == 160
    assert all(kv.num_blocks_for(tokens) == layout.peak_pages(tokens) for tokens in range(200))


def test_a_model_of_windows_keeps_a_fraction_of_a_long_sequence() -> None:
    """5 layers that attend to everything and 29 to 1024 tokens, dealt into groups of 5 layers."""
    assert GEMMA.peak_pages(16_384) == 1024 + 6 * 65
    assert KVLayout((KVGroup(16),) * 7).peak_pages(16_384) == 7 * 1024
    assert GEMMA.peak_pages(100) == 7 * 7, "a short sequence lies in its windows as a whole"
    assert KVLayout((KVGroup(8), KVGroup(12, WINDOW, 64))).hit_tokens == 24


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: KVLayout(()), "groups"),
        (lambda: KVGroup(0), "tokens_per_page"),
        (lambda: KVGroup(16, WINDOW), "window_tokens"),
        (lambda: KVGroup(16, FULL, 5), "window_tokens"),
        (lambda: KVGroup(16, FULL, -5), "window_tokens"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_name(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()
