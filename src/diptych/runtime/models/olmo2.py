"""OLMo 2: Llama whose norms are behind attention and MLP and not before them, with norms of all queries together and of
all keys together."""

from collections.abc import Mapping, Sequence
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, NormConfig, read_decoder
from diptych.runtime.models.model_config import RopeConfig, read_rope

DEFAULTS: Mapping[str, Any] = {  # what a config means that does not say
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 50_304,
}


class Olmo2(Decoder):
    """A LanguageModel: OLMo 2: norms behind attention and MLP."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        return read_olmo(fields, (read_rope(fields),) * fields.integer("num_hidden_layers"))


def read_olmo(fields: ConfigFields, ropes: Sequence[RopeConfig], windows: Sequence[int | None] = ()) -> DecoderConfig:
    """What OLMo 2 and 3 read alike. ropes, windows: of each layer."""
    norm, bias = NormConfig(fields.number("rms_norm_eps"), "wide"), fields.flag("attention_bias")
    return read_decoder(
        fields,
        ropes,
        windows=windows,
        norm=norm,
        before_norm=None,
        after_norm=norm,
        qk_norm=norm,
        norms_rows=True,
        qkv_bias=bias,
        output_bias=bias,
    )
