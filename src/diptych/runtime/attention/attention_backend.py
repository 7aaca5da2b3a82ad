"""The attention contract: plan once per step, then run once per layer.

The KV cache of one layer is a pair of tensors whose layout belongs to the backend and is the same for all backends of
one device type, so that results can be compared and blocks can be moved as plain bytes: block ``i`` of K and of V is
the contiguous slice ``k_cache[i]`` / ``v_cache[i]``.

CPU layout, with v = 4 // itemsize (2 for bf16, 1 for fp32), chosen so that 16 neighbouring tokens (K) or channels (V)
fill a vector register and v values that are multiplied together share 32 bits:
    K [num_blocks, num_kv_heads, block_size / 16, head_dim / v, 16, v]
    V [num_blocks, num_kv_heads, block_size / v, head_dim, v]
A cache of whole numbers of 8 bits has the order of bf16, whatever is computed in, and for each head of a block the
values first, then an fp32 scale for each token, by which its values are multiplied.
CUDA layout: K and V [num_blocks, block_size, num_kv_heads, head_dim].
"""

from typing import Any, Protocol

import torch

from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.models.model_config import LayerAttention


class AttentionBackend(Protocol):
    """Paged attention for one model on one device. dtype: of the cache. fits_cuda_graphs: see LanguageModel."""

    name: str
    geometry: KVGeometry
    dtype: torch.dtype
    device: torch.device
    fits_cuda_graphs: bool

    def allocate(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeroed (k_cache, v_cache) of one layer."""
        ...

    def laid_out(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(k_cache, v_cache) of one layer over 1-d memory of the caller: geometry.tensor_block_bytes a block. What lies
        in a block behind its last token is never used, so the memory need not be cleared."""
        ...

    def plan(self, batch: InputBatch, how: LayerAttention, group: int = 0) -> Any:
        """Work that is the same for all layers of a group that attend like this; valid for this step only."""
        ...

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of q [num_tokens, num_heads, head_dim] over each sequence's blocks, this step's tokens
        included (they must have been written before). Never reads a block that lies before the windows of all queries
        of its sequence: it may be another's. sinks: [num_heads] fp32 where LayerAttention.has_sinks. Returns
        [num_tokens, num_heads * head_dim]."""
        ...
