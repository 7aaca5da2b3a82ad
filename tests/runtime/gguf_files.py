"""GGUF files of the random checkpoints, written with the gguf package, which knows names and types on its own."""

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

from tests.gguf_writer import F32, Tensors, write_gguf
from tests.runtime.checkpoints import reference

ARCHITECTURES = {
    "LlamaForCausalLM": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "MistralForCausalLM": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "Qwen2ForCausalLM": (gguf.MODEL_ARCH.QWEN2, "qwen2"),
    "Qwen3ForCausalLM": (gguf.MODEL_ARCH.QWEN3, "qwen3"),
}


def write_model(
    path: Path, family: str = "llama", *, kind: GGMLQuantizationType = F32, without: str = "", **metadata: Any
) -> Path:
    """The checkpoint of a family, its matrices in this type where their width allows it."""
    return write_gguf(path, model_metadata(family) | metadata, model_tensors(family, kind, without))


def model_metadata(family: str) -> dict[str, Any]:
    """What the file of a family's checkpoint says."""
    config = _config(family)
    name = ARCHITECTURES[config["architectures"][0]][1]
    rope = config.get("rope_parameters") or {}
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config.get("sliding_window"),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        numbers["rope.scaling.type"] = rope["rope_type"]
        numbers["rope.scaling.factor"] = rope["factor"]
        numbers["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
        numbers["rope.scaling.yarn_beta_fast"] = rope.get("beta_fast")
        numbers["rope.scaling.yarn_beta_slow"] = rope.get("beta_slow")
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in numbers.items()}


def model_tensors(family: str, kind: GGMLQuantizationType = F32, without: str = "") -> Tensors:
    """The tensors of a family's checkpoint by the names of the format, without one of them."""
    config = _config(family)
    architecture, name = ARCHITECTURES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found: dict[str, Any] = {}
    for key, tensor in load_file(reference(family).directory / "model.safetensors").items():
        part = key.split(".")[-2]
        if name == "llama" and part in heads:  # the halves of each head, a row of each in turn
            first, second = tensor.view(heads[part], 2, -1, *tensor.shape[1:]).unbind(1)
            tensor = torch.stack((first, second), dim=2).view(tensor.shape)
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        is_matrix = tensor.dim() == 2 and tensor.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        own = kind if is_matrix else F32
        found[stored] = (gguf.quants.quantize(tensor.float().numpy(), own), own)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = np.array(_llama3_factors(rope, config["head_dim"]), dtype=np.float32)
    found.pop(without, None)
    return found


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


def _config(family: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((reference(family).directory / "config.json").read_text())
    return config
