"""gpt-oss: layers of experts with biases and a clamped activation, a window in every other layer, and sinks in every
softmax of attention."""

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, cast

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, NormConfig, read_decoder
from diptych.runtime.models.experts import ClampedSwish, read_experts, read_routing
from diptych.runtime.models.model_config import FULL, SLIDING, read_layer_kinds, read_rope, read_windows

DEFAULTS: Mapping[str, Any] = {  # what a config means that does not say
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 64,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201_088,
}
DEFAULT_ROPE: Mapping[str, Any] = {  # likewise
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULT_THETA = 150_000.0  # likewise
DEFAULT_EXPERTS, DEFAULT_TOP_K = 128, 4  # likewise


class GptOss(Decoder):
    """A LanguageModel: gpt-oss."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        if fields.values.get("rope_parameters") is None and fields.values.get("rope_scaling") is None:
            fields = fields.with_values(
                ChainMap({"rope_parameters": dict(DEFAULT_ROPE)}, cast(dict[str, Any], fields.values))
            )
        num_layers = fields.integer("num_hidden_layers")
        kinds = read_layer_kinds(fields, [FULL if index % 2 else SLIDING for index in range(num_layers)])
        bias = fields.flag("attention_bias")
        norm = NormConfig(fields.number("rms_norm_eps"), "wide")
        routing = read_routing(fields, DEFAULT_EXPERTS, DEFAULT_TOP_K, scoring="softmax_of_top")
        return read_decoder(
            fields,
            (read_rope(fields, theta=DEFAULT_THETA),) * num_layers,
            windows=read_windows(fields, kinds),
            has_sinks=True,
            norm=norm,
            before_norm=norm,
            activation=ClampedSwish(fields.number("swiglu_limit"), fields.number("swiglu_alpha")),
            qkv_bias=bias,
            output_bias=bias,
            experts=read_experts(fields, routing, has_bias=True, is_interleaved=True),
        )
