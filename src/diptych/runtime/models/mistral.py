"""Mistral: Llama without biases, with a sliding window in every layer."""

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.llama import Llama, LlamaConfig, read_llama_config

DEFAULT_WINDOW = 4096  # what a config means that does not say
DEFAULT_KV_HEADS = 8  # likewise
FULL, SLIDING = "full_attention", "sliding_attention"


class Mistral(Llama):
    """A LanguageModel of the Mistral family: Llama with a sliding window."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> LlamaConfig:
        window = _window(fields)
        kinds = (SLIDING,) if window is not None else (FULL, SLIDING)  # alike where no context is longer
        if any(kind not in kinds for kind in fields.values.get("layer_types") or ()):
            raise fields.unsupported("layer_types", f"{' or '.join(kinds)} in every layer, as sliding_window says")
        windows = () if window is None else (window,) * fields.integer("num_hidden_layers")
        return read_llama_config(fields, windows=windows, kv_heads=DEFAULT_KV_HEADS)


def _window(fields: ConfigFields) -> int | None:
    """The window of every layer; None where no context is longer."""
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    window = fields.integer("sliding_window", DEFAULT_WINDOW)
    return None if window >= fields.integer("max_position_embeddings") else window
