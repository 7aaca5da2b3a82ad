"""Muse Glimmer (text): Gemma 2's norms with a SiLU-gated MLP, normed embeddings, norms of queries and keys without
weights, a gate on what attention gives, and layers with full attention that do not rotate queries and keys."""

from collections.abc import Mapping
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, NormConfig, read_decoder
from diptych.runtime.models.model_config import (
    FULL,
    SLIDING,
    RopeConfig,
    read_heads,
    read_layer_kinds,
    read_rope,
    read_windows,
)

DEFAULTS: Mapping[str, Any] = {  # what a config means that does not say
    "attention_bias": False,
    "final_logit_softcapping": 20.0,
    "head_dim": 128,
    "hidden_activation": "silu",
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "output_multiplier": 0.19611613513818404,
    "post_norm_eps": 1e-8,
    "qk_scale_factor": 3.87,
    "rms_norm_eps": 1e-5,
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "vocab_size": 202_048,
}
FULL_EVERY = 4  # layers, counted from the last


class MuseGlimmer(Decoder):
    """A LanguageModel: Muse-Glimmer."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        fields.require("hidden_activation", "silu", "swish")
        num_layers, bias = fields.integer("num_hidden_layers"), fields.flag("attention_bias")
        is_full = [(num_layers - 1 - index) % FULL_EVERY == 0 for index in range(num_layers)]
        kinds = read_layer_kinds(fields, [FULL if full else SLIDING for full in is_full])
        eps = fields.number("rms_norm_eps")
        return read_decoder(
            fields,
            _ropes(fields, is_full),
            windows=read_windows(fields, kinds),
            scale=fields.number("qk_scale_factor") * read_heads(fields)[-1] ** -0.5,
            norm=NormConfig(eps, "wide"),
            before_norm=NormConfig(eps, "centered"),
            after_norm=NormConfig(fields.number("post_norm_eps"), "centered"),
            qk_norm=NormConfig(eps, "plain"),
            embedding_norm=NormConfig(eps, "plain"),
            qkv_bias=bias,
            output_bias=bias,
            logits_multiplier=fields.number("output_multiplier"),
            final_softcap=fields.number("final_logit_softcapping"),
            has_attention_gate=True,
        )


def _ropes(fields: ConfigFields, is_full: list[bool]) -> list[RopeConfig | None]:
    """Rope settings of each layer. ``layer_rope_theta`` says only which layers rotate: transformers has one table for
    all of them."""
    rope, thetas = read_rope(fields), fields.values.get("layer_rope_theta")
    if thetas is None:
        return [None if full else rope for full in is_full]
    if not isinstance(thetas, list) or len(thetas) != len(is_full) or any(t not in (0, rope.theta) for t in thetas):
        raise fields.unsupported("layer_rope_theta", f"num_hidden_layers ({len(is_full)}) times 0 or {rope.theta}")
    return [rope if theta else None for theta in thetas]
