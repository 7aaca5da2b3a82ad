"""Paged attention on CUDA through the project's Triton kernel: any head size, windows and softcaps, every row with the
same bits alone, in any batch, and in any chunking.

K and V lie as [num_blocks, block_size, num_kv_heads, head_dim], as for torch's attention.
"""

from dataclasses import dataclass

import torch

from diptych.runtime.attention.cuda_attention import CudaKVLayout
from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.kernels.triton_kernels.paged_attention import paged_attention
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.models.model_config import LayerAttention


@dataclass(frozen=True, slots=True)
class _TritonPlan:
    batch: InputBatch
    block_tables: torch.Tensor
    how: LayerAttention


class TritonAttention(CudaKVLayout):
    """An AttentionBackend for a GPU, or for Triton's interpreter on a CPU."""

    name = "triton"
    fits_cuda_graphs = True

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        super().__init__(geometry, device)

    def plan(self, batch: InputBatch, how: LayerAttention, group: int = 0) -> _TritonPlan:
        """The kernel finds its tiles on the device; nothing is computed ahead."""
        return _TritonPlan(batch, batch.block_tables[group], how)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: _TritonPlan,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [num_tokens, num_heads, head_dim], its heads side by side -> [num_tokens, num_heads * head_dim]."""
        batch, how = plan.batch, plan.how
        return paged_attention(
            q, k_cache, v_cache, batch.query_start, batch.context_lens, plan.block_tables, scale=how.scale,
            window=how.window, softcap=how.softcap, max_query_len=batch.max_query_len,
            max_context_len=batch.max_context_len, sinks=sinks,
        )  # fmt: skip
