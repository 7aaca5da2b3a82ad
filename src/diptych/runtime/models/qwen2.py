"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v; some layers may have a sliding window."""

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig
from diptych.runtime.models.llama import read_llama_config
from diptych.runtime.models.model_config import FULL, SLIDING, read_layer_kinds

DEFAULT_WINDOW = 4096  # what a config means that does not say
DEFAULT_FIRST_WINDOW_LAYER = 28  # likewise
DEFAULT_KV_HEADS = 32  # likewise


class Qwen2(Decoder):
    """A LanguageModel: Qwen2: Llama with biases on the query, key and value projections."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        return read_llama_config(fields, read_qwen_windows(fields), kv_heads=DEFAULT_KV_HEADS, qkv_bias=True)


def read_qwen_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """Each layer's sliding window. A window that no context can exceed counts as none."""
    window = _window(fields)
    if fields.values.get("layer_types") is not None:
        kinds = read_layer_kinds(fields, ())
        if SLIDING in kinds and not fields.flag("use_sliding_window"):
            raise fields.unsupported("layer_types", f"{FULL}, as use_sliding_window is false")
        return tuple(window if kind == SLIDING else None for kind in kinds)
    first = fields.values.get("max_window_layers", DEFAULT_FIRST_WINDOW_LAYER)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise fields.unsupported("max_window_layers", "a whole number of at least 0")
    return tuple(window if layer >= first else None for layer in range(fields.integer("num_hidden_layers")))


def _window(fields: ConfigFields) -> int | None:
    """The window of the layers that have one; None where there is none, or where no context is longer."""
    if not fields.flag("use_sliding_window") or fields.values.get("sliding_window", DEFAULT_WINDOW) is None:
        return None
    window = fields.integer("sliding_window", DEFAULT_WINDOW)
    return None if window >= fields.integer("max_position_embeddings") else window
