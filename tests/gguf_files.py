"""Writes GGUF files with the gguf package, an implementation of the format that is not ours."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

F32 = GGMLQuantizationType.F32
ARCHITECTURES = {
    "Lfm2ForCausalLM": (gguf.MODEL_ARCH.LFM2, "lfm2"),
    "LlamaForCausalLM": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "MistralForCausalLM": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "Qwen2ForCausalLM": (gguf.MODEL_ARCH.QWEN2, "qwen2"),
    "Qwen3ForCausalLM": (gguf.MODEL_ARCH.QWEN3, "qwen3"),
    "Qwen3MoeForCausalLM": (gguf.MODEL_ARCH.QWEN3MOE, "qwen3moe"),
    "MixtralForCausalLM": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "OlmoeForCausalLM": (gguf.MODEL_ARCH.OLMOE, "olmoe"),
    "GraniteMoeForCausalLM": (gguf.MODEL_ARCH.GRANITE_MOE, "granitemoe"),
    "Gemma2ForCausalLM": (gguf.MODEL_ARCH.GEMMA2, "gemma2"),
    "Gemma3ForCausalLM": (gguf.MODEL_ARCH.GEMMA3, "gemma3"),
    "GptOssForCausalLM": (gguf.MODEL_ARCH.GPT_OSS, "gpt-oss"),
    "Glm4MoeForCausalLM": (gguf.MODEL_ARCH.GLM4_MOE, "glm4moe"),
    "PhimoeForCausalLM": (gguf.MODEL_ARCH.PHIMOE, "phimoe"),
    "GraniteForCausalLM": (gguf.MODEL_ARCH.GRANITE, "granite"),
    "Ministral3ForCausalLM": (gguf.MODEL_ARCH.MISTRAL3, "mistral3"),
    "Olmo2ForCausalLM": (gguf.MODEL_ARCH.OLMO2, "olmo2"),
    "Olmo3ForCausalLM": (gguf.MODEL_ARCH.OLMO2, "olmo2"),
    "Phi3ForCausalLM": (gguf.MODEL_ARCH.PHI3, "phi3"),
    "SeedOssForCausalLM": (gguf.MODEL_ARCH.SEED_OSS, "seed_oss"),
    "SmolLM3ForCausalLM": (gguf.MODEL_ARCH.SMOLLM3, "smollm3"),
}
INTERLEAVED = ("llama", "granite", "granitemoe", "mistral3", "smollm3")
EXPERT_PARTS = {  # of checkpoints with a tensor for each expert
    **{"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"},
    **{"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"},
}
VOCABULARY: dict[str, Any] = {  # byte-level BPE of three letters
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "abc", "<|im_end|>", "<tool>", "<s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3, 4, 3],
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": 7,
    "tokenizer.ggml.eos_token_id": 7,
}

Tensors = Mapping[str, np.ndarray | tuple[np.ndarray, GGMLQuantizationType]]


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Tensors | None = None) -> Path:
    """A file with this metadata (a value of None: no entry) and these tensors: fp32, or bytes of a type."""
    writer = gguf.GGUFWriter(path, metadata.get("general.architecture", "llama"))
    writer.kv_data[0].clear()
    for key, value in metadata.items():
        match value:
            case None:
                pass
            case str():
                writer.add_string(key, value)
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case _:
                writer.add_array(key, value)
    for name, tensor in (tensors or {}).items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, F32)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(
    path: Path, directory: Path, *, kind: GGMLQuantizationType = F32, without: str = "", **metadata: Any
) -> Path:
    """The checkpoint in a directory, its matrices in this type where their width allows it."""
    return write_gguf(path, model_metadata(directory) | metadata, model_tensors(directory, kind, without))


def split_model(
    folder: Path,
    directory: Path,
    count: int = 3,
    *,
    kind: GGMLQuantizationType = F32,
    no_first: bool = False,
    **metadata: Any,
) -> list[Path]:
    """The checkpoint in a directory, in ``count`` files. no_first: the first holds no tensor, as some writers have
    it."""
    tensors = list(model_tensors(directory, kind).items())
    size = -(-len(tensors) // (count - no_first))
    shares = [dict(tensors[start : start + size]) for start in range(0, len(tensors), size)]
    paths = []
    for number, share in enumerate([{}, *shares] if no_first else shares):
        said = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        first = model_metadata(directory) | metadata if number == 0 else {}
        paths.append(write_gguf(folder / f"m-{number + 1:05}-of-{count:05}.gguf", first | said, share))
    return paths


def model_metadata(directory: Path) -> dict[str, Any]:
    """What the file of a checkpoint says."""
    config = _config(directory)
    name = ARCHITECTURES[config["architectures"][0]][1]
    ropes = config.get("rope_parameters") or {}
    rope = ropes.get("full_attention", ropes)
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps") or config["norm_eps"],
        "attention.sliding_window": config.get("sliding_window"),
        "rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        numbers["rope.scaling.type"] = rope["rope_type"]
        numbers["rope.scaling.factor"] = rope["factor"]
        numbers["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
        numbers["rope.scaling.yarn_beta_fast"] = rope.get("beta_fast")
        numbers["rope.scaling.yarn_beta_slow"] = rope.get("beta_slow")
    numbers |= _own_numbers(name, config, ropes)
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in numbers.items()}


def _own_numbers(name: str, config: Mapping[str, Any], ropes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that one architecture alone has."""
    kinds, sliding = config.get("layer_types"), ropes.get("sliding_attention", {})
    numbers: dict[str, Any] = {
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    if name in ("gemma2", "gemma3", "olmo2") and kinds:
        numbers["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
        numbers["rope.freq_base_swa"] = sliding.get("rope_theta")
    if name == "lfm2":
        numbers["attention.head_count_kv"] = [
            config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds or ()
        ]
        numbers["shortconv.l_cache"] = config["conv_L_cache"]
        if config["block_auto_adjust_ff_dim"]:  # what the widths of the MLPs become
            multiple = config["block_multiple_of"]
            numbers["feed_forward_length"] = -(-int(2 * config["intermediate_size"] / 3) // multiple) * multiple
    if name == "smollm3":
        numbers["attention.sliding_window"] = None
    if count := config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts"):
        numbers["expert_count"] = count
        numbers["expert_used_count"] = config["num_experts_per_tok"]
        numbers["expert_feed_forward_length"] = config.get("moe_intermediate_size")
    if name == "qwen3moe":
        numbers |= {"attention.sliding_window": None, "expert_weights_norm": config["norm_topk_prob"]}
    if name == "glm4moe":
        numbers |= {
            "expert_gating_func": 2,
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "rope.dimension_count": int(config["head_dim"] * ropes["partial_rotary_factor"]),
        }
    if name == "phimoe":
        numbers |= {
            "rope.scaling.original_context_length": ropes["original_max_position_embeddings"],
            "rope.scaling.attn_factor": ropes["short_mscale"],
        }
    if name in ("granite", "granitemoe"):
        numbers |= {
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "logit_scale": config["logits_scaling"],
            "residual_scale": config["residual_multiplier"],
        }
    if name == "mistral3":
        numbers["attention.temperature_scale"] = ropes["llama_4_scaling_beta"]
        numbers["rope.scaling.yarn_log_multiplier"] = ropes["mscale_all_dim"]
    if name == "phi3":
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        numbers["rope.dimension_count"] = int(head_dim * ropes.get("partial_rotary_factor", 1.0))
        numbers["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        if config["sliding_window"] is None:
            numbers["attention.sliding_window"] = 0
    return numbers


def model_tensors(directory: Path, kind: GGMLQuantizationType = F32, without: str = "") -> Tensors:
    """The tensors of a checkpoint by the names of the format, without one of them."""
    config = _config(directory)
    architecture, name = ARCHITECTURES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found: dict[str, Any] = {}
    for key, tensor in load_file(directory / "model.safetensors").items():
        if ".experts." in key or "_linear." in key:
            continue
        key = key.replace("e_score_correction_bias", "e_score_correction.bias")  # as the converter calls it
        part = key.split(".")[-2]
        if part == "conv":
            tensor = tensor.squeeze(1)
        if name in INTERLEAVED and part in heads:  # the halves of each head, a row of each in turn
            first, second = tensor.view(heads[part], 2, -1, *tensor.shape[1:]).unbind(1)
            tensor = torch.stack((first, second), dim=2).view(tensor.shape)
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if stored and not stored.endswith((".weight", ".bias")):
            stored += ".weight"
        is_matrix = tensor.dim() == 2 and tensor.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        own = kind if is_matrix else F32
        if name.startswith("gemma") and "norm" in part:
            tensor = tensor + 1.0
        found[stored] = (gguf.quants.quantize(tensor.float().numpy(), own), own)
    found |= _expert_tensors(directory, kind)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = np.array(_llama3_factors(rope, config["head_dim"]), dtype=np.float32)
    for length in ("long", "short") if rope.get("rope_type") == "longrope" else ():
        found[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], dtype=np.float32)
    found.pop(without, None)
    return found


def _expert_tensors(directory: Path, kind: GGMLQuantizationType) -> dict[str, Any]:
    """The tensors of all experts of a layer, each as one of three dimensions."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    whole: dict[str, torch.Tensor] = {}
    biases: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(directory / "model.safetensors").items():
        words = key.split(".")
        if words[-2] == "experts":  # gates and ups alternate, and matrices have their columns first
            middle, is_bias = f"blk.{words[2]}.ffn", words[-1].endswith("_bias")
            turned = tensor if is_bias else tensor.transpose(1, 2)
            pairs = {"gate": turned[:, ::2], "up": turned[:, 1::2]} if "gate_up" in words[-1] else {"down": turned}
            for part, one in pairs.items():
                (biases if is_bias else whole)[f"{middle}_{part}_exps"] = one
        elif ".experts." in key:
            parts.setdefault(f"blk.{words[2]}.{EXPERT_PARTS[words[-2]]}", {})[int(words[-3])] = tensor
        elif ".input_linear." in key:
            gate, up = tensor.chunk(2, dim=1)
            whole |= {f"blk.{words[2]}.ffn_gate_exps": gate, f"blk.{words[2]}.ffn_up_exps": up}
        elif ".output_linear." in key:
            whole[f"blk.{words[2]}.ffn_down_exps"] = tensor
    whole |= {name: torch.stack([one[index] for index in range(len(one))]) for name, one in parts.items()}
    vectors = {f"{name}.bias": tensor.float().contiguous().numpy() for name, tensor in biases.items()}
    return vectors | {
        f"{name}.weight": (gguf.quants.quantize(tensor.float().contiguous().numpy(), kind), kind)
        for name, tensor in whole.items()
    }


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> list[float]:
    """By how much Llama 3.1 slows each frequency."""
    factors = []
    for index in range(0, head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        turns = rope["original_max_position_embeddings"] / wave
        share = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        share = min(1.0, max(0.0, share))
        factors.append(1 / ((1 - share) / rope["factor"] + share))
    return factors


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config
