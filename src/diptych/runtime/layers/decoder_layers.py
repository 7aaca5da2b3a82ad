"""The layers of a decoder: attention or a short convolution, and an MLP or a mixture of experts, with norms before
them, behind them, or both.

One description for all families: native_step.py computes decode steps of such layers in one native call, and the loop
here computes all other steps part by part, with the same bits.
"""

from collections.abc import Sequence

import torch

from diptych.runtime.layers.forward_pass import ForwardPass
from diptych.runtime.layers.native_step import DecoderLayer, NativeStep
from diptych.runtime.layers.parts import Norm
from diptych.runtime.ops.ops import Ops


class DecoderLayers:
    """Some layers and the norm behind them. multiplier: of what each part adds to the residual stream. native: computes
    whole decode steps (None: nothing does)."""

    def __init__(
        self, ops: Ops, layers: Sequence[DecoderLayer], norm: Norm, multiplier: float, native: NativeStep | None
    ) -> None:
        self._ops = ops
        self.layers = layers
        self.norm = norm
        self._multiplier = multiplier
        self.native_step = native

    def __call__(self, residual: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        """residual [num_tokens, hidden], the embeddings of the batch's tokens, is overwritten. Writes K and V; the
        normed hidden states of its sample_rows, in that order: [num_samples, hidden]."""
        if self.native_step is not None and step.batch.is_decode:
            return self.native_step(residual, step)
        before = [*(layer.input_norm for layer in self.layers), self.norm]
        x = residual if before[0] is None else before[0](residual)
        for index, layer in enumerate(self.layers):
            attended = _mix(layer, layer.qkv(x), step)
            attended, x, residual = step.rows_to_keep(layer.caches.stop - 1, attended, x, residual)
            if layer.attention_gate is not None:
                self._ops.gate(attended, layer.attention_gate(x))
            x = self._add(layer.o_proj(attended), residual, layer.attention_norm, layer.mlp_norm)
            x = self._add(layer.mlp(x), residual, layer.output_norm, before[index + 1])
        return x

    def _add(self, x: torch.Tensor, residual: torch.Tensor, after: Norm | None, before: Norm | None) -> torch.Tensor:
        """Add what a part gives to ``residual`` in place; the input of the next part."""
        if after is not None:
            x = after(x)
        if before is not None:
            return before.of_sum(x, residual, self._multiplier)
        self._ops.add(x, residual, self._multiplier)
        return residual


def _mix(layer: DecoderLayer, projected: torch.Tensor, step: ForwardPass) -> torch.Tensor:
    """What tokens see of those before them: by attention, or by the convolution in its place."""
    cache = step.begin_layer(layer.caches.start)
    if layer.convolution is not None:
        return layer.convolution(projected, step, layer.caches)
    assert layer.rope is not None and layer.attention is not None, "no convolution is in their place"
    return layer.attention(layer.rope(projected, cache, step), cache, step)
