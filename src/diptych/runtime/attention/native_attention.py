"""Paged attention on the CPU through the native kernels: the cache is read in place, results are batch-invariant."""

import ctypes
from dataclasses import dataclass

import torch

from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.attention.layout import allocate_cpu, lay_out_cpu
from diptych.runtime.dtypes import INT8
from diptych.runtime.kernels.native import NativeKernels
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.models.model_config import LayerAttention

MAX_DIM = 256


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: InputBatch
    block_tables: torch.Tensor
    how: LayerAttention
    sizes: ctypes.Array[ctypes.c_int64]
    partials: torch.Tensor


class NativeCpuAttention:
    """An AttentionBackend on the native kernels, for CPUs."""

    name = "native-cpu"
    device = torch.device("cpu")
    fits_cuda_graphs = False

    def __init__(self, kernels: NativeKernels, num_heads: int, geometry: KVGeometry) -> None:
        self.kernels = kernels
        self.num_heads = num_heads
        self.geometry = geometry
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._partials = torch.empty(1 << 16, dtype=torch.float32)

    @staticmethod
    def covers(geometry: KVGeometry) -> bool:
        """Whether the kernels compute attention over such a cache."""
        return geometry.head_dim % 16 == 0 and geometry.head_dim <= MAX_DIM and geometry.block_size % 16 == 0

    def allocate(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.geometry
        return allocate_cpu(num_blocks, kv.num_kv_heads, kv.block_size, kv.head_dim, self.dtype)

    def laid_out(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.geometry
        return lay_out_cpu(k, v, kv.num_kv_heads, kv.block_size, kv.head_dim)

    def plan(self, batch: InputBatch, how: LayerAttention, group: int = 0) -> _Plan:
        kv, tables = self.geometry, batch.block_tables[group]
        row = (self.num_heads + 2 * kv.num_kv_heads) * kv.head_dim
        sizes = (ctypes.c_int64 * 10)(
            row, tables.stride(0), batch.num_seqs, batch.num_decodes, self.num_heads, kv.num_kv_heads,
            kv.head_dim, kv.block_size, how.window or 0, kv.dtype == INT8,
        )  # fmt: skip
        return _Plan(batch, tables, how, sizes, self.partials(batch))

    def partials(self, batch: InputBatch) -> torch.Tensor:
        """Scratch memory for the decodes of a batch: every segment's result. The next batch may get the same."""
        needed = self.kernels.functions.diptych_attention_workspace(
            batch.num_decodes, batch.max_context_len, self.num_heads, self.geometry.head_dim
        )
        if needed > self._partials.numel():
            self._partials = torch.empty(needed, dtype=torch.float32)
        return self._partials

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: _Plan,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch = plan.batch
        out = q.new_empty((q.shape[0], self.num_heads * self.geometry.head_dim))
        plan.sizes[0] = q.stride(0)
        self.kernels.functions.diptych_attention(
            self.kernels.handle, q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), plan.block_tables.data_ptr(),
            batch.query_start.data_ptr(), batch.context_lens.data_ptr(), out.data_ptr(), plan.partials.data_ptr(),
            ctypes.addressof(plan.sizes), plan.how.scale, plan.how.softcap or 0.0,
            None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        return out
