#!/usr/bin/env python3
"""Write a model directory with random weights: the shape of a real model for benchmarks, or a tiny one for tests.

    python scripts/make_random_model.py smollm2-135m /tmp/models/smollm2-135m
    python scripts/make_random_model.py tiny-qwen3 /tmp/models/tiny --dtype float32 --std 0.1

Every weight of a matrix is drawn from a normal distribution; norms are 1. The tokenizer of the model that ships with
Diptych is copied when it is there. Needs torch.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

BUNDLED = Path(__file__).resolve().parent.parent / "src" / "diptych" / "bundled" / "stdlib-python"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# architecture, vocabulary, hidden, intermediate, layers, heads, kv heads, context, tied; then the rest of config.json
SHAPES: dict[str, tuple[tuple[str, int, int, int, int, int, int, int, bool], dict[str, Any]]] = {
    "smollm2-135m": (("Llama", 49152, 576, 1536, 30, 9, 3, 8192, True), {"rope_theta": 100000.0}),
    "qwen2.5-0.5b": (("Qwen2", 151936, 896, 4864, 24, 14, 2, 32768, True), {"rope_theta": 1000000.0}),
    "qwen3-0.6b": (("Qwen3", 151936, 1024, 3072, 28, 16, 8, 40960, True), {"rope_theta": 1e6, "head_dim": 128}),
    "llama3.2-1b": (
        ("Llama", 128256, 2048, 8192, 16, 32, 8, 131072, True),
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "head_dim": 64},
    ),
    "llama-20m": (("Llama", 4096, 384, 1024, 12, 6, 2, 8192, True), {}),
    "tiny-llama": (("Llama", 4096, 128, 256, 2, 4, 2, 4096, False), {}),
    "tiny-mistral": (("Mistral", 4096, 128, 256, 2, 4, 2, 4096, False), {"sliding_window": 256}),
    "tiny-qwen2": (("Qwen2", 4096, 128, 256, 2, 4, 2, 4096, True), {}),
    "tiny-qwen3": (("Qwen3", 4096, 128, 256, 2, 4, 2, 4096, True), {"head_dim": 64}),
}


def model_config(shape: str, dtype: str) -> dict[str, Any]:
    """config.json of a shape."""
    (family, vocab, hidden, inner, layers, heads, kv_heads, context, tied), extra = SHAPES[shape]
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": dtype,
    } | extra


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a checkpoint's tensors."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    family = config["model_type"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{prefix}.self_attn.{part}_proj.weight"] = (rows, hidden)
            if family == "qwen2":
                shapes[f"{prefix}.self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, queries)
        if family == "qwen3":
            shapes[f"{prefix}.self_attn.q_norm.weight"] = shapes[f"{prefix}.self_attn.k_norm.weight"] = (dim,)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return shapes


def write_safetensors(
    path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, std: float, seed: int
) -> None:
    """Draw and write tensor by tensor."""
    code = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            tensor = torch.empty(shape)
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, std, generator=generator)
            file.write(tensor.to(dtype).view(torch.uint8).numpy().tobytes())


def make_model(shape: str, directory: Path, dtype: str = "bfloat16", std: float = 0.02, seed: int = 0) -> Path:
    """Write the model directory and return it."""
    config = model_config(shape, dtype)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}) + "\n")
    write_safetensors(directory / "model.safetensors", tensor_shapes(config), getattr(torch, dtype), std, seed)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (BUNDLED / name).exists():
            shutil.copy(BUNDLED / name, directory / name)
    return directory


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--std", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_model(args.shape, args.directory, args.dtype, args.std, args.seed))


if __name__ == "__main__":
    main()
