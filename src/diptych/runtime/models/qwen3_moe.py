"""Qwen3 with experts (30B-A3B, 235B-A22B, Coder): Qwen3 whose layers are mixtures, all of them or every n-th."""

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, NormConfig
from diptych.runtime.models.experts import ExpertsConfig, read_experts, read_routing
from diptych.runtime.models.llama import read_llama_config

# what a config means that does not say
DEFAULT_KV_HEADS = 4
DEFAULT_WINDOW = 4096
DEFAULT_EXPERTS, DEFAULT_TOP_K, DEFAULT_WIDTH = 128, 8, 768


class Qwen3Moe(Decoder):
    """A LanguageModel: Qwen3 with experts."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        bias = fields.flag("attention_bias")
        return read_llama_config(
            fields,
            (_window(fields),) * fields.integer("num_hidden_layers"),
            kv_heads=DEFAULT_KV_HEADS,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=NormConfig(fields.number("rms_norm_eps", 1e-6)),
            experts=_experts(fields),
        )


def _experts(fields: ConfigFields) -> ExpertsConfig:
    """Whether weights are normalised is false where the file does not say it, and true in published files."""
    is_normalized = fields.flag("norm_topk_prob")
    routing = read_routing(fields, DEFAULT_EXPERTS, DEFAULT_TOP_K, is_normalized=is_normalized)
    layers = _mixtures(fields)
    return read_experts(fields, routing, width_field="moe_intermediate_size", width=DEFAULT_WIDTH, layers=layers)


def _mixtures(fields: ConfigFields) -> tuple[bool, ...]:
    """Which layers are mixtures: every n-th, but for those that are named as plain ones."""
    num_layers, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", 1)
    plain = fields.values.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in plain):
        raise fields.unsupported("mlp_only_layers", "a list of the numbers of layers")
    return tuple(index not in plain and (index + 1) % step == 0 for index in range(num_layers))


def _window(fields: ConfigFields) -> int | None:
    """The window of every layer; None where there is none, or where no context is longer."""
    if not fields.flag("use_sliding_window") or fields.values.get("sliding_window", DEFAULT_WINDOW) is None:
        return None
    window = fields.integer("sliding_window", DEFAULT_WINDOW)
    return None if window >= fields.integer("max_position_embeddings") else window
