"""Llama: pre-norm layers of grouped-query attention and a SiLU-gated MLP. Mistral, Qwen2 and Qwen3 are this model with
other biases, windows and norms of queries and keys; their files say which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.model_config import (
    AttentionConfig,
    LayerAttention,
    ModelConfig,
    RopeConfig,
    read_common,
    read_heads,
    read_rope,
)

if TYPE_CHECKING:
    import torch

    from diptych.runtime.layers.forward_pass import ForwardPass
    from diptych.runtime.layers.layer_loader import LayerLoader


FULL_ATTENTION = "full_attention"  # in layer_types


@dataclass(frozen=True, slots=True)
class LlamaConfig(ModelConfig):
    """qk_norm: queries and keys are normed, head by head, before they are rotated."""

    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


def read_llama_config(
    fields: ConfigFields,
    *,
    windows: Sequence[int | None] = (),
    head_dim: int | None = None,
    kv_heads: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> LlamaConfig:
    """What the family's variants read alike. windows: one per layer (none given: no layer has one). head_dim: where the
    file does not say it (None: hidden_size divided by the number of heads). kv_heads: likewise (None: as many as there
    are heads)."""
    heads = read_heads(fields, head_dim, kv_heads)
    scale = heads[-1] ** -0.5
    layers = tuple(LayerAttention(scale, window) for window in windows or (None,) * fields.integer("num_hidden_layers"))
    return LlamaConfig(
        **read_common(fields),
        attention=AttentionConfig(*heads, layers),
        intermediate_size=fields.integer("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def _check_no_windows(fields: ConfigFields) -> None:
    """Raise for a file that asks for windows, which no layer of Llama has."""
    window, is_off = fields.values.get("sliding_window"), fields.values.get("use_sliding_window") is False
    if window is not None and not is_off:
        limit = fields.integer("max_position_embeddings")
        if fields.integer("sliding_window") < limit:
            raise fields.unsupported("sliding_window", f"null, or at least max_position_embeddings ({limit})")
    if any(kind != FULL_ATTENTION for kind in fields.values.get("layer_types") or ()):
        raise fields.unsupported("layer_types", FULL_ATTENTION)


class LlamaLayer:
    """The parts of one layer, loaded from ``model.layers.{index}``."""

    def __init__(self, config: LlamaConfig, load: LayerLoader, index: int) -> None:
        heads, hidden, inner, eps = config.attention, config.hidden_size, config.intermediate_size, config.norm_eps
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        self.input_norm = load.rms_norm(f"{layer}.input_layernorm", hidden, eps)
        self.qkv = load.qkv(attention, hidden, heads, bias=config.qkv_bias)
        q_norm = load.rms_norm(f"{attention}.q_norm", heads.head_dim, eps) if config.qk_norm else None
        k_norm = load.rms_norm(f"{attention}.k_norm", heads.head_dim, eps) if config.qk_norm else None
        self.rope = load.rope(config.rope, q_norm, k_norm)
        self.attention = load.attention(heads.layers[index])
        self.o_proj = load.linear(f"{attention}.o_proj", heads.query_width, hidden, bias=config.output_bias)
        self.mlp_norm = load.rms_norm(f"{layer}.post_attention_layernorm", hidden, eps)
        self.gate_up = load.gate_up(mlp, hidden, inner, bias=config.mlp_bias)
        self.down = load.linear(f"{mlp}.down_proj", inner, hidden, bias=config.mlp_bias)


class Llama:
    """A LanguageModel of the Llama family."""

    fits_cuda_graphs = True

    def __init__(self, config: LlamaConfig, load: LayerLoader) -> None:
        self.config = config
        is_tied = config.tie_word_embeddings
        self.embed_tokens = load.embedding("model.embed_tokens", config.vocab_size, config.hidden_size, is_tied=is_tied)
        self.layers = [LlamaLayer(config, load, index) for index in range(config.num_layers)]
        self.norm = load.rms_norm("model.norm", config.hidden_size, config.norm_eps)
        self.lm_head = load.lm_head(self.embed_tokens, is_tied=is_tied)
        self.native_step = load.native_step(self.layers, self.norm)

    @classmethod
    def read_config(cls, fields: ConfigFields) -> LlamaConfig:
        _check_no_windows(fields)
        bias = fields.flag("attention_bias")
        return read_llama_config(fields, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))

    def forward(self, step: ForwardPass) -> torch.Tensor:
        residual = self.embed_tokens(step.batch.token_ids)  # [num_tokens, hidden], as x
        if self.native_step is not None and step.batch.is_decode:
            return self.native_step(residual, step)
        norms = [*(layer.input_norm for layer in self.layers), self.norm]
        x = norms[0](residual)
        for index, layer in enumerate(self.layers):
            cache = step.begin_layer(index)
            q = layer.rope(layer.qkv(x), cache, step.batch)
            x = layer.attention(q, cache, step)
            x, residual = step.rows_to_keep(index, x, residual)
            x = layer.mlp_norm.of_sum(layer.o_proj(x), residual)
            x = layer.down(layer.gate_up(x))
            x = norms[index + 1].of_sum(x, residual)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)
