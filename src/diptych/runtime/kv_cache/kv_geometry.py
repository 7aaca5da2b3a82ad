"""How many bytes a KV cache takes, and where each block lies in a pool that several workers share.

Arithmetic over the shape of a model's attention. Knows no checkpoint and no family of models (checkpoint_geometry.py
does), never imports torch, never allocates.
"""

from dataclasses import dataclass

from diptych.base.byte_size import size_words
from diptych.control.errors import ConfigError
from diptych.runtime.dtypes import INT8, kv_row_bytes
from diptych.runtime.kv_cache.layer_groups import LayerGroups
from diptych.runtime.models.model_config import AttentionConfig

HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The KV cache of one model in blocks of ``block_size`` tokens; dtype: of the cache, one of dtypes.KV_DTYPES.

    A pool is one file: for each place of a block (see LayerGroups) the region of K, then that of V. A region holds the
    pool's blocks in order, each in the attention backend's layout, and begins at a whole huge page.
    """

    layers: LayerGroups
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @classmethod
    def of(
        cls, attention: AttentionConfig, block_size: int, dtype: str, layers: LayerGroups | None = None
    ) -> "KVGeometry":
        """The cache that these layers need. layers: how they share blocks (None: each has its place in all of them).
        Raises ConfigError for heads that a cache of 8 bits does not hold, and for inputs of convolutions."""
        if dtype == INT8 and attention.head_dim % 2:
            raise ConfigError(
                f"kv_dtype is {INT8}; heads of this model have {attention.head_dim} values; supported: an even number",
                param="kv_dtype",
            )
        if dtype == INT8 and any(how.holds_inputs for how in attention.layers):
            raise ConfigError(
                f"kv_dtype is {INT8}; layers of this model keep inputs of convolutions, which are not rounded; "
                "supported: auto",
                param="kv_dtype",
            )
        layers = layers or LayerGroups.dense(len(attention.layers), block_size)
        return cls(layers, attention.num_kv_heads, attention.head_dim, block_size, dtype)

    @property
    def num_regions(self) -> int:
        """Pairs of regions, of K and of V: one for each place of a block."""
        return self.layers.num_places

    @property
    def tensor_block_bytes(self) -> int:
        """Bytes of one block in one region: K or V of one layer."""
        return self.block_size * self.num_kv_heads * kv_row_bytes(self.head_dim, self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all its layers, K and V."""
        return 2 * self.num_regions * self.tensor_block_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all groups of layers, before any window has left it."""
        return self.block_bytes * len(self.layers.groups) // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold ``num_tokens`` tokens in all layers, as if none had a window."""
        return -(-num_tokens // self.block_size) * len(self.layers.groups)

    def blocks_within(self, kv_bytes: int) -> int:
        """How many blocks fit in ``kv_bytes``. Raises ConfigError when these hold no sequence at all, which takes one
        block of each group of layers."""
        num_groups = len(self.layers.groups)
        if kv_bytes < self.block_bytes * num_groups:
            what = "one block" if num_groups == 1 else f"one block of each of the {num_groups} groups of layers"
            raise ConfigError(
                f"kv_cache_bytes is {size_words(kv_bytes)}; {what} of this model takes "
                f"{size_words(self.block_bytes * num_groups)}",
                param="kv_cache_bytes",
            )
        return kv_bytes // self.block_bytes

    def region_bytes(self, total_blocks: int) -> int:
        """Bytes of one region of a pool, up to where the next one begins."""
        return -(-total_blocks * self.tensor_block_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES

    def region_offset(self, place: int, tensor: int, total_blocks: int) -> int:
        """Where the region of a place's K (tensor 0) or V (tensor 1) begins in the pool's file."""
        return (2 * place + tensor) * self.region_bytes(total_blocks)

    def pool_bytes(self, total_blocks: int) -> int:
        """Size of a pool's file. Only the pages that are used cost memory."""
        return 2 * self.num_regions * self.region_bytes(total_blocks)
