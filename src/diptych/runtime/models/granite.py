"""Granite 3 and 4 (dense): Llama with a multiplier on embeddings, on what each part adds, on scores, and on logits."""

from collections.abc import Mapping
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig
from diptych.runtime.models.llama import read_llama_config

DEFAULTS: Mapping[str, Any] = {  # what a config means that does not say
    "attention_bias": False,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "logits_scaling": 1.0,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": None,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 32_000,
}


class Granite(Decoder):
    """A LanguageModel: Granite 3 and 4 dense: Llama with multipliers."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        return read_granite(fields, mlp_bias=fields.flag("mlp_bias"))


def read_granite(fields: ConfigFields, **differences: Any) -> DecoderConfig:
    """What the models with and without experts read alike. fields: with DEFAULTS. differences: see read_decoder."""
    bias = fields.flag("attention_bias")
    return read_llama_config(
        fields,
        scale=fields.number("attention_multiplier"),
        qkv_bias=bias,
        output_bias=bias,
        embedding_multiplier=fields.number("embedding_multiplier"),
        residual_multiplier=fields.number("residual_multiplier"),
        logits_multiplier=1.0 / fields.number("logits_scaling"),
        **differences,
    )
