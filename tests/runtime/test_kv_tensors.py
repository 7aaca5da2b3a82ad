"""Block copies between the tiers move exactly the blocks they name, and memory is counted right."""

import pytest
import torch

from diptych.base.byte_size import size_words
from diptych.control.errors import ConfigError
from diptych.runtime.attention import make_attention
from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.kv_cache.kv_tensors import KVTensors
from diptych.runtime.models.model_config import AttentionConfig, LayerAttention


def make_backend(num_layers: int, kv_dtype: str = "auto") -> AttentionBackend:
    """2 heads of 16 values, blocks of 32 tokens."""
    config = AttentionConfig(4, 2, 16, (LayerAttention(0.25),) * num_layers)
    return make_attention(config, 32, torch.bfloat16, torch.device("cpu"), kv_dtype=kv_dtype)


def fill(kv: KVTensors) -> None:
    """Random values in all blocks."""
    for layer in kv.layers:
        for cache in layer:
            cache.random_(-100, 100)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_blocks_survive_the_way_to_the_host_and_back(kv_dtype: str) -> None:
    kv = KVTensors(make_backend(2, kv_dtype), num_blocks=6, num_host_blocks=3)
    fill(kv)
    before = [[cache.clone() for cache in layer] for layer in kv.layers]
    kv.copy_to_host([(4, 0), (1, 2)])
    for layer in kv.layers:
        for cache in layer:
            cache[[1, 4]] = 0
    kv.copy_from_host([(0, 1), (2, 5)])
    for layer, old_layer in zip(kv.layers, before, strict=True):
        for cache, old in zip(layer, old_layer, strict=True):
            assert torch.equal(cache[[1, 5]], old[[4, 1]])
            assert torch.equal(cache[[0, 2, 3]], old[[0, 2, 3]])
            assert not cache[4].any()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_blocks_are_copied_within_the_memory_of_a_worker(kv_dtype: str) -> None:
    kv = KVTensors(make_backend(2, kv_dtype), num_blocks=6)
    fill(kv)
    before = [[cache.clone() for cache in layer] for layer in kv.layers]
    kv.copy_within([(4, 0), (1, 5)])
    for layer, old_layer in zip(kv.layers, before, strict=True):
        for cache, old in zip(layer, old_layer, strict=True):
            assert torch.equal(cache, old[[4, 1, 2, 3, 4, 1]])


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_bytes_per_block_is_what_a_block_takes(kv_dtype: str) -> None:
    backend = make_backend(3, kv_dtype)
    kv = KVTensors(backend, num_blocks=5)
    total = sum(cache.nbytes for layer in kv.layers for cache in layer)
    geometry = backend.geometry
    size = geometry.block_bytes
    assert total == 5 * size
    assert geometry.blocks_within(5 * size + size - 1) == 5
    with pytest.raises(
        ConfigError, match=f"kv_cache_bytes is 5 bytes; one block of this model takes {size_words(size)}"
    ):
        geometry.blocks_within(5)
