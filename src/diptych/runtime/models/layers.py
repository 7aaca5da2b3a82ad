"""The parts that decoder-only transformers are made of, as records of packed weights, and how to load them.

Knows the tensor names that the Hugging Face checkpoints of the Llama lineage share; families differ in which of the
parts they have.
"""

from dataclasses import dataclass

import torch

from diptych.runtime.loader import Weights
from diptych.runtime.model_config import ModelConfig
from diptych.runtime.ops.ops import Linear, Ops


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """qkv: hidden -> all query heads, then all key heads, then all value heads. Norms: [head_dim], Qwen3 only."""

    qkv: Linear
    output: Linear
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """gate_up: hidden -> silu(gate) * up, of intermediate size. down: intermediate -> hidden."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer."""

    input_norm: torch.Tensor  # [hidden]
    attention: AttentionWeights
    mlp_norm: torch.Tensor  # [hidden]
    mlp: MlpWeights
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    lm_head: Linear  # hidden -> vocab


class LayerLoader:
    """Loads the parts of one model; a family calls it with what it has."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        self.config = config
        self.weights = weights
        self.memory = weights.memory
        self.ops = ops

    def attention(
        self, layer: int, *, qkv_bias: bool = False, output_bias: bool = False, qk_norm: bool = False
    ) -> AttentionWeights:
        """The attention of one layer, q, k and v fused."""
        shape = self.config.attention
        prefix = f"model.layers.{layer}.self_attn"
        rows = [count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        norm = (shape.head_dim,)
        return AttentionWeights(
            qkv=self.linear(names, rows, self.config.hidden_size, bias=qkv_bias),
            output=self.linear([f"{prefix}.o_proj"], [self.config.hidden_size], rows[0], bias=output_bias),
            q_norm=self.weights.tensor(f"{prefix}.q_norm.weight", norm) if qk_norm else None,
            k_norm=self.weights.tensor(f"{prefix}.k_norm.weight", norm) if qk_norm else None,
        )

    def mlp(self, layer: int, *, bias: bool = False) -> MlpWeights:
        """The gated MLP of one layer, gate and up fused."""
        prefix = f"model.layers.{layer}.mlp"
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        return MlpWeights(
            gate_up=self.linear(names, [inner, inner], hidden, bias=bias, gated=True),
            down=self.linear([f"{prefix}.down_proj"], [hidden], inner, bias=bias),
        )

    def layer(self, index: int, attention: AttentionWeights, mlp: MlpWeights) -> LayerWeights:
        """One layer out of its loaded parts."""
        prefix, hidden = f"model.layers.{index}", (self.config.hidden_size,)
        return LayerWeights(
            input_norm=self.weights.tensor(f"{prefix}.input_layernorm.weight", hidden),
            attention=attention,
            mlp_norm=self.weights.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            mlp=mlp,
            window=self.config.attention.windows[index],
        )

    def decoder(self, layers: tuple[LayerWeights, ...]) -> DecoderWeights:
        """The model around its layers; complains of tensors that nobody asked for."""
        config = self.config
        shape = (config.vocab_size, config.hidden_size)
        embedding = self.weights.tensor("model.embed_tokens.weight", shape)
        norm = self.weights.tensor("model.norm.weight", (config.hidden_size,))
        if config.tie_word_embeddings:
            lm_head = self.ops.pack_linear(embedding, None, self.memory)
            self.weights.ignore("lm_head.weight")
        else:
            lm_head = self.linear(["lm_head"], [config.vocab_size], config.hidden_size, bias=False)
        self.weights.finish()
        return DecoderWeights(embedding, layers, norm, lm_head)

    def linear(self, names: list[str], rows: list[int], columns: int, *, bias: bool, gated: bool = False) -> Linear:
        """A packed linear layer from one or more stacked ones; gated: see Ops.pack_gate_up."""
        vector = self.memory.keep(self.weights.fused([f"{name}.bias" for name in names], rows)) if bias else None
        pack = self.ops.pack_gate_up if gated else self.ops.pack_linear
        return pack(self.weights.fused([f"{name}.weight" for name in names], rows, columns), vector, self.memory)
