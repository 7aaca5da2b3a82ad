"""Ministral 3 and Devstral 2: Mistral with queries that are scaled up beyond the original context."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, read_decoder
from diptych.runtime.models.mistral import read_mistral_windows
from diptych.runtime.models.model_config import read_rope

DEFAULTS: Mapping[str, Any] = {  # what a config means that does not say
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "max_position_embeddings": 262_144,
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 131_072,
}
DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Ministral3(Decoder):
    """A LanguageModel: Ministral 3, Mistral Small 3 and Devstral 2."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        if not fields.values.get("rope_scaling") and fields.values.get("rope_parameters") is None:
            fields = fields.with_defaults({"rope_parameters": dict(DEFAULT_ROPE)})
        rope = read_rope(fields)
        scaling = fields.nested("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")
        rope = replace(
            rope,
            llama_4_scaling_beta=scaling.number("llama_4_scaling_beta"),
            original_max_positions=scaling.integer("original_max_position_embeddings"),
        )
        ropes = (rope,) * fields.integer("num_hidden_layers")
        return read_decoder(fields, ropes, windows=read_mistral_windows(fields))
