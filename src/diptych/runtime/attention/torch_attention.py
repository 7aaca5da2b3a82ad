"""Paged attention on the CPU in plain torch: gathers each sequence's blocks, then scaled dot-product attention.

The fallback where the native kernels are not built or do not cover a shape, and the reference they are tested against.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.attention.layout import allocate_cpu, lay_out_cpu, read_cpu
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.models.model_config import LayerAttention


@dataclass(frozen=True, slots=True)
class SequencePart:
    """One sequence of a step and the keys that its queries see."""

    rows: slice  # of the step's queries
    slots: torch.Tensor  # [num_keys]
    mask: torch.Tensor | None  # [num_queries, num_keys], True where visible; None: all of them


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """A step, sequence by sequence."""

    how: LayerAttention
    sequences: list[SequencePart]


class TorchCpuAttention:
    """An AttentionBackend in torch, for CPUs: the reference."""

    name = "torch-cpu"
    device = torch.device("cpu")
    fits_cuda_graphs = False

    def __init__(self, geometry: KVGeometry) -> None:
        self.geometry = geometry
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)

    def allocate(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.geometry
        return allocate_cpu(num_blocks, kv.num_kv_heads, kv.block_size, kv.head_dim, self.dtype)

    def laid_out(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.geometry
        return lay_out_cpu(k, v, kv.num_kv_heads, kv.block_size, kv.head_dim)

    def plan(self, batch: InputBatch, how: LayerAttention, group: int = 0) -> GatherPlan:
        return plan_gather(batch, how, self.geometry.block_size, group)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: GatherPlan,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return attend_gathered(q, plan, lambda slots: read_cpu(k_cache, v_cache, slots), sinks)


def plan_gather(batch: InputBatch, how: LayerAttention, block_size: int, group: int = 0) -> GatherPlan:
    """Which keys each sequence of a batch sees, and where they are."""
    starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
    tables = batch.block_tables[group]
    sequences = []
    for index, context in enumerate(contexts):
        begin, end = starts[index], starts[index + 1]
        table = tables[index]
        first_query = context - (end - begin)
        first_key = 0 if how.window is None else max(0, first_query - how.window + 1)
        keys = torch.arange(first_key, context, device=table.device)
        slots = table[keys // block_size].long() * block_size + keys % block_size
        mask = None
        if end - begin > 1:
            queries = torch.arange(first_query, context, device=table.device)[:, None]
            mask = keys[None] <= queries
            if how.window is not None:
                mask &= keys[None] > queries - how.window
        sequences.append(SequencePart(slice(begin, end), slots, mask))
    return GatherPlan(how, sequences)


def attend_gathered(
    q: torch.Tensor,
    plan: GatherPlan,
    read: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """AttentionBackend.run on any device. read: K and V at slots, see AttentionBackend.read."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for sequence in plan.sequences:
        k, v = (part.transpose(0, 1)[None] for part in read(sequence.slots))  # [1, num_kv_heads, num_keys, head_dim]
        queries = q[sequence.rows].to(k.dtype).transpose(0, 1)[None]
        if plan.how.softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(
                queries, k, v, attn_mask=sequence.mask, scale=plan.how.scale, enable_gqa=True
            )
        else:
            attended = _attend_wide(queries, k, v, sequence.mask, plan.how, sinks)
        out[sequence.rows] = attended[0].transpose(0, 1)
    return out.view(q.shape[0], -1)


def _attend_wide(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    how: LayerAttention,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [1, num_heads, num_queries, head_dim] -> the same, in fp32 throughout."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.float().repeat_interleave(group, dim=1) for part in (k, v))
    scores = q.float() @ k.transpose(2, 3) * how.scale
    if how.softcap is not None:
        scores = how.softcap * (scores / how.softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if sinks is None:
        return (scores.softmax(dim=-1) @ v).to(q.dtype)
    scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), dim=-1)
    return (scores.softmax(dim=-1)[..., :-1] @ v).to(q.dtype)
