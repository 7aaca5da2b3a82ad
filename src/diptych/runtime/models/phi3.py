"""Phi-3, Phi-4 and Phi-4-mini: Llama whose checkpoints hold q, k and v in one tensor, and gate and up in one; some
rotate only a part of each head, and have two sets of rotary factors for short and long contexts."""

from collections.abc import Mapping
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, read_decoder
from diptych.runtime.models.model_config import RopeConfig, read_heads, read_rope

DEFAULTS: Mapping[str, Any] = {  # what a config means that does not say
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": None,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32_064,
}
OLD_NAMES = ("su", "yarn")  # of longrope, in older files


class Phi3(Decoder):
    """A LanguageModel: Phi-3 and Phi-4: fused projections, partial rotary embeddings, longrope."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        num_layers = fields.integer("num_hidden_layers")
        return read_decoder(
            fields, (read_longrope(fields),) * num_layers, windows=(_window(fields),) * num_layers, is_fused=True
        )


def _window(fields: ConfigFields) -> int | None:
    """The window of every layer; None where no context is longer."""
    if fields.values.get("sliding_window") is None:
        return None
    window = fields.integer("sliding_window")
    return None if window >= fields.integer("max_position_embeddings") else window


def read_longrope(fields: ConfigFields, *, theta: float = 10_000.0, is_partial: bool = True) -> RopeConfig:
    """A rotation with or without factors for short and for long contexts. theta, is_partial: see read_rope."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = fields.nested(name).values
        key = "rope_type" if "rope_type" in scaling else "type"
        if scaling.get(key) in OLD_NAMES:
            fields = fields.with_defaults({}).with_values({**fields.values, name: {**scaling, key: "longrope"}})
    rope = read_rope(fields, kinds=("default", "longrope", "factors"), theta=theta, is_partial=is_partial)
    count = rope.rotary_of(read_heads(fields)[-1]) // 2
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if rope.kind == "longrope" and len(factors) != count:
            holder = fields.nested("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")
            raise holder.unsupported(name, f"{count} numbers, one for each pair of rotated values")
    return rope
