"""SmolLM3: Llama in which some layers do not rotate queries and keys; these may have a sliding window."""

from collections.abc import Mapping
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, read_decoder
from diptych.runtime.models.model_config import FULL, SLIDING, read_layer_kinds, read_rope

DEFAULTS: Mapping[str, Any] = {  # what a config means that does not say
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 11_008,
    "max_position_embeddings": 32_768,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 128_256,
}
DEFAULT_THETA = 2_000_000.0


class SmolLM3(Decoder):
    """A LanguageModel: SmolLM3: Llama with layers that do not rotate."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        rotates, rope = _rotates(fields), read_rope(fields, theta=DEFAULT_THETA)
        bias = fields.flag("attention_bias")
        return read_decoder(
            fields,
            [rope if is_rotated else None for is_rotated in rotates],
            windows=_windows(fields, rotates),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=fields.flag("mlp_bias"),
        )


def _rotates(fields: ConfigFields) -> list[bool]:
    """Whether each layer rotates queries and keys. ``no_rope_layers`` has a 1 for those that do."""
    num_layers = fields.integer("num_hidden_layers")
    marks = fields.values.get("no_rope_layers")
    if marks is None:
        interval = fields.integer("no_rope_layer_interval")
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(marks, list) or len(marks) < num_layers or any(mark not in (0, 1) for mark in marks):
        raise fields.unsupported("no_rope_layers", f"an array of 0 and 1 for each of num_hidden_layers ({num_layers})")
    return [bool(mark) for mark in marks[:num_layers]]


def _windows(fields: ConfigFields, rotates: list[bool]) -> tuple[int | None, ...]:
    """Each layer's window; where the kinds of layers are not said, those that do not rotate have it."""
    has_windows = fields.flag("use_sliding_window") and fields.values.get("sliding_window") is not None
    default = [SLIDING if has_windows and not is_rotated else FULL for is_rotated in rotates]
    kinds = read_layer_kinds(fields, default)
    if SLIDING not in kinds:
        return (None,) * len(kinds)
    if not has_windows:
        raise fields.unsupported("layer_types", f"{FULL}, as use_sliding_window and sliding_window say")
    window = fields.integer("sliding_window")
    seen = None if window >= fields.integer("max_position_embeddings") else window
    return tuple(seen if kind == SLIDING else None for kind in kinds)
