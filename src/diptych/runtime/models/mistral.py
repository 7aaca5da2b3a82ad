"""Mistral: Llama without biases, with a sliding window in every layer."""

from diptych.runtime.model_config import ConfigFields
from diptych.runtime.models.llama import Llama, LlamaConfig, read_llama_config

DEFAULT_WINDOW = 4096  # what a config means that does not say
DEFAULT_KV_HEADS = 8  # likewise
LAYER_TYPES = {False: "full_attention", True: "sliding_attention"}  # by whether layers have a window


class Mistral(Llama):
    """See LanguageModel."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> LlamaConfig:
        """See LanguageModel."""
        window = _window(fields)
        kind = LAYER_TYPES[window is not None]
        if any(found != kind for found in fields.values.get("layer_types") or ()):
            raise fields.unsupported("layer_types", f"{kind} in every layer, as sliding_window says")
        windows = () if window is None else (window,) * fields.integer("num_hidden_layers")
        return read_llama_config(fields, windows=windows, kv_heads=DEFAULT_KV_HEADS)


def _window(fields: ConfigFields) -> int | None:
    """The window of every layer; None where no context is longer."""
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    window = fields.integer("sliding_window", DEFAULT_WINDOW)
    return None if window >= fields.integer("max_position_embeddings") else window
