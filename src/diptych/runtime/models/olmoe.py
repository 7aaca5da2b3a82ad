"""OLMoE: Llama whose layers are mixtures of many small experts, with norms of all queries together and of all keys
together."""

from collections.abc import Mapping
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, NormConfig
from diptych.runtime.models.experts import read_experts, read_routing
from diptych.runtime.models.llama import read_llama_config

DEFAULTS: Mapping[str, Any] = {  # what a config means that does not say
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 50_304,
}
DEFAULT_EXPERTS, DEFAULT_TOP_K = 64, 8  # likewise


class Olmoe(Decoder):
    """A LanguageModel: OLMoE."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        bias, is_normalized = fields.flag("attention_bias"), fields.flag("norm_topk_prob")
        routing = read_routing(fields, DEFAULT_EXPERTS, DEFAULT_TOP_K, is_normalized=is_normalized)
        return read_llama_config(
            fields,
            qk_norm=NormConfig(fields.number("rms_norm_eps")),
            norms_rows=True,
            qkv_bias=bias,
            output_bias=bias,
            experts=read_experts(fields, routing),
        )
