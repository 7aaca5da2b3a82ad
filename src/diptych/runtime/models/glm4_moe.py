"""GLM-4.5 and GLM-4.6 (Air among them): layers of experts that a sigmoid chooses, with a correction of the choice alone
and an expert of all tokens, behind a few layers with one MLP; a half of each head is rotated."""

from collections.abc import Mapping
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import Decoder, DecoderConfig, NormConfig, read_decoder
from diptych.runtime.models.experts import COUNTS, read_experts, read_routing
from diptych.runtime.models.model_config import read_rope

DEFAULTS: Mapping[str, Any] = {  # what a config means that does not say
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "max_position_embeddings": 131_072,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "use_qk_norm": False,
    "vocab_size": 151_552,
}
DEFAULT_EXPERTS, DEFAULT_TOP_K = 128, 8  # likewise


class Glm4Moe(Decoder):
    """A LanguageModel: GLM-4.5 and GLM-4.6."""

    @classmethod
    def read_config(cls, fields: ConfigFields) -> DecoderConfig:
        fields = fields.with_defaults(DEFAULTS)
        num_layers, first = fields.integer("num_hidden_layers"), fields.count("first_k_dense_replace")
        routing = read_routing(
            fields,
            DEFAULT_EXPERTS,
            DEFAULT_TOP_K,
            names=(*COUNTS, "n_routed_experts"),
            scoring="sigmoid",
            is_normalized=fields.flag("norm_topk_prob"),
            scale=fields.number("routed_scaling_factor"),
        )
        experts = read_experts(
            fields,
            routing,
            width_field="moe_intermediate_size",
            layers=[index >= first for index in range(num_layers)],
            shared_size=fields.integer("moe_intermediate_size") * fields.integer("n_shared_experts"),
            has_correction=True,
            is_wide=True,
        )
        return read_decoder(
            fields,
            (read_rope(fields, is_partial=True),) * num_layers,
            qkv_bias=fields.flag("attention_bias"),
            qk_norm=NormConfig(fields.number("rms_norm_eps")) if fields.flag("use_qk_norm") else None,
            experts=experts if any(experts.layers) else None,
            num_draft_layers=_num_draft_layers(fields),
        )


def _num_draft_layers(fields: ConfigFields) -> int:
    """How many layers for drafts lie behind the others; the field has two names."""
    given = [name for name in ("num_nextn_predict_layers", "num_mtp_layers") if fields.values.get(name) is not None]
    return max(map(fields.count, given)) if given else 1
