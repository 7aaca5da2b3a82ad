"""The forward pass of a decoder-only transformer, for every family: what differs is in the weights that it is given.

Owns no sequence state: KV caches and the batch come from outside. A layer is nine calls; nothing else runs per layer.
Where every part of the model has a native kernel, a step in which all sequences decode is one call (native_step.py).
"""

from collections.abc import Callable

import torch

from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.input_batch import InputBatch
from diptych.runtime.kv_tensors import LayerCache
from diptych.runtime.model_config import ModelConfig
from diptych.runtime.models.layers import DecoderWeights
from diptych.runtime.models.native_step import native_step
from diptych.runtime.ops.ops import Ops
from diptych.runtime.rope import cos_sin_table


class Decoder:
    """A loaded model. ``max_positions``: rows of the rotary table, the longest context it will be asked for."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        ops: Ops,
        attention: AttentionBackend,
        max_positions: int,
    ) -> None:
        self.config = config
        self.attention = attention
        self._weights = weights
        self._ops = ops
        self._windows = tuple(dict.fromkeys(layer.window for layer in weights.layers))
        shape = config.attention
        self._cos_sin = cos_sin_table(config.rope, shape.head_dim, max_positions, weights.embedding.device)
        self.native_step = native_step(weights, attention, self._cos_sin, config.norm_eps)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._weights.embedding.dtype

    def forward(
        self, batch: InputBatch, caches: list[LayerCache], on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Compute all tokens of the batch, write their K and V, and return the normed hidden states of
        ``batch.sample_rows``, in that order: [num_samples, hidden]. on_layer: called before each layer, with the number
        of those whose K and V are written, unless all tokens are decodes; what it raises ends the step."""
        ops, attention, eps = self._ops, self.attention, self.config.norm_eps
        residual = torch.nn.functional.embedding(batch.token_ids, self._weights.embedding)  # [num_tokens, hidden]
        if self.native_step is not None and batch.num_decodes == batch.num_tokens:
            return self.native_step(residual, batch, caches)
        plans = {window: attention.plan(batch, window) for window in self._windows}
        layers = self._weights.layers
        last = len(layers) - 1
        x = ops.rms_norm(residual, layers[0].input_norm, eps)
        for index, (layer, (k_cache, v_cache)) in enumerate(zip(layers, caches, strict=True)):
            if on_layer is not None:
                on_layer(index)
            weights = layer.attention
            qkv = weights.qkv(x)
            q = ops.rope_and_cache(
                qkv, batch.positions, self._cos_sin, batch.slot_mapping, k_cache, v_cache,
                weights.q_norm, weights.k_norm, eps,
            )  # fmt: skip
            x = attention.run(q, k_cache, v_cache, plans[layer.window])
            if index == last and batch.num_decodes != batch.num_tokens:
                # what follows only matters for the rows whose logits are wanted
                x, residual = x[batch.sample_rows], residual[batch.sample_rows]
                if not x.shape[0]:
                    return residual
            x = ops.add_rms_norm(weights.output(x), residual, layer.mlp_norm, eps)
            x = layer.mlp.down(layer.mlp.gate_up(x))
            norm = layers[index + 1].input_norm if index < last else self._weights.norm
            x = ops.add_rms_norm(x, residual, norm, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] as from ``forward`` -> [rows, vocab], in the model's dtype."""
        return self._weights.lm_head(hidden)
