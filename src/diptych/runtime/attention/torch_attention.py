"""Paged attention on the CPU in plain torch: gathers each sequence's blocks, then scaled dot-product attention.

The fallback where the native kernels are not built or do not cover a shape, and the reference they are tested against.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from diptych.runtime.attention.attention_backend import AttentionShape
from diptych.runtime.attention.layout import allocate_cpu, lay_out_cpu, read_cpu, write_cpu
from diptych.runtime.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class _Sequence:
    rows: slice
    slots: torch.Tensor  # [num_keys] of the keys that any of its queries sees
    mask: torch.Tensor | None  # [num_queries, num_keys], True where visible; None: all of them


class TorchCpuAttention:
    """See AttentionBackend."""

    name = "torch-cpu"

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def allocate(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionBackend."""
        shape = self.shape
        return allocate_cpu(num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim, shape.dtype)

    def laid_out(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionBackend."""
        shape = self.shape
        return lay_out_cpu(k, v, shape.num_kv_heads, shape.block_size, shape.head_dim)

    def write(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """See AttentionBackend."""
        write_cpu(k, v, k_cache, v_cache, slots)

    def read(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionBackend."""
        return read_cpu(k_cache, v_cache, slots)

    def plan(self, batch: InputBatch, sliding_window: int | None) -> list[_Sequence]:
        """See AttentionBackend."""
        size = self.shape.block_size
        starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
        plan = []
        for index, context in enumerate(contexts):
            begin, end = starts[index], starts[index + 1]
            first_query = context - (end - begin)
            first_key = 0 if sliding_window is None else max(0, first_query - sliding_window + 1)
            keys = torch.arange(first_key, context)
            slots = batch.block_tables[index][keys // size].long() * size + keys % size
            mask = None
            if end - begin > 1:
                queries = torch.arange(first_query, context)[:, None]
                mask = keys[None] <= queries
                if sliding_window is not None:
                    mask &= keys[None] > queries - sliding_window
            plan.append(_Sequence(slice(begin, end), slots, mask))
        return plan

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: list[_Sequence]) -> torch.Tensor:
        """See AttentionBackend."""
        out = torch.empty((q.shape[0], self.shape.num_heads, self.shape.head_dim), dtype=q.dtype)
        for sequence in plan:
            k, v = read_cpu(k_cache, v_cache, sequence.slots)  # [num_keys, num_kv_heads, head_dim]
            attended = F.scaled_dot_product_attention(
                q[sequence.rows].transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                attn_mask=sequence.mask,
                scale=self.shape.scale,
                enable_gqa=True,
            )
            out[sequence.rows] = attended[0].transpose(0, 1)
        return out.view(q.shape[0], -1)
