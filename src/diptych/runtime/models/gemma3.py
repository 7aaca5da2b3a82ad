"""Gemma 3 (text): Gemma 2 with norms of queries and keys, without soft caps, with five layers of a sliding window to
each with full attention, and with a rotary table for each of the two kinds."""

from collections.abc import Mapping
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig
from diptych.runtime.models.gemma2 import DEFAULTS, read_gemma, read_norm
from diptych.runtime.models.model_config import FULL, SLIDING, read_layer_kinds, read_ropes_by_kind

GEMMA3_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 131_072,
    "vocab_size": 262_208,
}


class Gemma3(Decoder):
    """A LanguageModel: Gemma 3, its text part."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(GEMMA3_DEFAULTS)
        pattern = fields.integer("sliding_window_pattern", 6)
        default = [SLIDING if (i + 1) % pattern else FULL for i in range(fields.integer("num_hidden_layers"))]
        kinds = read_layer_kinds(fields, default)
        thetas = {
            FULL: fields.number("rope_theta", 1_000_000.0),
            SLIDING: fields.number("rope_local_base_freq", 10_000.0),
        }
        ropes = read_ropes_by_kind(fields, thetas)
        return read_gemma(fields, kinds, [ropes[kind] for kind in kinds], qk_norm=read_norm(fields))
