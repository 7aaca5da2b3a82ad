"""Checkpoints as large as wanted that take no room: a config and headers, with holes where the weights would be."""

import json
import struct
from pathlib import Path
from typing import Any

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
}


def sparse_llama(directory: Path, **changes: Any) -> Path:
    """A Llama checkpoint (8B, but for ``changes`` of its config) in one file of holes."""
    directory.mkdir(parents=True)
    config = LLAMA_8B | changes
    (directory / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in _shapes(config).items():
        size = 2
        for number in shape:
            size *= number
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return directory


def _shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    hidden, wide, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [vocabulary, hidden]
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj": [hidden, hidden],
            "self_attn.k_proj": [kv, hidden],
            "self_attn.v_proj": [kv, hidden],
            "self_attn.o_proj": [hidden, hidden],
            "mlp.gate_proj": [wide, hidden],
            "mlp.up_proj": [wide, hidden],
            "mlp.down_proj": [hidden, wide],
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes
