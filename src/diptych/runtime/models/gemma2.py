"""Gemma 2: norms before and behind each part with 1 + weight, a GELU-gated MLP, scaled embeddings, soft caps on scores
and logits, and a sliding window in every other layer."""

from collections.abc import Mapping
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, NormConfig, NormKind, read_decoder
from diptych.runtime.models.model_config import (
    FULL,
    SLIDING,
    RopeConfig,
    read_layer_kinds,
    read_rope,
    read_windows,
)

# What a config means that does not say; the same of Gemma 2 and 3 but for what GEMMA2_DEFAULTS adds.
DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA2_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192,
    "vocab_size": 256_000,
}
NORM_OFFSET = "norm_offset"  # what is added to the weights of norms: 0 in formats that hold the sum already


class Gemma2(Decoder):
    """A LanguageModel: Gemma 2."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(GEMMA2_DEFAULTS)
        num_layers = fields.integer("num_hidden_layers")
        kinds = read_layer_kinds(fields, [FULL if index % 2 else SLIDING for index in range(num_layers)])
        return read_gemma(fields, kinds, [read_rope(fields)] * num_layers)


def read_gemma(fields: ConfigFields, kinds: tuple[str, ...], ropes: list[RopeConfig], **more: Any) -> DecoderConfig:
    """What Gemma 2 and 3 read alike. kinds, ropes: of each layer."""
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    bias = fields.flag("attention_bias")
    hidden_size = fields.integer("hidden_size")
    norm = read_norm(fields)
    return read_decoder(
        fields,
        ropes,
        windows=read_windows(fields, kinds),
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
        softcap=_softcap(fields, "attn_logit_softcapping"),
        norm=norm,
        before_norm=norm,
        after_norm=norm,
        activation="gelu_tanh",
        qkv_bias=bias,
        output_bias=bias,
        embedding_multiplier=hidden_size**0.5,
        rounds_multiplier=True,
        final_softcap=_softcap(fields, "final_logit_softcapping"),
        **more,
    )


def read_norm(fields: ConfigFields) -> NormConfig:
    """How every norm of Gemma 2 and 3 reads its weight."""
    kind: NormKind = "wide" if fields.values.get(NORM_OFFSET) == 0 else "centered"
    return NormConfig(fields.number("rms_norm_eps"), kind)


def _softcap(fields: ConfigFields, name: str) -> float | None:
    return None if fields.values.get(name) is None else fields.number(name)
