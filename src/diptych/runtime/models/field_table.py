"""Which fields of a config.json change what a model computes, for each architecture: those that its family reads, and
those that it does not compute with, at any other value than one that changes nothing.

A field that is in neither column is one that the architecture does not look at, in this engine and in transformers: a
test compares the columns with the fields that the classes of transformers use. Imports no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diptych.runtime.models.config_fields import ConfigFields

Neutral = Mapping[str, tuple[Any, ...]]

# ---------------------------------------------------------------- read: by every family

READ = frozenset(
    {
        "architectures",
        "auto_map",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "torch_dtype",
        "vocab_size",
    }
)
WINDOWS = frozenset({"layer_types", "sliding_window", "use_sliding_window"})

# ---------------------------------------------------------------- refused: the values that change nothing

REFUSED: Neutral = {
    # which tokens are seen
    "is_causal": (True,),  # null is none of them: transformers takes it for false
    "use_bidirectional_attention": (False, None),
    "attention_chunk_size": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_layers": (None, []),
    # scores of attention
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "attn_logit_softcapping": (None, 0.0),
    "attn_temperature_tuning": (False, None, 0),
    "clip_qkv": (None,),
    "attention_sinks": (False, None),
    "add_swa_attention_sink_bias": (False, None),
    "add_full_attention_sink_bias": (False, None),
    # positions
    "partial_rotary_factor": (1.0, None),
    "rotary_pct": (1.0, None),
    "rotary_dim": (None,),
    "rope_interleave": (False, None),
    "rope_interleaved": (False, None),
    "rope_local_base_freq": (None,),
    "rope_ratio": (1.0, None),
    "layer_rope_theta": (None,),
    "_rope_type_labels": (None, []),
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": (None, 0),
    "position_embedding_type": ("rope", "rotary", None),
    "alibi": (False, None),
    "use_alibi": (False, None),
    # factors and caps of hidden states and logits
    "embedding_multiplier": (1.0, None),
    "residual_multiplier": (1.0, None),
    "logits_scaling": (1.0, None),
    "logit_scale": (1.0, None),
    "logits_mup_width_multiplier": (1.0, None),
    "final_logit_softcapping": (None, 0.0),
    "scale_emb": (1.0, None),
    "scale_depth": (None,),
    "scale_embedding": (False, None),
    # parts of layers
    "hidden_act": ("silu", "swish"),  # two names of one function
    "hidden_activation": ("silu", "swish", None),
    "mlp_bias": (False, None),
    "qk_norm": (False, None),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "lm_head_bias": (False, None),
    "use_parallel_residual": (False, None),
    "parallel_attn": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "moe_num_experts": (None, 0),
    "mlp_layer_types": (None, []),
    "kv_lora_rank": (None,),
    "q_lora_rank": (None,),
    "num_kv_shared_layers": (None, 0),
    "kv_sharing_modes": (None, []),
    "pruned_heads": (None, {}),
    # layers that differ from one another, models inside models, weights elsewhere
    "per_layer_config": (None, {}),
    "_heterogeneity_spec": (None,),
    "skip": (None, []),
    "text_config": (None, {}),
    "vision_config": (None, {}),
    "audio_config": (None, {}),
    "decoder": (None, {}),
    "generator": (None, {}),
    "unpadded_vocab_size": (None,),
    "attribute_map": (None, {}),
    "transformers_weights": (None, "model.safetensors", "model.safetensors.index.json"),
    "compression_config": (None, {}),
}

# ---------------------------------------------------------------- harmless: why the value does not matter

_TRAINING, _OUTPUT, _LOADING = "training only", "what else is returned beside logits", "how transformers loads or runs"
_HEADS, _DRAFTS = "heads for other tasks", "layers for drafts, beside the model"
_TOKENS, _LABEL = "the tokenizer and generation_config.json have the last word", "a label"
HARMLESS: Mapping[str, str] = {
    "attention_dropout": _TRAINING,
    "hidden_dropout": _TRAINING,
    "gradient_checkpointing": _TRAINING,
    "initializer_range": "of weights that are not loaded",
    "initializer_factor": "of weights that are not loaded",
    "init_std": "of weights that are not loaded",
    "use_cache": "logits are the same with and without",
    "chunk_size_feed_forward": "the same rows in other portions",
    "pretraining_tp": "the same products in other portions",
    "pad_token_id": "prompts are not padded",
    "bos_token_id": _TOKENS,
    "sep_token_id": _TOKENS,
    "output_attentions": _OUTPUT,
    "output_hidden_states": _OUTPUT,
    "return_dict": _OUTPUT,
    "tie_last_hidden_states": _OUTPUT,
    "classifier_dropout": _HEADS,
    "id2label": _HEADS,
    "label2id": _HEADS,
    "num_labels": _HEADS,
    "is_decoder": _HEADS,
    "problem_type": _HEADS,
    "token_classification_bias": _HEADS,
    "chain_hidden_post_norm": _DRAFTS,
    "first_k_dense_replace": _DRAFTS,
    "mtp_hidden_states_first": _DRAFTS,
    "mtp_layer_types": _DRAFTS,
    "mtp_mlp_layer_types": _DRAFTS,
    "mtp_per_layer_config": _DRAFTS,
    "num_mtp_layers": _DRAFTS,
    "distributed_config": _LOADING,
    "fusion_config": _LOADING,
    "attn_implementation": _LOADING,
    "experts_implementation": _LOADING,
    "dtype_plan": _LOADING,
    "_attn_implementation": _LOADING,
    "_attn_implementation_internal": _LOADING,
    "_experts_implementation": _LOADING,
    "_experts_implementation_internal": _LOADING,
    "_output_attentions": _OUTPUT,
    "_auto_class": _LABEL,
    "_commit_hash": _LABEL,
    "_post_init_done": _LABEL,
    "_name_or_path": _LABEL,
    "name_or_path": _LABEL,
    "transformers_version": _LABEL,
    "embed_dim": "the vision models' name of hidden_size",
    "num_heads": "the vision models' name of num_attention_heads",
    "number_of_conv_states": "of layers with convolutions",
}


@dataclass(frozen=True, slots=True)
class FieldTable:
    """What an architecture makes of the fields of a config.json. model_type: what the file must call it. read: by the
    family. refused: unless the value is one of these, which change nothing. harmless: with the reason. rope_read: the
    fields of ROPE_REFUSED that the family reads."""

    model_type: str
    read: frozenset[str]
    refused: Neutral
    harmless: Mapping[str, str]
    rope_read: frozenset[str]


def _table(
    model_type: str,
    read: frozenset[str],
    harmless: Mapping[str, str],
    rope_read: frozenset[str] = frozenset(),
    unread: frozenset[str] = frozenset(),
    **refused: tuple[Any, ...],
) -> FieldTable:
    """unread: fields that other families read and this one has not."""
    known = (READ | read) - unread
    columns = {name: values for name, values in {**REFUSED, **refused}.items() if name not in known | set(harmless)}
    others = {name: reason for name, reason in {**HARMLESS, **harmless}.items() if name not in known}
    return FieldTable(model_type, known, columns, others, rope_read)


_EVERY_WINDOW = {
    "use_sliding_window": "sliding_window alone says it",
    "max_window_layers": "every layer has the window",
}
_NO_WINDOWS = {
    "sliding_window": "no layer has a window",
    "use_sliding_window": "no layer has a window",
    "max_window_layers": "no layer has a window",
    "layer_types": "every layer is full_attention",
}
_BY_KIND = {"original_max_position_embeddings": "counts for nothing beside rotary objects by kind of layer"}
_GEMMA = frozenset(
    {"attention_bias", "hidden_activation", "layer_types", "query_pre_attn_scalar", "sliding_window"}
    | {"attn_logit_softcapping", "final_logit_softcapping", "norm_offset"}
)
_GEMMA_HARMLESS = {
    "hidden_act": "hidden_activation says it",
    "use_sliding_window": "layer_types says it",
    "max_window_layers": "layer_types says it",
    "_sliding_window_pattern": "layer_types says it, or sliding_window_pattern",
}

_EXPERTS = frozenset({"num_experts", "num_local_experts", "num_experts_per_tok"})
_EXPERTS_HARMLESS = {
    "output_router_logits": _OUTPUT,
    "router_aux_loss_coef": _TRAINING,
    "router_jitter_noise": _TRAINING,
}
# A file that says so is of another way to route, whatever the class of transformers makes of it.
_EXPERTS_REFUSED: dict[str, Any] = {
    "scoring_func": ("softmax", None),
    "routed_scaling_factor": (1.0, None),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "n_group": (None, 1),
    "topk_group": (None, 1),
}

TABLES: Mapping[str, FieldTable] = {
    "Gemma2ForCausalLM": _table("gemma2", _GEMMA, _GEMMA_HARMLESS),
    "Gemma3ForCausalLM": _table(
        "gemma3_text",
        _GEMMA | {"rope_local_base_freq", "sliding_window_pattern"},
        {**_GEMMA_HARMLESS, **_BY_KIND},
        unread=frozenset(_BY_KIND),
    ),
    "Glm4MoeForCausalLM": _table(
        "glm4_moe",
        frozenset({"attention_bias", "partial_rotary_factor", "use_qk_norm", "moe_intermediate_size"})
        | {"norm_topk_prob", "routed_scaling_factor", "n_shared_experts", "n_routed_experts", "first_k_dense_replace"}
        | {"num_nextn_predict_layers", "num_mtp_layers"}
        | _EXPERTS,
        _NO_WINDOWS | _EXPERTS_HARMLESS,
        rope_read=frozenset({"partial_rotary_factor"}),
        **{**_EXPERTS_REFUSED, "scoring_func": ("sigmoid", None)},
    ),
    "GptOssForCausalLM": _table(
        "gpt_oss",
        frozenset({"attention_bias", "layer_types", "sliding_window", "swiglu_alpha", "swiglu_limit"}) | _EXPERTS,
        {
            "use_sliding_window": "layer_types says it",
            "max_window_layers": "layer_types says it",
            "experts_per_token": "num_experts_per_tok says it",
            "initial_context_length": "original_max_position_embeddings says it",
            **_EXPERTS_HARMLESS,
        },
        **_EXPERTS_REFUSED,
    ),
    "GraniteForCausalLM": _table(
        "granite",
        frozenset({"attention_bias", "mlp_bias", "attention_multiplier", "embedding_multiplier"})
        | {"residual_multiplier", "logits_scaling"},
        _NO_WINDOWS,
    ),
    "GraniteMoeForCausalLM": _table(
        "granitemoe",
        frozenset({"attention_bias", "attention_multiplier", "embedding_multiplier"})
        | {"residual_multiplier", "logits_scaling"}
        | _EXPERTS,
        _NO_WINDOWS | _EXPERTS_HARMLESS,
        **_EXPERTS_REFUSED,
    ),
    "Lfm2ForCausalLM": _table(
        "lfm2",
        frozenset({"layer_types", "full_attn_idxs", "conv_L_cache", "conv_bias", "norm_eps", "tie_embedding"})
        | {"block_ff_dim", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"},
        {
            "sliding_window": "no layer has a window",
            "use_sliding_window": "no layer has a window",
            "max_window_layers": "no layer has a window",
            "attention_bias": "no projection of attention has one",
            "rms_norm_eps": "norm_eps says it",
        },
        unread=frozenset({"rms_norm_eps"}),
    ),
    "LlamaForCausalLM": _table(
        "llama",
        WINDOWS | {"attention_bias", "mlp_bias"},
        {"max_window_layers": "no layer has a window"},
    ),
    "Ministral3ForCausalLM": _table(
        "ministral3",
        frozenset({"layer_types", "sliding_window"}),
        _EVERY_WINDOW,
        rope_read=frozenset({"llama_4_scaling_beta"}),
        attention_bias=(False, None),
    ),
    "MistralForCausalLM": _table(
        "mistral",
        frozenset({"layer_types", "sliding_window"}),
        _EVERY_WINDOW,
        attention_bias=(False, None),
    ),
    "MixtralForCausalLM": _table(
        "mixtral",
        frozenset({"sliding_window"}) | _EXPERTS,
        _EVERY_WINDOW | {"layer_types": "sliding_window alone says it"} | _EXPERTS_HARMLESS,
        attention_bias=(False, None),
        **_EXPERTS_REFUSED,
    ),
    "MuseGlimmerForConditionalGeneration": _table(
        "muse_glimmer_text",
        frozenset({"attention_bias", "hidden_activation", "layer_types", "sliding_window", "final_logit_softcapping"})
        | {"layer_rope_theta", "output_multiplier", "post_norm_eps", "qk_scale_factor"},
        {
            "hidden_act": "hidden_activation says it",
            "use_sliding_window": "layer_types says it",
            "max_window_layers": "layer_types says it",
        },
    ),
    "Olmo2ForCausalLM": _table("olmo2", frozenset({"attention_bias"}), _NO_WINDOWS),
    "Olmo3ForCausalLM": _table(
        "olmo3",
        frozenset({"attention_bias", "layer_types", "sliding_window"}),
        {
            "use_sliding_window": "layer_types says it",
            "max_window_layers": "layer_types says it",
            **_BY_KIND,
        },
        unread=frozenset(_BY_KIND),
    ),
    "OlmoeForCausalLM": _table(
        "olmoe",
        frozenset({"attention_bias", "norm_topk_prob"}) | _EXPERTS,
        _NO_WINDOWS | _EXPERTS_HARMLESS,
        **_EXPERTS_REFUSED,
    ),
    "Phi3ForCausalLM": _table(
        "phi3",
        frozenset({"sliding_window", "partial_rotary_factor"}),
        {
            **_EVERY_WINDOW,
            "attention_bias": "no layer has one",
            "layer_types": "sliding_window alone says it",
            "embd_pdrop": _TRAINING,
            "resid_pdrop": _TRAINING,
        },
        rope_read=frozenset({"long_factor", "short_factor", "partial_rotary_factor"}),
    ),
    "PhimoeForCausalLM": _table(
        "phimoe",
        frozenset({"attention_bias", "lm_head_bias", "router_jitter_noise", "sliding_window"}) | _EXPERTS,
        {
            **_EVERY_WINDOW,
            "layer_types": "sliding_window alone says it",
            "input_jitter_noise": _TRAINING,
            "output_router_logits": _OUTPUT,
            "router_aux_loss_coef": _TRAINING,
        },
        rope_read=frozenset({"long_factor", "short_factor", "long_mscale", "short_mscale"}),
        **_EXPERTS_REFUSED,
    ),
    "Qwen2ForCausalLM": _table(
        "qwen2",
        WINDOWS | {"max_window_layers"},
        {"attention_bias": "q, k and v always have one, o has none"},
    ),
    "Qwen3ForCausalLM": _table(
        "qwen3",
        WINDOWS | {"max_window_layers", "attention_bias"},
        {},
        qk_norm=(True, None),
        use_qk_norm=(True, None),
        qk_layernorm=(True, None),
    ),
    "Qwen3MoeForCausalLM": _table(
        "qwen3_moe",
        frozenset({"attention_bias", "sliding_window", "use_sliding_window"})
        | {"moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}
        | _EXPERTS,
        {
            "max_window_layers": "every layer has the window",
            "layer_types": "sliding_window alone says it",
            **_EXPERTS_HARMLESS,
        },
        qk_norm=(True, None),
        use_qk_norm=(True, None),
        qk_layernorm=(True, None),
        **_EXPERTS_REFUSED,
    ),
    "SeedOssForCausalLM": _table(
        "seed_oss",
        frozenset({"attention_bias", "attention_out_bias", "mlp_bias"}),
        {**_NO_WINDOWS, "residual_dropout": _TRAINING},
    ),
    "SmolLM3ForCausalLM": _table(
        "smollm3",
        WINDOWS | {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"},
        {"max_window_layers": "layer_types says it, or no_rope_layers"},
    ),
}

# ---------------------------------------------------------------- the fields of rope_parameters and rope_scaling

ROPE_READ = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "factors",
        "high_freq_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "rope_theta",
        "rope_type",
        "truncate",
        "type",
    }
)
ROPE_REFUSED: Neutral = {
    "partial_rotary_factor": (1.0, None),
    "attn_factor": (1.0, None),
    "extrapolation_factor": (1.0, None),
    "llama_4_scaling_beta": (None,),
    "alpha": (None,),
    "long_factor": (None,),
    "short_factor": (None,),
    "long_mscale": (None,),
    "short_mscale": (None,),
}
ROPE_HARMLESS: Mapping[str, str] = {
    "finetuned": _LABEL,
    "mrope_section": "text has one position for all axes",
    "mrope_interleaved": "text has one position for all axes",
    "max_position_embeddings": "the field of the same name beside the object counts",
}


def check_fields(fields: ConfigFields, architecture: str) -> None:
    """Raise UnsupportedModelError for a field at a value that the architecture's family does not compute with.
    Architectures without a table are taken as they are."""
    table = TABLES.get(architecture)
    if table is None:
        return
    if fields.values.get("model_type", table.model_type) != table.model_type:
        raise fields.unsupported("model_type", f"{table.model_type}, the type of {architecture}")
    _check(fields, table.refused)
    for name in ("rope_parameters", "rope_scaling"):
        check_rope(fields.nested(name), table.rope_read)


def check_rope(rope: ConfigFields, read: frozenset[str] = frozenset()) -> None:
    """Raise UnsupportedModelError for fields of rotary embeddings that no kind of them has here. Objects by kind of
    layer are left to who reads them. read: the fields of ROPE_REFUSED that the family reads."""
    _check(rope, {name: neutral for name, neutral in ROPE_REFUSED.items() if name not in read})
    for name, value in rope.values.items():
        is_known = name in ROPE_READ or name in ROPE_REFUSED or name in ROPE_HARMLESS
        if not is_known and value is not None and not isinstance(value, dict):
            raise rope.unsupported(name, "a rotary embedding without such a field")


def _check(fields: ConfigFields, refused: Neutral) -> None:
    for name, neutral in refused.items():
        if name in fields.values and fields.values[name] not in neutral:
            words = [value if isinstance(value, str) else json.dumps(value) for value in neutral]
            raise fields.unsupported(name, ", ".join(words))
