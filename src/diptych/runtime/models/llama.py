"""Llama: pre-norm layers of grouped-query attention and a SiLU-gated MLP. Mistral, Qwen2 and Qwen3 are this model with
other biases, windows and norms of queries and keys; their files say which."""

from collections.abc import Sequence
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, read_decoder
from diptych.runtime.models.model_config import FULL, read_rope


class Llama(Decoder):
    """A LanguageModel: Llama."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        _check_no_windows(fields)
        bias = fields.flag("attention_bias")
        return read_llama_config(fields, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def read_llama_config(fields: ConfigFields, windows: Sequence[int | None] = (), **differences: Any) -> DecoderConfig:
    """What a family reads whose layers are rotated alike. windows, differences: see read_decoder."""
    ropes = (read_rope(fields),) * fields.integer("num_hidden_layers")
    return read_decoder(fields, ropes, windows=windows, **differences)


def _check_no_windows(fields: ConfigFields) -> None:
    """Raise for a file that asks for windows, which no layer of Llama has."""
    window, is_off = fields.values.get("sliding_window"), fields.values.get("use_sliding_window") is False
    if window is not None and not is_off:
        limit = fields.integer("max_position_embeddings")
        if fields.integer("sliding_window") < limit:
            raise fields.unsupported("sliding_window", f"null, or at least max_position_embeddings ({limit})")
    if any(kind != FULL for kind in fields.values.get("layer_types") or ()):
        raise fields.unsupported("layer_types", FULL)
