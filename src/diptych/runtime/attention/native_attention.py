"""Paged attention on the CPU through the native kernels: the cache is read in place, results are batch-invariant."""

import ctypes
from dataclasses import dataclass

import torch

from diptych.runtime.attention.attention_backend import AttentionShape
from diptych.runtime.attention.torch_attention import TorchCpuAttention
from diptych.runtime.input_batch import InputBatch
from diptych.runtime.native import NativeLibrary

MAX_DIM = 256


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: InputBatch
    sizes: ctypes.Array[ctypes.c_int64]
    tables: torch.Tensor
    partials: torch.Tensor


class NativeCpuAttention(TorchCpuAttention):
    """See AttentionBackend. Shares allocation and the slow paths with the torch backend: the layout is the same."""

    name = "native-cpu"

    def __init__(self, library: NativeLibrary, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._functions = library.functions
        self._is_bf16 = int(shape.dtype == torch.bfloat16)
        self._partials = torch.empty(1 << 16, dtype=torch.float32)

    @staticmethod
    def covers(shape: AttentionShape) -> bool:
        """Whether the kernels handle this shape."""
        return shape.head_dim % 16 == 0 and shape.head_dim <= MAX_DIM and shape.block_size % 16 == 0

    def write(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """See AttentionBackend."""
        shape = self.shape
        self._functions.diptych_write_kv(
            k.data_ptr(), v.data_ptr(), slots.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), k.shape[0],
            shape.num_kv_heads, shape.head_dim, shape.block_size, k.stride(0), v.stride(0), self._is_bf16,
        )  # fmt: skip

    def plan(self, batch: InputBatch, sliding_window: int | None) -> _Plan:  # type: ignore[override]
        """See AttentionBackend."""
        shape, tables = self.shape, batch.block_tables
        row = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        sizes = (ctypes.c_int64 * 9)(
            row, tables.stride(0), batch.num_seqs, batch.num_decodes, shape.num_heads, shape.num_kv_heads,
            shape.head_dim, shape.block_size, sliding_window or 0,
        )  # fmt: skip
        return _Plan(batch, sizes, tables, self.partials(batch))

    def partials(self, batch: InputBatch) -> torch.Tensor:
        """Scratch memory for the decodes of a batch: every segment's result. The next batch may get the same."""
        shape = self.shape
        needed = self._functions.diptych_attention_workspace(
            batch.num_decodes, batch.max_context_len, shape.num_heads, shape.head_dim
        )
        if needed > self._partials.numel():
            self._partials = torch.empty(needed, dtype=torch.float32)
        return self._partials

    def run(  # type: ignore[override]
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: _Plan
    ) -> torch.Tensor:
        """See AttentionBackend."""
        batch = plan.batch
        out = q.new_empty((q.shape[0], self.shape.num_heads * self.shape.head_dim))
        plan.sizes[0] = q.stride(0)
        self._functions.diptych_attention(
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), plan.tables.data_ptr(),
            batch.query_start.data_ptr(), batch.context_lens.data_ptr(), out.data_ptr(), plan.partials.data_ptr(),
            ctypes.addressof(plan.sizes), self.shape.scale, self._is_bf16,
        )  # fmt: skip
        return out
