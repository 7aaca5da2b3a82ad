"""Qwen3 (dense): Llama with an RMS norm on each query and key head; some layers may have a sliding window."""

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, NormConfig
from diptych.runtime.models.llama import read_llama_config
from diptych.runtime.models.qwen2 import DEFAULT_KV_HEADS, read_qwen_windows

DEFAULT_HEAD_DIM = 128  # what a config means that does not say


class Qwen3(Decoder):
    """A LanguageModel: Qwen3: Llama with norms on queries and keys."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        bias = fields.flag("attention_bias")
        return read_llama_config(
            fields,
            read_qwen_windows(fields),
            head_dim=DEFAULT_HEAD_DIM,
            kv_heads=DEFAULT_KV_HEADS,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=NormConfig(fields.number("rms_norm_eps", 1e-6)),
        )
