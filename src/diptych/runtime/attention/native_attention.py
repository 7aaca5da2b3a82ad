"""Paged attention on the CPU through the native kernels: the cache is read in place, results are batch-invariant."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from diptych.runtime.attention.torch_attention import TorchCpuAttention
from diptych.runtime.input_batch import InputBatch
from diptych.runtime.kv_geometry import KVGeometry
from diptych.runtime.model_config import LayerAttention
from diptych.runtime.native import NativeLibrary

MAX_DIM = 256


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: InputBatch
    scale: float
    sizes: ctypes.Array[ctypes.c_int64]
    tables: torch.Tensor
    partials: torch.Tensor


class NativeCpuAttention(TorchCpuAttention):
    """See AttentionBackend. Shares allocation and the slow paths with the torch backend: the layout is the same."""

    name = "native-cpu"

    def __init__(self, library: NativeLibrary, num_heads: int, geometry: KVGeometry) -> None:
        super().__init__(geometry)
        self.num_heads = num_heads
        self._functions = library.functions
        self._is_bf16 = int(self.dtype == torch.bfloat16)
        self._partials = torch.empty(1 << 16, dtype=torch.float32)

    @staticmethod
    def covers(geometry: KVGeometry, layers: Iterable[LayerAttention]) -> bool:
        """Whether the kernels compute these layers over such a cache."""
        fits = geometry.head_dim % 16 == 0 and geometry.head_dim <= MAX_DIM and geometry.block_size % 16 == 0
        return fits and all(layer.softcap is None for layer in layers)

    def write(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """See AttentionBackend."""
        kv = self.geometry
        self._functions.diptych_write_kv(
            k.data_ptr(), v.data_ptr(), slots.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), k.shape[0],
            kv.num_kv_heads, kv.head_dim, kv.block_size, k.stride(0), v.stride(0), self._is_bf16,
        )  # fmt: skip

    def plan(self, batch: InputBatch, how: LayerAttention) -> _Plan:  # type: ignore[override]
        """See AttentionBackend."""
        assert how.softcap is None, "covers() has said so"
        kv, tables = self.geometry, batch.block_tables
        row = (self.num_heads + 2 * kv.num_kv_heads) * kv.head_dim
        sizes = (ctypes.c_int64 * 9)(
            row, tables.stride(0), batch.num_seqs, batch.num_decodes, self.num_heads, kv.num_kv_heads,
            kv.head_dim, kv.block_size, how.window or 0,
        )  # fmt: skip
        return _Plan(batch, how.scale, sizes, tables, self.partials(batch))

    def partials(self, batch: InputBatch) -> torch.Tensor:
        """Scratch memory for the decodes of a batch: every segment's result. The next batch may get the same."""
        needed = self._functions.diptych_attention_workspace(
            batch.num_decodes, batch.max_context_len, self.num_heads, self.geometry.head_dim
        )
        if needed > self._partials.numel():
            self._partials = torch.empty(needed, dtype=torch.float32)
        return self._partials

    def run(  # type: ignore[override]
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: _Plan
    ) -> torch.Tensor:
        """See AttentionBackend."""
        batch = plan.batch
        out = q.new_empty((q.shape[0], self.num_heads * self.geometry.head_dim))
        plan.sizes[0] = q.stride(0)
        self._functions.diptych_attention(
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), plan.tables.data_ptr(),
            batch.query_start.data_ptr(), batch.context_lens.data_ptr(), out.data_ptr(), plan.partials.data_ptr(),
            ctypes.addressof(plan.sizes), plan.scale, self._is_bf16,
        )  # fmt: skip
        return out
