"""The memory of the KV cache: one pair of tensors per layer and tier, and block copies between the tiers.

Knows blocks only by number; who holds which block is decided in control.
"""

from collections.abc import Sequence

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.attention.interface import AttentionBackend, AttentionShape

LayerCache = tuple[torch.Tensor, torch.Tensor]  # k_cache, v_cache: block i is [i] of each, in the backend's layout


def bytes_per_block(shape: AttentionShape, num_layers: int) -> int:
    """Bytes of one block over all layers, K and V."""
    return 2 * num_layers * shape.block_size * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize


def blocks_within(kv_bytes: int, shape: AttentionShape, num_layers: int) -> int:
    """How many blocks fit in ``kv_bytes``. Raises ConfigError when not even one does."""
    size = bytes_per_block(shape, num_layers)
    if kv_bytes < size:
        raise ConfigError(f"kv_bytes is {kv_bytes}; one block of this model takes {size}", param="kv_bytes")
    return kv_bytes // size


class KVTensors:
    """All layers' caches on the device, and the host tier beside them (the source of swapped requests)."""

    def __init__(self, backend: AttentionBackend, num_layers: int, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.layers: list[LayerCache] = [backend.allocate(num_blocks) for _ in range(num_layers)]
        self._host: list[LayerCache] = [
            (self._host_twin(k, num_host_blocks), self._host_twin(v, num_host_blocks)) for k, v in self.layers
        ]

    def copy_to_host(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs."""
        for source, target in zip(self.layers, self._host, strict=True):
            self._copy(source, target, pairs)

    def copy_from_host(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host block, device block) pairs."""
        for source, target in zip(self._host, self.layers, strict=True):
            self._copy(source, target, pairs)

    def _host_twin(self, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
        pinned = cache.device.type == "cuda"
        return torch.zeros((num_blocks, *cache.shape[1:]), dtype=cache.dtype, pin_memory=pinned)

    def _copy(self, source: LayerCache, target: LayerCache, pairs: Sequence[tuple[int, int]]) -> None:
        origin = torch.tensor([pair[0] for pair in pairs], device=source[0].device)
        destination = torch.tensor([pair[1] for pair in pairs], device=target[0].device)
        for from_cache, to_cache in zip(source, target, strict=True):
            to_cache[destination] = from_cache[origin].to(to_cache.device)
