"""Mistral: Llama without biases, with a sliding window in every layer."""

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig
from diptych.runtime.models.llama import read_llama_config
from diptych.runtime.models.model_config import FULL, SLIDING

DEFAULT_WINDOW = 4096  # what a config means that does not say
DEFAULT_KV_HEADS = 8  # likewise


class Mistral(Decoder):
    """A LanguageModel: Mistral: Llama with a sliding window."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        return read_llama_config(fields, read_mistral_windows(fields), kv_heads=DEFAULT_KV_HEADS)


def read_mistral_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """The window of every layer."""
    window = _window(fields)
    kinds = (SLIDING,) if window is not None else (FULL, SLIDING)  # alike where no context is longer
    if any(kind not in kinds for kind in fields.values.get("layer_types") or ()):
        raise fields.unsupported("layer_types", f"{' or '.join(kinds)} in every layer, as sliding_window says")
    return (window,) * fields.integer("num_hidden_layers")


def _window(fields: ConfigFields) -> int | None:
    """The window of every layer; None where no context is longer."""
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    window = fields.integer("sliding_window", DEFAULT_WINDOW)
    return None if window >= fields.integer("max_position_embeddings") else window
