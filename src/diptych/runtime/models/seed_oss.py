"""Seed-OSS: Llama with a bias on q, k and v, and perhaps on o."""

from collections.abc import Mapping
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig
from diptych.runtime.models.llama import read_llama_config

DEFAULTS: Mapping[str, Any] = {  # what a config means that does not say
    "attention_bias": True,
    "attention_out_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 27_648,
    "max_position_embeddings": 524_288,
    "mlp_bias": False,
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 155_136,
}


class SeedOss(Decoder):
    """A LanguageModel: Seed-OSS."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        return read_llama_config(
            fields,
            qkv_bias=fields.flag("attention_bias"),
            output_bias=fields.flag("attention_out_bias"),
            mlp_bias=fields.flag("mlp_bias"),
        )
