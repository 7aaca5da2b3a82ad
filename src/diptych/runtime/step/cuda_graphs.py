"""CUDA graphs of decode steps: one launch instead of hundreds, so that the GPU and not the CPU sets the pace.

Owns the captured graphs and their static inputs, one per batch size, captured when a size has come often enough. Steps
with prefills, and batches that are too large, run as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
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
            captured = self._captured[size] = self._capture(batch)
        for name, tensors in _tensors(batch).items():
            for target, tensor in zip(_tuple(getattr(captured.inputs, name)), _tuple(tensors), strict=True):
                target.copy_(tensor)
        captured.graph.replay()
        return captured.hidden

    def forget(self) -> None:
        """Capture every size again when it comes."""
        self._seen.clear()
        self._captured.clear()

    def _capture(self, batch: InputBatch) -> _Captured:
        """Record the forward pass over copies of the batch's tensors, for any context length."""
        copies: dict[str, Any] = {
            name: value.clone() if isinstance(value, torch.Tensor) else tuple([tensor.clone() for tensor in value])
            for name, value in _tensors(batch).items()
        }
        inputs = replace(batch, **copies, max_context_len=self._max_model_len)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once outside of the graph: lazy initialisation must not be recorded
            self._compute(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden = self._compute(inputs)
        return _Captured(graph, inputs, hidden)

    def _compute(self, batch: InputBatch) -> torch.Tensor:
        return self._model.forward(ForwardPass(batch, self._caches, self._attention, groups=self._groups))


def _tensors(batch: InputBatch) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
    """The fields of a batch that are tensors, or tensors by group of layers."""
    values = {field.name: getattr(batch, field.name) for field in fields(InputBatch)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor | tuple)}


def _tuple(value: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
