"""Block copies between the tiers move exactly the blocks they name, and memory is counted right."""

import pytest
import torch

from diptych.control.errors import ConfigError
from diptych.runtime.attention import make_attention
from diptych.runtime.attention.attention_backend import AttentionShape
from diptych.runtime.kv_tensors import KVTensors, geometry_of

SHAPE = AttentionShape(4, 2, 16, 32, torch.bfloat16, 0.25)


def test_blocks_survive_the_way_to_the_host_and_back() -> None:
    backend = make_attention(SHAPE, torch.device("cpu"))
    kv = KVTensors(backend, num_layers=2, num_blocks=6, num_host_blocks=3)
    for layer in kv.layers:
        for cache in layer:
            cache.normal_()
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


def test_bytes_per_block_is_what_a_block_takes() -> None:
    kv = KVTensors(make_attention(SHAPE, torch.device("cpu")), num_layers=3, num_blocks=5)
    total = sum(cache.nbytes for layer in kv.layers for cache in layer)
    geometry = geometry_of(SHAPE, 3)
    size = geometry.block_bytes
    assert total == 5 * size
    assert geometry.blocks_within(5 * size + size - 1) == 5
    with pytest.raises(ConfigError, match=f"kv_bytes is 5; one block of this model takes {size}"):
        geometry.blocks_within(5)
