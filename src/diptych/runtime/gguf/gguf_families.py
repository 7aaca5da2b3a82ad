"""What each architecture of GGUF files is: its class in config.json, the names of its tensors, the keys that it alone
has, and what these say. Defaults are those that llama.cpp takes where a file has no such key.

Imports no torch, and knows no values of tensors but those of rotary factors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diptych.control.errors import UnsupportedModelError
from diptych.runtime.models.model_config import CONVOLUTION, FULL, SLIDING

if TYPE_CHECKING:
    from diptych.runtime.gguf.gguf_model import GgufModel

Values = dict[str, Any]

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AROUND_NAMES: Mapping[str, str] = {  # of families with norms behind attention and MLP
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SEED_NAMES: Mapping[str, str] = {
    **{name: part for name, part in LAYER_NAMES.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
}
FUSED_NAMES: Mapping[str, str] = {
    **LAYER_NAMES,
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
EXPERT_NAMES: Mapping[str, str] = {  # a tensor of three dimensions for all experts of a layer
    **LAYER_NAMES,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
}
GPT_OSS_NAMES: Mapping[str, str] = {
    **{name: part for name, part in EXPERT_NAMES.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",  # a whole name for a whole name
    "ffn_gate_inp": "mlp.router",
}
GLM4_MOE_NAMES: Mapping[str, str] = {
    **{name: part for name, part in EXPERT_NAMES.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",  # likewise
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
LFM2_FILE_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",  # which is behind the last layer, whatever it is called
    "output": "lm_head",
}
LFM2_NAMES: Mapping[str, str] = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
TAPS = "shortconv.l_cache"
EXPERT_KEYS = {  # fields of config.json by the key behind "ARCHITECTURE.", as in gguf_config.py
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
GATING, WEIGHTS_NORM = "expert_gating_func", "expert_weights_norm"
SOFTMAX, SIGMOID, SOFTMAX_OF_TOP = 1, 2, 3  # of GATING
DRAFT_LAYERS = "nextn_predict_layers"  # of the layers that the file counts, the last ones, which are for drafts
# tensors of numbers to divide rotary frequencies by
FREQUENCY_FACTORS, SHORT_FACTORS, LONG_FACTORS = (
    f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")
)
ROTARY_TENSORS = (FREQUENCY_FACTORS, SHORT_FACTORS, LONG_FACTORS)
DEFAULT_THETA = 10_000.0


def _nothing_more(file: GgufModel, values: Values) -> None:
    """For families whose fields all architectures have."""


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """architecture: in config.json. layer_names: of tensors, for the parts of a layer. is_interleaved: rows of q and k
    are in the order that pairs neighbours in the rotary embedding (layers here pair row i of a head with row i +
    head_dim / 2). read: keys that it reads, and others refuse. complete: puts the
    fields of these keys into the fields that all architectures have; raises UnsupportedModelError. with_experts: what a
    file of this architecture is that says how many experts it has. names: of tensors outside of layers.
    has_empty_layers: layers without heads of keys have no attention."""

    architecture: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    is_interleaved: bool = False
    read: frozenset[str] = frozenset()
    complete: Callable[[GgufModel, Values], None] = _nothing_more
    with_experts: GgufFamily | None = None
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    has_empty_layers: bool = False


def find_family(file: GgufModel) -> GgufFamily:
    """The family of a file whose architecture is in GGUF_FAMILIES."""
    family = GGUF_FAMILIES[file.metadata.string("general.architecture") or ""]
    has_experts = family.with_experts is not None and bool(file.metadata.integer(_key(file, "expert_count")))
    return family.with_experts if has_experts and family.with_experts else family


def _kinds(file: GgufModel, values: Values, pattern: int) -> list[str]:
    """Each layer's kind: by an array of whether it has a window, or every n-th has none. pattern: n, where the file
    does not say it."""
    num_layers, key = values["num_hidden_layers"], _key(file, "attention.sliding_window_pattern")
    if values.get("sliding_window") is None:
        return [FULL] * num_layers
    said = file.metadata.values.get(key, pattern)
    if isinstance(said, int) and not isinstance(said, bool) and said >= 1:
        return [SLIDING if (index + 1) % said else FULL for index in range(num_layers)]
    marks = list(said) if isinstance(said, list | memoryview) else []
    if len(marks) != num_layers or any(mark not in (0, 1) for mark in marks):
        raise file.metadata.unsupported(key, f"a whole number of at least 1, or {num_layers} times true or false")
    return [SLIDING if mark else FULL for mark in marks]


def _complete_gemma(file: GgufModel, values: Values, num_layers_27b: int) -> None:
    """Norms hold 1 + weight; the largest model of a generation scales scores by the width of its hidden states."""
    values["norm_offset"] = 0.0
    is_27b = values["num_hidden_layers"] == num_layers_27b
    heads = values["num_attention_heads"]
    values["query_pre_attn_scalar"] = values["hidden_size"] // heads if is_27b else values["head_dim"]
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := file.metadata.number(_key(file, name))) is not None:
            values[name] = cap or None


def _complete_gemma2(file: GgufModel, values: Values) -> None:
    _complete_gemma(file, values, 46)
    if file.metadata.integer(_key(file, "attention.sliding_window")) is None:
        values["sliding_window"] = 4096
    values["layer_types"] = _kinds(file, values, 2)
    own = file.metadata.number(_key(file, "rope.freq_base_swa"))
    if own not in (None, values["rope_theta"]):
        raise file.metadata.unsupported(_key(file, "rope.freq_base_swa"), f"rope.freq_base ({values['rope_theta']})")


def _complete_gemma3(file: GgufModel, values: Values) -> None:
    _complete_gemma(file, values, 62)
    values["layer_types"] = _kinds(file, values, 6)
    _two_ropes(values, file.metadata.number(_key(file, "rope.freq_base_swa")) or DEFAULT_THETA)


def _complete_olmo2(file: GgufModel, values: Values) -> None:
    if values.get("sliding_window") is None:
        return
    values["architectures"] = ["Olmo3ForCausalLM"]
    values["layer_types"] = _kinds(file, values, 4)
    _two_ropes(values, file.metadata.number(_key(file, "rope.freq_base_swa")) or values["rope_theta"])


def _two_ropes(values: Values, theta: float) -> None:
    """What is scaled is the rotation of layers with full attention alone. theta: of the others."""
    full = {"rope_type": "default", "rope_theta": values.pop("rope_theta"), **values["rope_parameters"]}
    values["rope_parameters"] = {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": theta}}


def _complete_granite(file: GgufModel, values: Values) -> None:
    metadata = file.metadata
    if metadata.flag(_key(file, "rope.scaling.finetuned")) is False:
        raise metadata.unsupported(_key(file, "rope.scaling.finetuned"), "true: queries and keys are rotated")
    values["logits_scaling"] = metadata.number(_key(file, "logit_scale")) or 1.0
    values["residual_multiplier"] = metadata.number(_key(file, "residual_scale")) or 1.0
    values["embedding_multiplier"] = metadata.number(_key(file, "embedding_scale")) or 1.0
    values["attention_multiplier"] = metadata.number(_key(file, "attention.scale")) or values["head_dim"] ** -0.5


def _complete_mistral3(file: GgufModel, values: Values) -> None:
    metadata, rope = file.metadata, values["rope_parameters"]
    multiplier = metadata.number(_key(file, "rope.scaling.yarn_log_multiplier"))
    if multiplier and rope.get("rope_type") == "yarn":
        rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    if beta := metadata.number(_key(file, "attention.temperature_scale")):
        values["architectures"] = ["Ministral3ForCausalLM"]
        rope["llama_4_scaling_beta"] = beta
        rope.setdefault("original_max_position_embeddings", values["max_position_embeddings"])


def _complete_phi3(file: GgufModel, values: Values) -> None:
    metadata, head_dim = file.metadata, values["head_dim"]
    if (share := _partial_rotary(file, head_dim)) < 1.0:
        values["partial_rotary_factor"] = share
    rotary = int(head_dim * share)
    original = metadata.integer(_key(file, "rope.scaling.original_context_length"))
    values["original_max_position_embeddings"] = original or values["max_position_embeddings"]
    if not {SHORT_FACTORS, LONG_FACTORS} <= file.tensors.keys():
        values["rope_parameters"] = {}
        return
    values["rope_parameters"] = {
        "rope_type": "longrope",
        "short_factor": rotary_factors(file, SHORT_FACTORS, rotary // 2),
        "long_factor": rotary_factors(file, LONG_FACTORS, rotary // 2),
        "attention_factor": metadata.number(_key(file, "rope.scaling.attn_factor")) or None,
    }


def _complete_experts(file: GgufModel, values: Values, gating: int = SOFTMAX) -> bool | None:
    """Whether the file says that weights of experts are divided by their sum. gating: that of the architecture."""
    metadata = file.metadata
    for field_name, key in EXPERT_KEYS.items():
        values[field_name] = metadata.integer(_key(file, key))
        if not values[field_name] and field_name != "moe_intermediate_size":
            raise metadata.unsupported(_key(file, key), "a whole number of at least 1")
    if metadata.integer(_key(file, GATING)) not in (None, 0, gating):
        name = {SOFTMAX: "softmax", SIGMOID: "sigmoid", SOFTMAX_OF_TOP: "a softmax of the chosen experts"}[gating]
        raise metadata.unsupported(_key(file, GATING), f"{gating}: {name}")
    return metadata.flag(_key(file, WEIGHTS_NORM))


def _complete_qwen3_moe(file: GgufModel, values: Values) -> None:
    is_normalized = _complete_experts(file, values)
    values["norm_topk_prob"] = is_normalized is not False
    if not values["moe_intermediate_size"]:
        values["moe_intermediate_size"] = values["intermediate_size"] // values["num_experts_per_tok"]


def _complete_wide_experts(file: GgufModel, values: Values) -> bool | None:
    """Experts that are as wide as feed_forward_length says."""
    is_normalized = _complete_experts(file, values)
    if (values.pop("moe_intermediate_size") or values["intermediate_size"]) != values["intermediate_size"]:
        key = _key(file, EXPERT_KEYS["moe_intermediate_size"])
        raise file.metadata.unsupported(key, f"feed_forward_length ({values['intermediate_size']})")
    return is_normalized


def _complete_olmoe(file: GgufModel, values: Values) -> None:
    values["norm_topk_prob"] = bool(_complete_wide_experts(file, values))


def _complete_normalized(file: GgufModel, values: Values) -> None:
    """Experts whose weights are always divided by their sum."""
    if _complete_wide_experts(file, values) is False:
        raise file.metadata.unsupported(_key(file, WEIGHTS_NORM), "true")


def _complete_mixtral(file: GgufModel, values: Values) -> None:
    _complete_normalized(file, values)
    values["architectures"] = ["MixtralForCausalLM"]


def _complete_granite_moe(file: GgufModel, values: Values) -> None:
    _complete_granite(file, values)
    _complete_normalized(file, values)
    values["num_local_experts"] = values.pop("num_experts")


def _complete_gpt_oss(file: GgufModel, values: Values) -> None:
    _complete_experts(file, values, SOFTMAX_OF_TOP)
    values["intermediate_size"] = values.pop("moe_intermediate_size") or values["intermediate_size"]
    values["num_local_experts"] = values.pop("num_experts")
    values["layer_types"] = _kinds(file, values, 2)
    if values["rope_parameters"].get("rope_type") == "yarn":
        values["rope_parameters"]["truncate"] = False


def _complete_glm4_moe(file: GgufModel, values: Values) -> None:
    metadata = file.metadata
    values["norm_topk_prob"] = bool(_complete_experts(file, values, SIGMOID))
    if not values["moe_intermediate_size"]:
        key = _key(file, EXPERT_KEYS["moe_intermediate_size"])
        raise metadata.unsupported(key, "a whole number of at least 1")
    values["n_shared_experts"] = metadata.integer(_key(file, "expert_shared_count")) or 1
    values["first_k_dense_replace"] = metadata.integer(_key(file, "leading_dense_block_count")) or 0
    values["routed_scaling_factor"] = metadata.number(_key(file, "expert_weights_scale")) or 1.0
    values["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    drafts = metadata.integer(_key(file, DRAFT_LAYERS)) or 0
    if not 0 <= drafts < values["num_hidden_layers"]:
        raise metadata.unsupported(_key(file, DRAFT_LAYERS), f"below block_count ({values['num_hidden_layers']})")
    values["num_hidden_layers"] -= drafts
    values["partial_rotary_factor"] = _partial_rotary(file, values["head_dim"])


def _partial_rotary(file: GgufModel, head_dim: int) -> float:
    """The share of a head that is rotated: of the share times head_dim, the whole part counts."""
    key = _key(file, "rope.dimension_count")
    rotary = file.metadata.integer(key) or head_dim
    if rotary > head_dim or rotary % 2:
        raise file.metadata.unsupported(key, f"an even number of at most {head_dim}")
    return (rotary + 0.5) / head_dim if rotary < head_dim else 1.0


def kv_heads_of_layers(file: GgufModel, num_layers: int) -> list[int]:
    """How many heads of keys each layer has: 0 where it has no attention, else as many as the others."""
    key = _key(file, "attention.head_count_kv")
    said: Any = file.metadata.values.get(key)
    is_array = isinstance(said, Sequence | memoryview) and not isinstance(said, str)
    counts: list[Any] = list(said) if is_array else [said] * num_layers
    are_numbers = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts)
    if len(counts) != num_layers or not are_numbers or len({*counts, 0}) != 2:
        raise file.metadata.unsupported(key, f"a number for each of {num_layers} layers, 0 or one that is not 0")
    return counts


def _complete_lfm2(file: GgufModel, values: Values) -> None:
    counts = kv_heads_of_layers(file, values["num_hidden_layers"])
    values["layer_types"] = [FULL if count else CONVOLUTION for count in counts]
    values["conv_L_cache"] = file.metadata.integer(_key(file, TAPS))
    if not values["conv_L_cache"]:
        raise file.metadata.unsupported(_key(file, TAPS), "a whole number of at least 1")
    values["conv_bias"] = any(name.endswith("shortconv.conv.bias") for name in file.tensors)
    values["block_auto_adjust_ff_dim"] = False
    values["norm_eps"] = values.pop("rms_norm_eps")


def _complete_phimoe(file: GgufModel, values: Values) -> None:
    """One factor for attention, where config.json has one for short contexts and one for long ones."""
    _complete_wide_experts(file, values)
    _complete_phi3(file, values)
    values["num_local_experts"] = values.pop("num_experts")
    values["lm_head_bias"] = "output.bias" in file.tensors
    if values["rope_parameters"]:
        factor = values["rope_parameters"].pop("attention_factor") or 1.0
        original = values["original_max_position_embeddings"]
        values["rope_parameters"] |= {"short_mscale": factor, "long_mscale": factor}
        values["rope_parameters"]["original_max_position_embeddings"] = original


def rotary_factors(file: GgufModel, name: str, count: int) -> list[float]:
    """The numbers in one of ROTARY_TENSORS. Raises UnsupportedModelError unless their number is
    right and all are above 0."""
    tensor = file.tensors[name]
    if tensor.kind.name != "F32" or tensor.shape != (count,):
        raise UnsupportedModelError(
            f"{file.file_of(name)}: tensor {name} is {tensor.kind.name} of shape {list(tensor.shape)}; supported: F32 "
            f"of shape [{count}]",
            param="model",
        )
    factors = list(struct.unpack(f"<{count}f", file.data(name)))
    if not all(factor > 0 for factor in factors):
        raise UnsupportedModelError(
            f"{file.file_of(name)}: tensor {name} holds numbers that are not positive", param="model"
        )
    return factors


def _key(file: GgufModel, name: str) -> str:
    return f"{file.metadata.string('general.architecture')}.{name}"


_WINDOWS = frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa"})
_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
_EXPERTS = frozenset({*EXPERT_KEYS.values(), GATING, WEIGHTS_NORM})
_GRANITE = frozenset({"attention.scale", "embedding_scale", "logit_scale", "residual_scale", "rope.scaling.finetuned"})
GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "gemma2": GgufFamily("Gemma2ForCausalLM", AROUND_NAMES, read=_WINDOWS | _CAPS, complete=_complete_gemma2),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM", AROUND_NAMES, read=_WINDOWS | {"final_logit_softcapping"}, complete=_complete_gemma3
    ),
    "glm4moe": GgufFamily(
        "Glm4MoeForCausalLM",
        GLM4_MOE_NAMES,
        read=_EXPERTS | {"expert_shared_count", "leading_dense_block_count", "expert_weights_scale", DRAFT_LAYERS},
        complete=_complete_glm4_moe,
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        GPT_OSS_NAMES,
        read=_EXPERTS | {"attention.sliding_window_pattern"},
        complete=_complete_gpt_oss,
    ),
    "granite": GgufFamily(
        "GraniteForCausalLM",
        is_interleaved=True,
        read=_GRANITE,
        complete=_complete_granite,
    ),
    "granitemoe": GgufFamily(
        "GraniteMoeForCausalLM",
        EXPERT_NAMES,
        is_interleaved=True,
        read=_GRANITE | _EXPERTS,
        complete=_complete_granite_moe,
    ),
    "lfm2": GgufFamily(
        "Lfm2ForCausalLM",
        LFM2_NAMES,
        read=frozenset({TAPS}),
        complete=_complete_lfm2,
        names=LFM2_FILE_NAMES,
        has_empty_layers=True,
    ),
    "llama": GgufFamily(
        "LlamaForCausalLM",
        is_interleaved=True,
        read=frozenset({"expert_count"}),
        with_experts=GgufFamily(
            "MixtralForCausalLM", EXPERT_NAMES, is_interleaved=True, read=_EXPERTS, complete=_complete_mixtral
        ),
    ),
    "mistral3": GgufFamily(
        "MistralForCausalLM",
        is_interleaved=True,
        read=frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}),
        complete=_complete_mistral3,
    ),
    "olmo2": GgufFamily("Olmo2ForCausalLM", AROUND_NAMES, read=_WINDOWS, complete=_complete_olmo2),
    "olmoe": GgufFamily("OlmoeForCausalLM", EXPERT_NAMES, read=_EXPERTS, complete=_complete_olmoe),
    "phi3": GgufFamily(
        "Phi3ForCausalLM", FUSED_NAMES, read=frozenset({"rope.scaling.attn_factor"}), complete=_complete_phi3
    ),
    "phimoe": GgufFamily(
        "PhimoeForCausalLM",
        EXPERT_NAMES,
        read=_EXPERTS | {"rope.scaling.attn_factor"},
        complete=_complete_phimoe,
    ),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", EXPERT_NAMES, read=_EXPERTS, complete=_complete_qwen3_moe),
    "seed_oss": GgufFamily("SeedOssForCausalLM", SEED_NAMES),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", is_interleaved=True),
}
# a window is part of the architecture
WINDOWED = ("gemma2", "gemma3", "gpt-oss", "llama", "mistral3", "olmo2", "phi3", "phimoe")
LONG_ROPES = ("phi3", "phimoe")  # with factors for short and for long contexts
PARTLY_ROTATED = ("glm4moe", "phi3")  # with rope.dimension_count below the width of a head
