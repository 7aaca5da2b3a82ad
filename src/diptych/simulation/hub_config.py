"""Models from the config.json files of the Hugging Face hub.

A dimension that a file does not say is an error, and so is a family, a kind of layer or a format of weights that is not
listed here: nothing is guessed. Of a model that sees, too, the part that writes text is read.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.simulation.models import LinearAttentionSpec, MLASpec, ModelSpec, MoESpec, WindowSpec

PLAIN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "yi", "glm", "glm4", "glm4_moe", "phimoe")
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
WINDOWED = ("gpt_oss", "gemma2", "gemma3", "gemma3_text", "llama4", "llama4_text")
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
FAMILIES = (*PLAIN, "gemma", *LATENT, *WINDOWED, *HYBRID)

MXFP4_BITS = 4.25  # blocks of 32 numbers of 4 bits share a scale of 8 (OCP Microscaling Formats 1.0, section 5.2)
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def model_from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The model that a Hugging Face config.json describes. Raises UnsupportedModelError naming what is not known, and
    ConfigError naming what is missing."""
    outer = config.get("model_type", "")
    text = config.get("text_config", config)
    kind = text.get("model_type") or outer
    if outer not in FAMILIES or kind not in FAMILIES:
        wrong = outer if outer not in FAMILIES else kind
        raise UnsupportedModelError(f"model_type is {wrong!r}; known: {', '.join(FAMILIES)}", param="model")
    text = {**text, "model_type": kind}
    missing = [key for key in NEEDED if key not in text]
    if missing:
        raise ConfigError(f"config.json of {name} lacks {', '.join(missing)}", param="model")
    heads, moe = text["num_attention_heads"], _moe(text, name)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", kind.startswith("gemma")))
    bits, expert_bits = _checkpoint_bits(config.get("quantization_config") or text.get("quantization_config"), moe)
    return ModelSpec(
        name=name,
        hidden=text["hidden_size"],
        layers=text["num_hidden_layers"],
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        intermediate=_dense_width(text, moe, name),
        vocab=text["vocab_size"],
        max_context=text.get("max_position_embeddings", 2048),
        tied_embeddings=bool(tied),
        qkv_bias=kind == "qwen2" or bool(text.get("attention_bias", False)),
        norm_bias=kind == "phimoe",
        qk_norm=kind.startswith(("qwen3", "gemma3")) or bool(text.get("use_qk_norm", False)),
        gated_attention=kind in HYBRID and bool(text.get("attn_output_gate", True)),
        checkpoint_bits=bits,
        expert_bits=expert_bits,
        moe=moe,
        mla=_mla(text),
        window=_window(text),
        linear=_linear(text, name),
    )


def _dense_width(config: Mapping[str, Any], moe: MoESpec | None, name: str) -> int:
    """Width of the ordinary MLPs; of a model whose layers all have experts, the width of those."""
    width = config.get("intermediate_size_mlp") or config.get("intermediate_size")
    if width is None and moe is not None and not moe.dense_layers:
        width = moe.intermediate
    if width is None:
        raise ConfigError(f"config.json of {name} lacks intermediate_size", param="model")
    return int(width)


def _moe(config: Mapping[str, Any], name: str) -> MoESpec | None:
    experts = config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts")
    if not experts:
        return None
    per_token = config.get("num_experts_per_tok") or config.get("experts_per_token")
    width = config.get("moe_intermediate_size") or config.get("intermediate_size")
    if not per_token or not width:
        lacks = "num_experts_per_tok" if not per_token else "moe_intermediate_size"
        raise ConfigError(f"config.json of {name} lacks {lacks}", param="model")
    shared = config.get("n_shared_experts") or 0
    if wide := config.get("shared_expert_intermediate_size"):
        shared, rest = divmod(wide, width)
        if rest:
            message = f"the shared expert of {name} is {wide} wide, no multiple of moe_intermediate_size ({width})"
            raise UnsupportedModelError(message, param="model")
    if config["model_type"].startswith("llama4"):
        shared = 1
    return MoESpec(experts, per_token, width, shared, _num_dense_layers(config))


def _num_dense_layers(config: Mapping[str, Any]) -> int:
    """Layers without experts, of a model with experts: the first ones, those in a list, or those between."""
    layers = int(config["num_hidden_layers"])
    if "moe_layers" in config:
        return layers - len(config["moe_layers"])
    step = config.get("interleave_moe_layer_step") or config.get("decoder_sparse_step") or 1
    dense = layers - layers // step
    return dense + int(config.get("first_k_dense_replace") or 0) + len(config.get("mlp_only_layers") or ())


def _mla(config: Mapping[str, Any]) -> MLASpec | None:
    if not config.get("kv_lora_rank"):
        return None
    return MLASpec(
        q_rank=config.get("q_lora_rank") or 0,
        kv_rank=config["kv_lora_rank"],
        rope_dim=config["qk_rope_head_dim"],
        nope_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
    )


def _window(config: Mapping[str, Any]) -> WindowSpec | None:
    """Layers that attend to a window. A chunk of Llama 4 counts as a window of its length: at most that is attended."""
    kind, layers = config["model_type"], config["num_hidden_layers"]
    tokens = config.get("attention_chunk_size") if kind.startswith("llama4") else config.get("sliding_window")
    if kind.startswith(("qwen2", "qwen3")) and not config.get("use_sliding_window", False):
        return None
    if not tokens or tokens >= config.get("max_position_embeddings", 2048):
        return None
    if (kinds := config.get("layer_types")) is not None:
        count = sum(kinds.count(name) for name in ("sliding_attention", "chunked_attention"))
    elif kind in ("gpt_oss", "gemma2"):
        count = -(-layers // 2)
    elif kind.startswith("gemma3"):
        count = layers - layers // config.get("sliding_window_pattern", 6)
    elif kind.startswith("llama4"):
        rotary = config.get("no_rope_layers") or ()  # 1: a layer with rotary positions, which attends to its chunk
        count = sum(rotary) if rotary else layers - layers // config.get("no_rope_layer_interval", 4)
    elif kind.startswith(("qwen2", "qwen3")):
        count = max(0, layers - config.get("max_window_layers", layers))
    else:
        count = layers
    return WindowSpec(tokens, count) if count else None


def _linear(config: Mapping[str, Any], name: str) -> LinearAttentionSpec | None:
    kinds = Counter(config.get("layer_types") or ())
    known = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}
    if unknown := sorted(set(kinds) - known):
        raise UnsupportedModelError(
            f"layers of {name} are {', '.join(unknown)}; known: {', '.join(known)}", param="model"
        )
    if config["model_type"] not in HYBRID:
        return None
    layers = config["num_hidden_layers"]
    count = kinds["linear_attention"] if kinds else layers - layers // config.get("full_attention_interval", 4)
    return LinearAttentionSpec(
        layers=count,
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        conv_width=config.get("linear_conv_kernel_dim", 4),
    )


def _checkpoint_bits(quantization: Mapping[str, Any] | None, moe: MoESpec | None) -> tuple[int, float]:
    """Bits of the matrices, and of the experts where they have others (else 0)."""
    if not quantization:
        return 16, 0.0
    method = quantization.get("quant_method")
    if method == "fp8":
        return 8, 0.0
    if method == "mxfp4" and moe is not None:
        return 16, MXFP4_BITS
    if method in ("gptq", "awq") and quantization.get("bits") in (4, 8):
        return quantization["bits"], 0.0
    if method == "compressed-tensors":
        groups = [group["weights"] for group in quantization.get("config_groups", {}).values() if group.get("weights")]
        bits = {group.get("num_bits") for group in groups}
        if len(bits) == 1 and bits <= {4, 8}:
            found = bits.pop()
            only_experts = moe is not None and any("self_attn" in item for item in quantization.get("ignore", ()))
            return (16, float(found) + _scale_bits(groups[0])) if only_experts else (found, 0.0)
    raise UnsupportedModelError(
        f"quant_method is {method!r}; known: fp8, mxfp4 (of experts), gptq, awq and compressed-tensors of 4 or 8 bits",
        param="model",
    )


def _scale_bits(group: Mapping[str, Any]) -> float:
    """Bits of the scales, over the numbers that share one."""
    return 16 / group["group_size"] if group.get("group_size") else 0.0
