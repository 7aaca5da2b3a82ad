"""Paged attention on CUDA through torch's variable-length attention, which reads the blocks in place.

K and V lie as [num_blocks, block_size, num_kv_heads, head_dim]. One split per sequence keeps results independent of the
batch (torch's ``num_splits=1``). Where torch is too old to take a block table, each sequence's blocks are gathered.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from diptych.control.errors import ConfigError
from diptych.runtime.attention.attention_backend import AttentionShape
from diptych.runtime.attention.layout import read_cuda, write_cuda
from diptych.runtime.input_batch import InputBatch


def _paged_attention() -> Any | None:
    """torch's varlen_attn if this version of it takes a block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: InputBatch
    window: int | None


class CudaAttention:
    """See AttentionBackend."""

    name = "cuda"

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        if shape.dtype == torch.float32:
            raise ConfigError("dtype is float32; on cuda: bfloat16", param="dtype")
        self.shape = shape
        self._device = device
        self._paged = _paged_attention()

    def allocate(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionBackend."""
        count = num_blocks * self.shape.block_size * self.shape.num_kv_heads * self.shape.head_dim
        return self.laid_out(
            torch.zeros(count, dtype=self.shape.dtype, device=self._device),
            torch.zeros(count, dtype=self.shape.dtype, device=self._device),
        )

    def laid_out(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionBackend."""
        shape = (-1, self.shape.block_size, self.shape.num_kv_heads, self.shape.head_dim)
        return k.view(shape), v.view(shape)

    def write(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """See AttentionBackend."""
        write_cuda(k, v, k_cache, v_cache, slots)

    def read(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionBackend."""
        return read_cuda(k_cache, v_cache, slots)

    def plan(self, batch: InputBatch, sliding_window: int | None) -> _Plan:
        """See AttentionBackend."""
        return _Plan(batch, sliding_window)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: _Plan) -> torch.Tensor:
        """See AttentionBackend."""
        batch = plan.batch
        if self._paged is None:
            return self._gathered(q, k_cache, v_cache, plan)
        out: torch.Tensor = self._paged(
            q.contiguous(), k_cache, v_cache, batch.query_start, None, batch.max_query_len, batch.max_context_len,
            scale=self.shape.scale, window_size=(-1 if plan.window is None else plan.window - 1, 0), enable_gqa=True,
            seqused_k=batch.context_lens, block_table=batch.block_tables, num_splits=1,
        )  # fmt: skip
        return out.reshape(q.shape[0], -1)

    def _gathered(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: _Plan) -> torch.Tensor:
        batch, size = plan.batch, self.shape.block_size
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
        for index, context in enumerate(contexts):
            rows = slice(starts[index], starts[index + 1])
            queries = torch.arange(context - (rows.stop - rows.start), context, device=q.device)[:, None]
            keys = torch.arange(context, device=q.device)
            slots = batch.block_tables[index][keys // size].long() * size + keys % size
            mask = keys[None] <= queries
            if plan.window is not None:
                mask &= keys[None] > queries - plan.window
            k, v = read_cuda(k_cache, v_cache, slots)
            attended = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
                attn_mask=mask, scale=self.shape.scale, enable_gqa=True,
            )  # fmt: skip
            out[rows] = attended[0].transpose(0, 1)
        return out.reshape(q.shape[0], -1)
