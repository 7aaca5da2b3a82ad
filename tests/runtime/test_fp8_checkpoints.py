"""Checkpoints in FP8 stand for each value times the scale of its tensor, row or block, whoever wrote them, and what is
not read is refused by field or tensor before a weight is."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.quantization.quantization_config import CONVERTED, NO_ACTIVATIONS, NO_KV_CACHE
from diptych.runtime.weights.checkpoint import open_checkpoint, resolve_dtype_name
from diptych.runtime.weights.loader import Weights
from diptych.runtime.weights.quantized_weight import quantize
from diptych.runtime.weights.weight_bytes import loaded_weight_bytes
from diptych.runtime.weights.weight_format import QUANTIZATIONS
from tests.runtime.quantized_checkpoints import LLAMA, MODULES, Tensors, write_model
from tests.runtime.test_quantized_checkpoints import CPU, QKV, check_scheme_is_refused, load, logprobs

E4M3 = torch.float8_e4m3fn
E8M0 = getattr(torch, "float8_e8m0fnu", None)  # not in the oldest torch


@dataclass(frozen=True)
class Scales:
    """What shares a scale. kind: tensor | channel | block. shape: how it is stored, of these names."""

    kind: str
    shape: str
    block: tuple[int, int] = (128, 128)
    dtype: torch.dtype | None = torch.float32

    def make(self, rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """(the scale as it is stored, [rows, columns] fp32 that the values are multiplied by)."""
        block = {"tensor": (rows, columns), "channel": (1, columns), "block": self.block}[self.kind]
        counts = -(-rows // block[0]), -(-columns // block[1])
        exponents = torch.randint(117, 124, counts, generator=generator).to(torch.uint8)
        scale = torch.rand(counts, generator=generator) * 0.05 + 0.001
        if self.dtype is E8M0 and E8M0 is not None:
            scale, stored = torch.exp2(exponents.float() - 127), exponents.view(E8M0)
        else:
            assert self.dtype is not None
            stored = scale.to(self.dtype)
            scale = stored.float()
        wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
        shape = {"": (), "1": (1,), "rows": (rows,), "rows, 1": (rows, 1), "grid": counts}
        return stored.reshape(shape.get(self.shape, (counts[0], 1, counts[1], 1))), wide


KINDS = {
    "tensor": Scales("tensor", ""),
    "tensor of one": Scales("tensor", "1"),
    "channel": Scales("channel", "rows, 1", dtype=torch.bfloat16),
    "flat channel": Scales("channel", "rows", dtype=torch.float16),
    "block": Scales("block", "grid"),  # one for all: the weights are smaller
    "uneven blocks": Scales("block", "grid", (40, 24)),
    "blocks of ModelOpt": Scales("block", "four", (128, 128)),
    "uneven blocks of exponents": Scales("block", "grid", (24, 40), dtype=E8M0),
}
STATIC: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
DEEPSEEK: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [40, 24],
}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": WEIGHTS,
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
MODELOPT: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}


def tensors_of(scales: Scales, part: str = "weight_scale_inv") -> tuple[Tensors, Tensors]:
    """(what the checkpoint holds, what it stands for in fp32) of a whole model."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (80, 64), "lm_head.weight": (80, 64), "model.norm.weight": (64,)}
    stored, exact = {}, {}
    for layer in range(LLAMA["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{norm}_layernorm.weight": (64,) for norm in ("input", "post_attention")}
        for module, (rows, columns) in MODULES.items():
            values = torch.randn(rows, columns, generator=generator).mul(4).to(E4M3)
            scale, wide = scales.make(rows, columns, generator)
            stored |= {f"{name}.{module}.weight": values, f"{name}.{module}.{part}": scale}
            exact[f"{name}.{module}.weight"] = values.float() * wide
    for name, shape in shapes.items():
        stored[name] = torch.randn(shape, generator=generator).to(torch.bfloat16)
        exact[name] = stored[name].float()
    return stored, exact


def with_unused(stored: Tensors, *parts: str) -> Tensors:
    """The same with a scale of activations, or of the KV cache, for each module in FP8 that has such a part."""
    modules = [name.removesuffix(".weight") for name, tensor in stored.items() if tensor.dtype is E4M3]
    extra = {}
    for part in parts:
        where = [module for module in modules if not part.startswith(("k_", "v_")) or f".{part[0]}_proj" in module]
        extra |= {f"{module}.{part}": torch.tensor(0.5) for module in where}
    return stored | extra


def weights_of(directory: Path, dtype: torch.dtype = torch.float32) -> Weights:
    """The weights of a model directory."""
    return Weights(open_checkpoint(read_model_config(directory)), dtype, CPU)


def config_for(scales: Scales) -> dict[str, Any]:
    """The config of DeepSeek with these blocks."""
    return DEEPSEEK | {"weight_block_size": list(scales.block) if scales.kind == "block" else None}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("part", ["weight_scale_inv", "weight_scale"])
def test_a_weight_is_its_values_times_their_scales(name: str, part: str, tmp_path: Path) -> None:
    scales = KINDS[name]
    if scales.dtype is None:
        pytest.skip("this torch has no exponents of 8 bits")
    stored, exact = tensors_of(scales, part)
    directory = write_model(tmp_path, stored, config_for(scales))
    for module, (rows, columns) in MODULES.items():
        tensor = f"model.layers.1.{module}.weight"
        assert torch.equal(weights_of(directory).fused([tensor], [rows], columns), exact[tensor])
        rounded = weights_of(directory, torch.bfloat16).fused([tensor], [rows], columns)
        assert torch.equal(rounded, exact[tensor].to(torch.bfloat16))
    checkpoint = open_checkpoint(read_model_config(directory))
    assert set(checkpoint.tensors) == set(exact)
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in stored.values())


@pytest.mark.parametrize("name", ["tensor", "channel", "uneven blocks"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_whole_numbers_are_made_of_the_exact_weight(name: str, quantization: str, tmp_path: Path) -> None:
    stored, exact = tensors_of(KINDS[name])
    weights = weights_of(write_model(tmp_path, stored, config_for(KINDS[name])), torch.bfloat16)
    wanted = QUANTIZATIONS[quantization].format_of(64, is_vocabulary=False)
    assert wanted is not None
    weight = weights.rounded(QKV, [64, 32, 32], 64, wanted).read()
    expected = quantize(torch.cat([exact[f"{module}.weight"] for module in QKV]), wanted)
    assert torch.equal(weight.values, expected.values) and torch.equal(weight.scales, expected.scales)


MODELS = {  # a config, what shares a scale, the name of scales, others that the file holds, and the notes
    "transformers": (DEEPSEEK, "uneven blocks", "weight_scale_inv", (), (CONVERTED,)),
    "ministral": (STATIC, "tensor", "weight_scale_inv", ("activation_scale",), (CONVERTED, NO_ACTIVATIONS)),
    "autofp8": (
        {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"},
        "tensor of one",
        "weight_scale",
        ("input_scale", "k_scale", "v_scale"),
        (CONVERTED, NO_ACTIVATIONS, NO_KV_CACHE),
    ),
    "compressed": (COMPRESSED, "channel", "weight_scale", (), (CONVERTED,)),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "tensor",
        "weight_scale",
        ("input_scale",),
        (CONVERTED, NO_ACTIVATIONS),
    ),
    "hf_quant_config": (
        None,
        "tensor",
        "weight_scale",
        ("input_scale", "k_scale", "v_scale"),
        (CONVERTED, NO_ACTIVATIONS, NO_KV_CACHE),
    ),
}


def write(directory: Path, name: str) -> tuple[Path, Tensors]:
    """(a model of MODELS, what it stands for)."""
    config, kind, part, unused, _ = MODELS[name]
    stored, exact = tensors_of(KINDS[kind], part)
    write_model(directory, with_unused(stored, *unused), config)
    if config is None:
        (directory / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    return directory, exact


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_fp8_computes_what_its_weights_in_floating_point_do(name: str, tmp_path: Path) -> None:
    directory, exact = write(tmp_path / "fp8", name)
    quantised, plain = load(directory), load(write_model(tmp_path / "plain", exact))
    assert torch.equal(logprobs(quantised), logprobs(plain))
    assert quantised.loaded.note == "; ".join(MODELS[name][-1]) and plain.loaded.note == ""
    assert quantised.loaded.weights == "float32"


def test_a_model_in_fp8_becomes_int8_as_the_exact_one_does(tmp_path: Path) -> None:
    directory, exact = write(tmp_path / "fp8", "transformers")
    plain = write_model(tmp_path / "plain", exact)
    assert torch.equal(logprobs(load(directory, quantize="int8")), logprobs(load(plain, quantize="int8")))
    assert loaded_weight_bytes(directory, "float32", "int8") == loaded_weight_bytes(plain, "float32", "int8")
    assert loaded_weight_bytes(directory, "bfloat16", "none") == loaded_weight_bytes(plain, "bfloat16", "none")


def test_the_dtype_of_a_config_without_one_is_that_of_the_tensors_that_are_not_in_fp8(tmp_path: Path) -> None:
    stored, _ = tensors_of(KINDS["tensor"])
    directory = write_model(tmp_path, dict(sorted(stored.items(), key=lambda item: item[1].dtype is not E4M3)), STATIC)
    config = json.loads((directory / "config.json").read_text())
    del config["torch_dtype"]
    (directory / "config.json").write_text(json.dumps(config))
    model = read_model_config(directory)
    assert resolve_dtype_name("auto", model, open_checkpoint(model)) == ("bfloat16", "")


def test_a_quantised_kv_cache_alone_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    _, exact = tensors_of(KINDS["tensor"])
    scale = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5)}
    directory = write_model(tmp_path / "kv", exact | scale)
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (directory / "hf_quant_config.json").write_text(json.dumps(said))
    assert read_model_config(directory).notes == (NO_KV_CACHE,)
    assert torch.equal(logprobs(load(directory)), logprobs(load(write_model(tmp_path / "plain", exact))))


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("config", "path", "value", "message"),
    [
        (DEEPSEEK, ("fmt",), "e5m2", "fmt is 'e5m2'; supported: e4m3"),
        (DEEPSEEK, ("activation_scheme",), "none", "activation_scheme is 'none'; supported: dynamic, static"),
        (DEEPSEEK, ("scale_fmt",), "int8", "scale_fmt is 'int8'; supported: float, ue8m0"),
        (DEEPSEEK, ("weight_block_size",), [128], "weight_block_size is [128]; supported: two whole numbers"),
        (DEEPSEEK, ("weight_block_size",), [0, 128], "weight_block_size is [0, 128]; supported: two whole numbers"),
        (COMPRESSED, (*GROUP, "weights", "num_bits"), 4, "weights.num_bits is 4; supported: 8"),
        (
            COMPRESSED,
            (*GROUP, "weights", "strategy"),
            "group",
            "strategy is 'group'; supported: tensor, channel, block",
        ),
        (COMPRESSED, (*GROUP, "weights", "symmetric"), False, "weights.symmetric is False; supported: True"),
        (COMPRESSED, (*GROUP, "weights", "type"), "int", "weights.type is 'int'; supported: float"),
        (COMPRESSED, (*GROUP, "output_activations"), {"num_bits": 8}, "output_activations is {'num_bits': 8}; suppor"),
        (COMPRESSED, ("sparsity_config",), {"format": "sparse-24"}, "sparsity_config.format is 'sparse-24'; supporte"),
        ({"quant_method": "modelopt"}, ("quant_algo",), "NVFP4", "quant_algo is 'NVFP4'; supported: FP8, FP8_PER_CH"),
    ],
)
def test_a_scheme_that_is_not_read_is_refused_by_field_and_value(
    config: dict[str, Any], path: tuple[str, ...], value: Any, message: str, tmp_path: Path
) -> None:
    check_scheme_is_refused(tmp_path, config, path, value, message)


def test_what_modelopt_says_beside_the_config_is_refused_by_its_file(tmp_path: Path) -> None:
    directory = write_model(tmp_path, {})
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(UnsupportedModelError, match=r"hf_quant_config\.json: quantization\.quant_algo is 'W4A8_AWQ'"):
        read_model_config(directory)


@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        (
            "q_proj.weight_scale_inv",
            None,
            r"q_proj\.weight_scale_inv or \S+weight_scale is missing .*q_proj\.weight in",
        ),
        (
            "q_proj.weight_scale_inv",
            torch.ones(3, 3),
            r"scale_inv is F32 \[3, 3\]; .*\[64, 64\] .*\[2, 3\] or \[\] or \[1\]",
        ),
        (
            "q_proj.weight_scale_inv",
            torch.ones(2, 3).int(),
            r"q_proj\.weight_scale_inv is I32 \[2, 3\]; .* BF16 or F32",
        ),
        ("q_proj.weight_scale", torch.ones(2, 3), r"q_proj\.weight_scale has no weight in F8_E4M3 beside it"),
        ("q_proj.weight", torch.zeros(64, 64).bfloat16(), r"q_proj\.weight_scale_inv has no weight in F8_E4M3 beside"),
        (
            "q_proj.weight",
            torch.zeros(1, 2, 64, 64).to(E4M3),
            r"weight is F8_E4M3 \[1, 2, 64, 64\]; supported: weights",
        ),
        ("q_proj.weight", torch.zeros(2, 64, 64).to(E4M3), r"F32 \[2, 3\]; .*\[2, 64, 64\] .* \[2, 2, 3\] or \[2\] or"),
        (
            "q_proj.bias",
            torch.zeros(64).to(E4M3),
            r"q_proj\.bias is F8_E4M3 \[64\]; supported: weights \(\.weight\) of",
        ),
        ("o_proj.bias", torch.zeros(64).to(torch.float8_e5m2), r"o_proj\.bias has dtype F8_E5M2; supported: BF16"),
    ],
)
def test_a_tensor_that_is_not_read_is_named_before_a_weight_is(
    tensor: str, value: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    changed = tensors_of(KINDS["uneven blocks"])[0] | {f"model.layers.1.self_attn.{tensor}": value}
    write_model(tmp_path, {name: stored for name, stored in changed.items() if stored is not None}, DEEPSEEK)
    with pytest.raises(ConfigError, match=message):
        read_kv_geometry(tmp_path, "auto", 16)  # as the front end does, too


def test_fp8_without_a_word_of_the_config_is_refused_by_tensor(tmp_path: Path) -> None:
    write_model(tmp_path, tensors_of(KINDS["tensor"])[0])
    with pytest.raises(
        UnsupportedModelError, match=r"_proj\.weight has dtype F8_E4M3; .* quantization_config says what"
    ):
        read_kv_geometry(tmp_path, "auto", 16)
