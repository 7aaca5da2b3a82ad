"""Mixtral: Mistral whose layers are mixtures of experts; of the experts of a token, the weights are a softmax."""

from collections.abc import Mapping
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, read_decoder
from diptych.runtime.models.experts import read_experts, read_routing
from diptych.runtime.models.model_config import read_rope

DEFAULTS: Mapping[str, Any] = {  # what a config means that does not say
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32_000,
}
DEFAULT_THETA = 1e6  # likewise
DEFAULT_EXPERTS, DEFAULT_TOP_K = 8, 2  # likewise


class Mixtral(Decoder):
    """A LanguageModel: Mixtral."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        num_layers = fields.integer("num_hidden_layers")
        routing = read_routing(fields, DEFAULT_EXPERTS, DEFAULT_TOP_K, is_normalized=True)
        return read_decoder(
            fields,
            (read_rope(fields, theta=DEFAULT_THETA),) * num_layers,
            windows=(read_window(fields),) * num_layers,
            experts=read_experts(fields, routing),
        )


def read_window(fields: ConfigFields) -> int | None:
    """The window of every layer; None where there is none, or where no context is longer."""
    if fields.values.get("sliding_window") is None:
        return None
    window = fields.integer("sliding_window")
    return None if window >= fields.integer("max_position_embeddings") else window
