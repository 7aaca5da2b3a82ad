"""Dealing layers into groups: each layer has one place, and little memory is lost against a group for each layer."""

import random

import pytest

from diptych.control.kv_layout import GroupKind
from diptych.control.page_groups import MOST_EMPTY, MOST_MEMORY, REFERENCE_TOKENS
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.kv_cache.layer_groups import LayerGroups, deal
from diptych.runtime.models.model_config import AttentionConfig, LayerAttention
from tests.laws import law

FULL = LayerAttention(1.0)


def windowed(window: int) -> LayerAttention:
    return LayerAttention(1.0, window)


def every(count: int, num_layers: int, window: int) -> list[LayerAttention]:
    """Layers of which the last of every ``count`` attends to everything."""
    return [FULL if layer % count == count - 1 else windowed(window) for layer in range(num_layers)]


def size_of(dealt: LayerGroups, num_tokens: int) -> int:
    """What a sequence takes, in places."""
    return dealt.num_places * sum(group.peak_pages(num_tokens, 1) for group in dealt.groups)


@pytest.mark.parametrize(
    ("layers", "num_groups", "num_places"),
    [
        (every(6, 34, 1024), 7, 5),  # Gemma 3 4B: 5 attend to everything, 29 do not
        (every(2, 24, 128), 2, 12),  # gpt-oss 20B
        (every(2, 26, 4096), 2, 13),  # Gemma 2 2B
        (every(4, 32, 4096), 4, 8),  # OLMo 3 7B
        ([windowed(4096)] * 32, 1, 32),  # Mistral 7B v0.1
        ([FULL] * 28, 1, 28),
    ],
)
def test_layers_of_models_that_people_run(layers: list[LayerAttention], num_groups: int, num_places: int) -> None:
    dealt = deal(layers, 32, 131_072)
    assert (len(dealt.groups), dealt.num_places) == (num_groups, num_places)
    assert dealt.is_dense == (len(set(layers)) == 1 and layers[0] == FULL) and not dealt.note


def test_a_model_without_windows_is_laid_out_as_one_that_is_not_dealt() -> None:
    assert deal([FULL] * 5, 16, 4096) == LayerGroups.dense(5, 16)


def test_a_window_that_holds_the_longest_sequence_is_none() -> None:
    assert deal(every(6, 34, 1024), 32, 1024).is_dense
    assert not deal(every(6, 34, 1024), 32, 1025).is_dense


def test_what_stays_empty_is_said() -> None:
    dealt = deal([FULL, FULL, windowed(32)], 32, 131_072)
    assert (len(dealt.groups), dealt.num_places) == (2, 2)
    assert dealt.note == "25% of the KV cache stays empty, as layers of different windows are 2 groups of 2"


def test_a_block_takes_the_memory_of_its_places() -> None:
    layers = every(6, 34, 1024)
    config = AttentionConfig(8, 4, 256, tuple(layers))
    dense = KVGeometry.of(config, 32, "bfloat16")
    dealt = KVGeometry.of(config, 32, "bfloat16", deal(layers, 32, 131_072))
    assert dense.block_bytes == 34 * 2 * dense.tensor_block_bytes
    assert dealt.block_bytes == 5 * 2 * dense.tensor_block_bytes
    assert dealt.pool_bytes(100) == 10 * dealt.region_bytes(100)


@law(weight=0.2)
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_kind(seed: int) -> None:
    rng = random.Random(seed)
    windows = [0, *rng.sample((1, 40, 128, 512, 1024, 4096), rng.randrange(4))]
    layers = [LayerAttention(rng.choice((0.5, 1.0)), rng.choice(windows) or None) for _ in range(rng.randrange(1, 70))]
    block_size, max_tokens = rng.choice((8, 16, 32)), rng.choice((64, 4096, 131_072))
    dealt = deal(layers, block_size, max_tokens)
    assert len(set(dealt.place_of)) == len(layers)
    for how, (group, place) in zip(layers, dealt.place_of, strict=True):
        found = dealt.groups[group]
        window = how.window if how.window and how.window < max_tokens else None
        assert found.kind is (GroupKind.WINDOW if window else GroupKind.FULL) and found.window_tokens == (window or 0)
        assert 0 <= place < dealt.num_places and found.tokens_per_page == block_size
    assert dealt.empty_share <= MOST_EMPTY
    length = min(max_tokens, REFERENCE_TOKENS)
    alone = sum(
        deal([how], block_size, max_tokens).groups[0].peak_pages(length, 1) for how in layers
    )  # a group for each
    assert alone <= size_of(dealt, length) <= MOST_MEMORY * alone
