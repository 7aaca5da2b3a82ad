"""Paged attention on CUDA through torch's variable-length attention, which reads the blocks in place.

K and V lie as [num_blocks, block_size, num_kv_heads, head_dim]. One split per sequence keeps results independent of the
batch (torch's ``num_splits=1``). Where torch is too old to take a block table, or scores are capped or have sinks, or
blocks before a window are given up, which torch reads in part, each sequence's blocks are gathered.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.attention.layout import read_cuda
from diptych.runtime.attention.torch_attention import GatherPlan, attend_gathered, plan_gather
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.models.model_config import LayerAttention


def paged_attention() -> Callable[..., Any] | None:
    """torch's varlen_attn if this version of it takes a block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None


@dataclass(frozen=True, slots=True)
class _PagedPlan:
    batch: InputBatch
    block_table: torch.Tensor
    how: LayerAttention


class CudaKVLayout:
    """The memory of K and V on a GPU, which all attention backends there share."""

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        self.geometry = geometry
        self.device = device
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)

    def allocate(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeroed (k_cache, v_cache) of one layer."""
        count = num_blocks * self.geometry.block_size * self.geometry.num_kv_heads * self.geometry.head_dim
        return self.laid_out(
            torch.zeros(count, dtype=self.dtype, device=self.device),
            torch.zeros(count, dtype=self.dtype, device=self.device),
        )

    def laid_out(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(k_cache, v_cache) of one layer over 1-d memory of the caller."""
        shape = (-1, self.geometry.block_size, self.geometry.num_kv_heads, self.geometry.head_dim)
        return k.view(shape), v.view(shape)


class CudaAttention(CudaKVLayout):
    """Attention by torch. paged: torch's function that ``paged_attention`` finds; None to gather each sequence's
    blocks."""

    name = "cuda"

    def __init__(
        self,
        geometry: KVGeometry,
        layers: Iterable[LayerAttention],
        device: torch.device,
        paged: Callable[..., Any] | None,
    ) -> None:
        if geometry.dtype == "float32":
            raise ConfigError("dtype is float32; on cuda: bfloat16", param="dtype")
        super().__init__(geometry, device)
        self._paged = paged
        self.fits_cuda_graphs = paged is not None and not any(map(self._is_gathered, layers))

    def plan(self, batch: InputBatch, how: LayerAttention, group: int = 0) -> _PagedPlan | GatherPlan:
        if self._paged is None or self._is_gathered(how):
            return plan_gather(batch, how, self.geometry.block_size, group)
        return _PagedPlan(batch, batch.block_tables[group], how)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: _PagedPlan | GatherPlan,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(plan, GatherPlan):
            return attend_gathered(q, plan, lambda slots: read_cuda(k_cache, v_cache, slots), sinks)
        assert self._paged is not None
        batch, how = plan.batch, plan.how
        out: torch.Tensor = self._paged(
            q.contiguous(), k_cache, v_cache, batch.query_start, None, batch.max_query_len, batch.max_context_len,
            scale=how.scale, window_size=(-1 if how.window is None else how.window - 1, 0), enable_gqa=True,
            seqused_k=batch.context_lens, block_table=plan.block_table, num_splits=1,
        )  # fmt: skip
        return out.reshape(q.shape[0], -1)

    def _is_gathered(self, how: LayerAttention) -> bool:
        return (
            how.softcap is not None or how.has_sinks or (how.window is not None and not self.geometry.layers.is_dense)
        )
