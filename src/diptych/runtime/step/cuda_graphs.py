"""CUDA graphs of decode steps: one launch instead of hundreds, so that the GPU and not the CPU sets the pace.

Owns the captured graphs and their static inputs, one per batch size, captured when a size has come often enough. Steps
with prefills, and batches that are too large, run as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.layers.forward_pass import ForwardPass
from diptych.runtime.models.registry import LanguageModel

MAX_BATCH = 64
SEEN_BEFORE_CAPTURE = 3


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: InputBatch
    hidden: torch.Tensor


class GraphedModel:
    """``forward`` of a model that fits CUDA graphs, replayed from a graph where one exists."""

    def __init__(
        self,
        model: LanguageModel,
        attention: AttentionBackend,
        caches: list[LayerCache],
        groups: Sequence[int],
        max_model_len: int,
    ) -> None:
        self._model = model
        self._groups = groups  # see ForwardPass
        self._attention = attention
        self._caches = caches
        self._max_model_len = max_model_len
        self._seen: dict[int, int] = {}
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None  # of memory that all graphs share: they never run at the same time

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Run LanguageModel.forward, by replaying a graph where one was captured. The result of a replay is valid until
        the next call."""
        size = batch.num_seqs
        if not batch.is_decode or size > MAX_BATCH:
            return self._compute(batch)
        captured = self._captured.get(size)
        if captured is None:
            self._seen[size] = self._seen.get(size, 0) + 1
            if self._seen[size] <= SEEN_BEFORE_CAPTURE:
                return self._compute(batch)
            try:
                captured = self._captured[size] = self._capture(batch)
            except torch.OutOfMemoryError:
                self._seen[size] = -(1 << 62)  # it is not tried again
                return self._compute(batch)
        _copy_into(captured.inputs, batch)
        captured.graph.replay()
        return captured.hidden

    def forget(self) -> None:
        """Capture every size again when it comes. Waits for those that are computed now."""
        if self._captured and self._attention.device.type == "cuda":
            torch.cuda.synchronize(self._attention.device)
        self._seen.clear()
        self._captured.clear()
        self._pool = None

    def _capture(self, batch: InputBatch) -> _Captured:
        """Record the forward pass over copies of the batch's tensors, for any context length."""
        width = -(-self._max_model_len // self._attention.geometry.block_size) + 1
        tables = [torch.zeros(batch.num_seqs, width, dtype=torch.int32, device=table.device)
                  for table in batch.block_tables]  # fmt: skip
        inputs = replace(_copy_of(batch), block_tables=tuple(tables), max_context_len=self._max_model_len)
        _copy_into(inputs, batch)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once outside of the graph: lazy initialisation must not be recorded
            self._compute(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._compute(inputs)
        self._pool = graph.pool()
        return _Captured(graph, inputs, hidden)

    def _compute(self, batch: InputBatch) -> torch.Tensor:
        return self._model.forward(ForwardPass(batch, self._caches, self._attention, groups=self._groups))


def _copy_of(batch: InputBatch) -> InputBatch:
    """A batch in memory of its own. Where all tensors but the block tables are one piece, they are in the copy."""
    packed = batch.packed.clone() if batch.packed is not None else None

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if packed is None or batch.packed is None:
            return tensor.clone()
        first = tensor.data_ptr() - batch.packed.data_ptr()
        size = tensor.numel() * tensor.element_size()
        return packed[first : first + size].view(tensor.dtype).view(tensor.shape)

    return replace(
        batch, packed=packed, token_ids=copy(batch.token_ids), positions=copy(batch.positions),
        query_start=copy(batch.query_start), context_lens=copy(batch.context_lens),
        sample_rows=copy(batch.sample_rows), slot_mappings=tuple([copy(slots) for slots in batch.slot_mappings]),
    )  # fmt: skip


def _copy_into(target: InputBatch, batch: InputBatch) -> None:
    """Write the tensors of a batch of as many sequences into those that a graph reads: in one copy where they are one
    piece, and one for each block table, of the columns that it has."""
    if target.packed is not None and batch.packed is not None:
        target.packed.copy_(batch.packed)
    else:
        for name in ("token_ids", "positions", "query_start", "context_lens", "sample_rows"):
            getattr(target, name).copy_(getattr(batch, name))
        for slots, source in zip(target.slot_mappings, batch.slot_mappings, strict=True):
            slots.copy_(source)
    for table, source in zip(target.block_tables, batch.block_tables, strict=True):
        table[:, : source.shape[1]].copy_(source)
