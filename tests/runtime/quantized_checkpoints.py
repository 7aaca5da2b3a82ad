"""Writes tiny Llama checkpoints in the layouts of compressed-tensors, GPTQ and AWQ, as their formats are described.

Every weight is made of whole numbers, zero points and scales, so that its value in floating point is known exactly:
scale * (value - zero point).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 80,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
MODULES = {  # of a layer: (outputs, inputs)
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns lies in the i-th four bits of a word

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Numbers:
    """A weight [rows, columns] in whole numbers from 0 up, zero points [rows, groups] from 0 up, scales alike."""

    bits: int
    values: np.ndarray
    zeros: np.ndarray
    scales: torch.Tensor

    def floating(self) -> torch.Tensor:
        """[rows, columns] fp32."""
        repeats = self.values.shape[1] // self.zeros.shape[1]
        whole = self.values - self.zeros.repeat(repeats, axis=1)
        return torch.from_numpy(whole).float() * self.scales.float().repeat_interleave(repeats, dim=1)


def words_of(values: np.ndarray, bits: int) -> torch.Tensor:
    """[n, values] packed along the rows, the first value in the lowest bits, with zeros at the end."""
    per_word = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word))).astype(np.uint32)
    words = np.zeros((values.shape[0], padded.shape[1] // per_word), np.uint32)
    for place in range(per_word):
        words |= padded[:, place::per_word] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def down(values: np.ndarray, bits: int) -> torch.Tensor:
    """The same, packed down the columns."""
    return words_of(values.T, bits).T.contiguous()


def pack_quantized(weight: Numbers, is_symmetric: bool) -> Tensors:
    """compressed-tensors, signed values plus half the range in words."""
    tensors = {
        "weight_packed": words_of(weight.values, weight.bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.values.shape),
    }
    return tensors if is_symmetric else tensors | {"weight_zero_point": down(weight.zeros, weight.bits)}


def int_quantized(weight: Numbers, is_symmetric: bool) -> Tensors:
    """compressed-tensors, signed bytes."""
    tensors = {"weight": torch.from_numpy((weight.values - 128).astype(np.int8)), "weight_scale": weight.scales}
    zeros = torch.from_numpy((weight.zeros - 128).astype(np.int8))
    return tensors if is_symmetric else tensors | {"weight_zero_point": zeros}


def gptq_v2(weight: Numbers, is_symmetric: bool) -> Tensors:
    """GPTQ, zero points as they are."""
    columns, groups = weight.values.shape[1], weight.zeros.shape[1]
    return {
        "qweight": down(weight.values.T, weight.bits),
        "qzeros": words_of(weight.zeros.T, weight.bits),
        "scales": weight.scales.T.contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // (columns // groups),
    }


def gptq(weight: Numbers, is_symmetric: bool) -> Tensors:
    """GPTQ's first format: each zero point one less, subtracted from the whole word."""
    ones = sum(1 << place for place in range(0, 32, weight.bits))
    tensors = gptq_v2(weight, is_symmetric)
    less = tensors["qzeros"].numpy().view(np.uint32) - np.uint32(ones)
    return tensors | {"qzeros": torch.from_numpy(less.view(np.int32))}


def awq(weight: Numbers, is_symmetric: bool) -> Tensors:
    """AWQ (gemm): packed along the outputs, in an order of its own."""

    def words(values: np.ndarray) -> torch.Tensor:
        ordered = values.reshape(values.shape[0], -1, 8)[:, :, AWQ_ORDER]
        return words_of(ordered.reshape(values.shape), 4)

    return {"qweight": words(weight.values.T), "qzeros": words(weight.zeros.T), "scales": weight.scales.T.contiguous()}


@dataclass(frozen=True)
class Scheme:
    """One way to quantise. group_size None: a scale for each row."""

    config: dict[str, Any]
    write: Callable[[Numbers, bool], Tensors]
    bits: int
    group_size: int | None = None
    is_symmetric: bool = True
    scale_dtype: torch.dtype = torch.float16
    changes: dict[str, Any] = field(default_factory=dict)


def compressed(
    layout: str, bits: int, group_size: int | None = None, is_symmetric: bool = True, with_activations: bool = False
) -> Scheme:
    """A scheme of compressed-tensors."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": is_symmetric,
        "group_size": group_size,
        "strategy": "group" if group_size else "channel",
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
    }
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations if with_activations else None,
        "output_activations": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
    write = int_quantized if layout == "int-quantized" else pack_quantized
    return Scheme(config, write, bits, group_size, is_symmetric, torch.bfloat16)


def gptq_scheme(version: str, bits: int, group_size: int | None, is_symmetric: bool) -> Scheme:
    """A scheme of GPTQ."""
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size or -1,
        "sym": is_symmetric,
        "desc_act": False,
        "checkpoint_format": version,
        "lm_head": False,
    }
    return Scheme(config, gptq if version == "gptq" else gptq_v2, bits, group_size, is_symmetric)


def awq_scheme(group_size: int | None) -> Scheme:
    """A scheme of AWQ."""
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    return Scheme(config, awq, 4, group_size, is_symmetric=False)


SCHEMES = {
    "w8a8": compressed("int-quantized", 8, with_activations=True),
    "w8a8-asymmetric": compressed("int-quantized", 8, is_symmetric=False, with_activations=True),
    "w4a16": compressed("pack-quantized", 4, 32),
    "w4a16-asymmetric": compressed("pack-quantized", 4, 32, is_symmetric=False),
    "w4a16-channel": compressed("pack-quantized", 4),
    "w4a16-channel-asymmetric": compressed("pack-quantized", 4, is_symmetric=False),
    "w8a16": compressed("pack-quantized", 8, 32),
    "gptq": gptq_scheme("gptq", 4, 32, is_symmetric=True),
    "gptq-channel": gptq_scheme("gptq", 4, None, is_symmetric=True),
    "gptq-asymmetric": gptq_scheme("gptq", 4, 32, is_symmetric=False),
    "gptq-int8": gptq_scheme("gptq", 8, 32, is_symmetric=True),
    "gptq-int8-asymmetric": gptq_scheme("gptq", 8, 32, is_symmetric=False),
    "gptq-v2": gptq_scheme("gptq_v2", 4, 32, is_symmetric=True),
    "gptq-v2-asymmetric": gptq_scheme("gptq_v2", 4, 32, is_symmetric=False),
    "awq": awq_scheme(32),
    "awq-channel": awq_scheme(None),
}


def random_numbers(scheme: Scheme, rows: int, columns: int, seed: int = 0) -> Numbers:
    """A weight with every value and, where asymmetric, every zero point."""
    random = np.random.default_rng(seed)
    top, groups = 1 << scheme.bits, columns // (scheme.group_size or columns)
    zeros = np.full((rows, groups), top // 2)
    if not scheme.is_symmetric:
        zeros = random.integers(0, top, (rows, groups))
    scales = torch.from_numpy(random.uniform(0.2, 1.0, (rows, groups))) / top
    return Numbers(scheme.bits, random.integers(0, top, (rows, columns)), zeros, scales.to(scheme.scale_dtype))


def tensors_of(scheme: Scheme) -> tuple[Tensors, Tensors]:
    """(what the checkpoint holds, what it stands for in floating point) of a whole model."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (80, 64), "lm_head.weight": (80, 64), "model.norm.weight": (64,)}
    stored, floating = {}, {}
    for layer in range(LLAMA["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{norm}_layernorm.weight": (64,) for norm in ("input", "post_attention")}
        for index, (module, shape) in enumerate(MODULES.items()):
            numbers = random_numbers(scheme, *shape, seed=10 * layer + index)
            floating[f"{name}.{module}.weight"] = numbers.floating()
            parts = scheme.write(numbers, scheme.is_symmetric)
            stored |= {f"{name}.{module}.{part}": tensor for part, tensor in parts.items()}
    for name, shape in shapes.items():
        stored[name] = floating[name] = torch.randn(shape, generator=generator).to(torch.bfloat16)
    return stored, floating


def write_model(directory: Path, tensors: Tensors, quantization: dict[str, Any] | None = None) -> Path:
    """A model directory."""
    directory.mkdir(exist_ok=True)
    config = LLAMA | ({"quantization_config": quantization} if quantization else {})
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory
