"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v; some layers may have a sliding window."""

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.llama import Llama, LlamaConfig, read_llama_config

DEFAULT_WINDOW = 4096  # what a config means that does not say
DEFAULT_FIRST_WINDOW_LAYER = 28  # likewise
DEFAULT_KV_HEADS = 32  # likewise
LAYER_TYPES = ("full_attention", "sliding_attention")


class Qwen2(Llama):
    """A LanguageModel of the Qwen2 family: Llama with biases on the query, key and value projections."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> LlamaConfig:
        return read_llama_config(fields, windows=read_qwen_windows(fields), kv_heads=DEFAULT_KV_HEADS, qkv_bias=True)


def read_qwen_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """Each layer's sliding window. A window that no context can exceed counts as none."""
    num_layers = fields.integer("num_hidden_layers")
    window = _window(fields)
    kinds = fields.values.get("layer_types")
    if kinds is None:
        first = fields.values.get("max_window_layers", DEFAULT_FIRST_WINDOW_LAYER)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise fields.unsupported("max_window_layers", "a whole number of at least 0")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise fields.unsupported("layer_types", f"num_hidden_layers ({num_layers}) times {' or '.join(LAYER_TYPES)}")
    if "sliding_attention" in kinds and not fields.flag("use_sliding_window"):
        raise fields.unsupported("layer_types", "full_attention, as use_sliding_window is false")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(fields: ConfigFields) -> int | None:
    """The window of the layers that have one; None where there is none, or where no context is longer."""
    if not fields.flag("use_sliding_window") or fields.values.get("sliding_window", DEFAULT_WINDOW) is None:
        return None
    window = fields.integer("sliding_window", DEFAULT_WINDOW)
    return None if window >= fields.integer("max_position_embeddings") else window
