"""One batch on its way through the layers of a model: what a layer reads besides its input."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.attention.layout import read_cpu, read_cuda
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.models.model_config import LayerAttention


class ForwardPass:
    """caches: of each layer. on_layer: called before each layer with the number of those whose K and V are written, but
    not in a step that native_step.py computes; what it raises ends the step. groups: of each layer, the number of its
    group: which of the batch's slots and block tables are its own (None: all layers are in one)."""

    def __init__(
        self,
        batch: InputBatch,
        caches: Sequence[LayerCache],
        attention: AttentionBackend,
        on_layer: Callable[[int], None] | None = None,
        groups: Sequence[int] | None = None,
    ) -> None:
        self.batch = batch
        self.caches = caches
        self._attention = attention
        self._on_layer = on_layer
        self.groups = groups
        self._group = 0  # of the layer that has begun
        self._plans: dict[tuple[int, LayerAttention], Any] = {}

    def begin_layer(self, index: int) -> LayerCache:
        """The K and V of a layer, which all layers before it have written already."""
        if self._on_layer is not None:
            self._on_layer(index)
        if self.groups is not None:
            self._group = self.groups[index]
        return self.caches[index]

    def group_of(self, index: int) -> int:
        """The group of a layer of the cache."""
        return 0 if self.groups is None else self.groups[index]

    @property
    def row_values(self) -> int:
        """Values of a token in K, or V, of one layer of the cache."""
        return self._attention.geometry.num_kv_heads * self._attention.geometry.head_dim

    def rows_before(self, caches: range, count: int, width: int) -> torch.Tensor:
        """What layers of the cache hold, of all of them side by side ``width`` values, of the ``count`` tokens before
        each sequence's first one in this step: [num_seqs, count, width]. Zeros where a sequence has no token."""
        batch, size = self.batch, self._attention.geometry.block_size
        lengths = batch.query_start[1:] - batch.query_start[:-1]
        first = (batch.context_lens - lengths).long()
        positions = first[:, None] + torch.arange(-count, 0, device=first.device)
        seen = positions.clamp(min=0)
        read = read_cpu if first.device.type == "cpu" else read_cuda
        parts: list[torch.Tensor] = []
        for index in caches:
            blocks = batch.block_tables[self.group_of(index)].long().gather(1, seen // size)
            parts += [rows.flatten(1) for rows in read(*self.caches[index], (blocks * size + seen % size).flatten())]
        rows = torch.cat(parts, dim=1)[:, :width].view(*positions.shape, width)
        return torch.where((positions >= 0)[..., None], rows, rows.new_zeros(()))

    @property
    def slot_mapping(self) -> torch.Tensor:
        """[num_tokens] int64: where K and V of the layer that has begun are written."""
        return self.batch.slot_mappings[self._group]

    def attend(
        self, q: torch.Tensor, cache: LayerCache, how: LayerAttention, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim], over what the cache holds of each
        sequence, this step's tokens included: for the layer that has begun. sinks: see AttentionBackend.run."""
        key = (self._group, how)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._attention.plan(self.batch, how, self._group)
        return self._attention.run(q, *cache, plan, sinks)

    def rows_to_keep(self, index: int, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the model still needs of ``rows`` [num_tokens, ...] when layer ``index`` of the cache has attended:
        behind the last layer, the batch's sample_rows only."""
        if index < len(self.caches) - 1 or self.batch.is_decode:
            return rows
        return tuple(tensor[self.batch.sample_rows] for tensor in rows)
