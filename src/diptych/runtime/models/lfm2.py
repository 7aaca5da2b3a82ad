"""LFM2 and LFM2.5: most layers mix tokens by a short convolution, gated before and behind it; the others attend to
everything, with norms on queries and keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import ConvolutionConfig, Decoder, DecoderConfig, NormConfig, read_decoder
from diptych.runtime.models.model_config import CONVOLUTION, FULL, read_heads, read_rope

MAX_TAPS = 16  # what the native kernels keep at hand
DEFAULT_THETA = 1_000_000.0
DEFAULTS: Mapping[str, Any] = {  # what a config means that does not say
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 65_536,
}
PART_NAMES = {
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "out_proj",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "norm": "embedding_norm",
}


class Lfm2(Decoder):
    """A LanguageModel: LFM2: short convolutions beside full attention."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        convolution = read_convolution(fields)
        norm = NormConfig(fields.number("norm_eps"))
        windows: list[int | None] = []
        for is_convolution in convolution.layers:
            windows += [convolution.taps] * convolution.num_caches if is_convolution else [None]
        tied = "tie_word_embeddings" if fields.values.get("tie_embedding") is None else "tie_embedding"
        config = read_decoder(
            fields,
            (read_rope(fields, theta=DEFAULT_THETA),) * len(convolution.layers),
            windows=windows,
            norm=norm,
            before_norm=norm,
            qk_norm=norm,
            intermediate_size=_intermediate_size(fields),
            tie_word_embeddings=fields.flag(tied),
            convolution=convolution,
            part_names=PART_NAMES,
        )
        layers = [replace(how, holds_inputs=how.window is not None) for how in config.attention.layers]
        return replace(config, attention=replace(config.attention, layers=tuple(layers)))


def read_convolution(fields: ConfigFields) -> ConvolutionConfig:
    """Which layers are convolutions, and how. Raises UnsupportedModelError."""
    num_layers, taps = fields.integer("num_hidden_layers"), fields.integer("conv_L_cache")
    if taps > MAX_TAPS:
        raise fields.unsupported("conv_L_cache", f"at most {MAX_TAPS}")
    kinds = fields.values.get("layer_types")
    if kinds is None:
        chosen, all_layers = fields.values.get("full_attn_idxs"), range(num_layers)
        if chosen is not None and not (isinstance(chosen, list) and all(index in all_layers for index in chosen)):
            raise fields.unsupported("full_attn_idxs", f"an array of numbers below num_hidden_layers ({num_layers})")
        kinds = [FULL if chosen is None or index in chosen else CONVOLUTION for index in range(num_layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in (FULL, CONVOLUTION) for kind in kinds)
    ):
        raise fields.unsupported("layer_types", f"num_hidden_layers ({num_layers}) times {FULL} or {CONVOLUTION}")
    _, num_kv_heads, head_dim = read_heads(fields)
    num_caches = -(-fields.integer("hidden_size") // (2 * num_kv_heads * head_dim))
    layers = tuple(kind == CONVOLUTION for kind in kinds)
    return ConvolutionConfig(layers, taps, fields.flag("conv_bias"), num_caches)


def _intermediate_size(fields: ConfigFields) -> int:
    """How wide the MLPs are: two thirds of what the file says, times a factor, rounded up, unless it says that it means
    what it says. Older files have another name for it."""
    name = "intermediate_size" if fields.values.get("block_ff_dim") is None else "block_ff_dim"
    size = fields.integer(name)
    if not fields.flag("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    if fields.values.get("block_ffn_dim_multiplier") is not None:
        multiple = fields.integer("block_multiple_of")
        size = -(-int(fields.number("block_ffn_dim_multiplier") * size) // multiple) * multiple
    return size
