"""Phi-3.5-MoE: mixtures of experts of which a token takes two, by sparsemixer; norms that subtract the mean, a bias of
the lm_head, and rotary factors for short and long contexts, each with a factor of its own for attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, NormConfig, read_decoder
from diptych.runtime.models.experts import read_experts, read_routing
from diptych.runtime.models.mixtral import read_window
from diptych.runtime.models.model_config import RopeConfig
from diptych.runtime.models.phi3 import read_longrope

DEFAULTS: Mapping[str, Any] = {  # what a config means that does not say
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 6400,
    "lm_head_bias": False,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "router_jitter_noise": 0.01,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32_064,
}
DEFAULT_THETA = 1e6  # likewise
DEFAULT_EXPERTS, DEFAULT_TOP_K = 16, 2  # likewise


class Phimoe(Decoder):
    """A LanguageModel: Phi-3.5-MoE."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        num_layers = fields.integer("num_hidden_layers")
        bias, head_bias = fields.flag("attention_bias"), fields.flag("lm_head_bias")
        if head_bias and fields.flag("tie_word_embeddings"):
            raise fields.unsupported("lm_head_bias", "false, as tie_word_embeddings is true")
        norm = NormConfig(fields.number("rms_norm_eps"), "layer")
        jitter = fields.number("router_jitter_noise")
        routing = read_routing(fields, DEFAULT_EXPERTS, DEFAULT_TOP_K, scoring="sparsemixer", jitter=jitter)
        if routing[0].top_k != 2:
            raise fields.unsupported("num_experts_per_tok", "2")
        return read_decoder(
            fields,
            (_read_rope(fields),) * num_layers,
            windows=(read_window(fields),) * num_layers,
            norm=norm,
            before_norm=norm,
            qkv_bias=bias,
            output_bias=bias,
            head_bias=head_bias,
            experts=read_experts(fields, routing),
        )


def _read_rope(fields: ConfigFields) -> RopeConfig:
    rope = read_longrope(fields, theta=DEFAULT_THETA, is_partial=False)
    if rope.kind != "longrope":
        return rope
    scaling = fields.nested("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")
    return replace(
        rope,
        short_attention_factor=scaling.number("short_mscale"),
        long_attention_factor=scaling.number("long_mscale"),
    )
