"""Makes the parts of a model out of the tensors of its checkpoint, packed for the machine that computes it.

Knows how Hugging Face names the halves of a part (weight, bias, q_proj and its kind), not which parts a family has.
"""

from collections.abc import Sequence

import torch

from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.layers.native_step import NativeStep, PreNormLayer, native_step
from diptych.runtime.layers.parts import Attention, Embedding, RmsNorm, RopeAndCache
from diptych.runtime.loader import Weights
from diptych.runtime.model_config import AttentionConfig, LayerAttention, RopeConfig
from diptych.runtime.ops.ops import Linear, Ops
from diptych.runtime.rope import RotaryTables


class LayerLoader:
    """Loads the parts of one model; a family calls it with what it has. Names are without ``.weight`` and ``.bias``."""

    def __init__(self, weights: Weights, ops: Ops, attention: AttentionBackend, rotary: RotaryTables) -> None:
        self._weights = weights
        self._memory = weights.memory
        self._ops = ops
        self._attention = attention
        self._rotary = rotary

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor as it is in the checkpoint, in the model's dtype."""
        return self._weights.tensor(name, shape)

    def embedding(self, name: str, vocab_size: int, width: int) -> Embedding:
        """A table of one row per token."""
        return Embedding(self.tensor(f"{name}.weight", vocab_size, width))

    def rms_norm(self, name: str, width: int, eps: float) -> RmsNorm:
        """An RMS norm."""
        return RmsNorm(self._ops, self.tensor(f"{name}.weight", width), eps)

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
        """A linear layer."""
        return self.stacked([name], inputs, [outputs], bias=bias)

    def stacked(self, names: Sequence[str], inputs: int, outputs: Sequence[int], *, bias: bool = False) -> Linear:
        """Linear layers of the same input as one, their outputs side by side."""
        weight, vector = self._stack(names, inputs, outputs, bias)
        return self._ops.pack_linear(weight, vector, self._memory)

    def qkv(self, name: str, inputs: int, heads: AttentionConfig, *, bias: bool = False) -> Linear:
        """The projections to queries, keys and values as one: all query heads, all key heads, all value heads."""
        outputs = [count * heads.head_dim for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
        return self.stacked([f"{name}.{part}_proj" for part in "qkv"], inputs, outputs, bias=bias)

    def gate_up(self, name: str, inputs: int, inner: int, *, bias: bool = False) -> Linear:
        """The first half of a gated MLP: silu(gate(x)) * up(x), ``inner`` wide."""
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        weight, vector = self._stack(names, inputs, [inner, inner], bias)
        return self._ops.pack_gate_up(weight, vector, self._memory)

    def rope(self, rope: RopeConfig, q_norm: RmsNorm | None = None, k_norm: RmsNorm | None = None) -> RopeAndCache:
        """Rotation of q and k, and the way of k and v into the cache."""
        return RopeAndCache(self._ops, self._rotary.table(rope), q_norm, k_norm)

    def attention(self, how: LayerAttention) -> Attention:
        """Attention over the cache."""
        return Attention(how)

    def lm_head(self, embedding: Embedding, *, is_tied: bool) -> Linear:
        """Hidden states to logits, with the weights of the embedding or its own (``lm_head``)."""
        if is_tied:
            self._weights.ignore("lm_head.weight")
            return self._ops.pack_linear(embedding.weight, None, self._memory)
        vocab_size, width = embedding.weight.shape
        return self.linear("lm_head", width, vocab_size)

    def native_step(self, layers: Sequence[PreNormLayer], norm: RmsNorm) -> NativeStep | None:
        """Decode steps of these layers, and of the norm behind them, in one native call; None where it cannot be."""
        return native_step(layers, norm, self._attention)

    def _stack(
        self, names: Sequence[str], inputs: int, outputs: Sequence[int], bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        vector = self._memory.keep(self._weights.fused([f"{n}.bias" for n in names], outputs)) if bias else None
        return self._weights.fused([f"{name}.weight" for name in names], outputs, inputs), vector
