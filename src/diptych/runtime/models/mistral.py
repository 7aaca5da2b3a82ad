"""Mistral: Llama without biases, with a sliding window in every layer."""

from diptych.runtime.model_config import ConfigFields
from diptych.runtime.models.llama import Llama, LlamaConfig, read_llama_config

DEFAULT_WINDOW = 4096  # what a config means that does not say


class Mistral(Llama):
    """See LanguageModel."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> LlamaConfig:
        """See LanguageModel."""
        if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
            return read_llama_config(fields)
        window = fields.integer("sliding_window", DEFAULT_WINDOW)
        if window >= fields.integer("max_position_embeddings"):  # no context is longer
            return read_llama_config(fields)
        return read_llama_config(fields, windows=(window,) * fields.integer("num_hidden_layers"))
