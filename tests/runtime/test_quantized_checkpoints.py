"""Quantised checkpoints stand for the numbers that their formats define, and what cannot be read is refused by name."""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.kernels.instruction_set import TORCH
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig, load_runner
from diptych.runtime.weights.checkpoint import open_checkpoint
from diptych.runtime.weights.loader import Weights
from diptych.runtime.weights.weight_format import WeightFormat
from tests.runtime.driving import generate, greedy
from tests.runtime.quantized_checkpoints import MODULES, SCHEMES, Scheme, Tensors, tensors_of, write_model

CPU = torch.device("cpu")
QKV = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def weights_of(directory: Path) -> Weights:
    """The weights of a model directory, in fp32."""
    return Weights(open_checkpoint(read_model_config(directory)), torch.float32, CPU)


def check_scheme_is_refused(
    directory: Path, config: dict[str, Any], path: tuple[str, ...], value: Any, message: str
) -> None:
    """A quantization_config with ``value`` at ``path`` is refused with ``message``, under its field."""
    changed = target = copy.deepcopy(config)
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(UnsupportedModelError) as caught:
        read_model_config(write_model(directory, {}, changed))
    assert str(caught.value).startswith(f"{directory / 'config.json'}: quantization_config.")
    assert message in str(caught.value)


def write(directory: Path, scheme: Scheme, **changes: Any) -> Path:
    """A checkpoint in this scheme; ``changes`` add tensors, replace them, or (None) remove them."""
    tensors = {name: tensor for name, tensor in (tensors_of(scheme)[0] | changes).items() if tensor is not None}
    return write_model(directory, tensors, scheme.config)


def load(directory: Path, **changes: Any) -> ModelRunner:
    """A runner in fp32 with plain torch."""
    config = RunnerConfig(directory, dtype="float32", instruction_set=TORCH, num_blocks=8, block_size=16, **changes)
    return load_runner(config)


def logprobs(runner: ModelRunner) -> torch.Tensor:
    """Log probabilities of the tokens of a prompt, each after those before it."""
    _, results = generate(runner, PROMPT, [len(PROMPT)], greedy(1, prompt_logprobs=0))
    (_, entries) = results[0].payload.prompt_logprobs["r"]
    return torch.tensor([entry.logprob for entry in entries])


@pytest.mark.parametrize("name", SCHEMES)
def test_every_layout_gives_the_numbers_that_were_written(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    expected = tensors_of(scheme)[1]
    weights = weights_of(write(tmp_path, scheme))
    wanted = WeightFormat(scheme.bits, scheme.group_size, has_mins=not scheme.is_symmetric)
    source = weights.quantized(QKV, [64, 32, 32], 64)
    assert source is not None and (source.format, source.rows, source.columns) == (wanted, 128, 64)
    weight = source.read()
    assert (
        weight.format == wanted and weight.values.dtype is torch.uint8 and int(weight.values.max()) < 1 << wanted.bits
    )
    assert weight.scales.shape == (128, wanted.num_groups(64)) and weight.scales.dtype is torch.float32
    assert (weight.mins is not None) == wanted.has_mins
    assert weight.values.is_contiguous() and weight.scales.is_contiguous()
    assert torch.equal(weight.dequantize(), torch.cat([expected[f"{module}.weight"] for module in QKV]))
    for module, shape in MODULES.items():  # where no kernel takes whole numbers
        tensor = f"model.layers.0.{module}.weight"
        assert torch.equal(weights.fused([tensor], shape[:1], *shape[1:]), expected[tensor])
    assert weights.quantized(["lm_head"], [80], 64) is None


@pytest.mark.parametrize("name", ["w8a8", "w4a16-asymmetric", "gptq", "awq"])
def test_a_quantised_directory_computes_what_its_weights_in_floating_point_do(name: str, tmp_path: Path) -> None:
    stored, floating = tensors_of(SCHEMES[name])
    quantised = load(write_model(tmp_path / "quantised", stored, SCHEMES[name].config))
    exact = load(write_model(tmp_path / "exact", floating))
    rounded = 0.8 if name == "w8a8" else 2e-2  # rows of 8 bits move logprobs of 20 and more
    torch.testing.assert_close(logprobs(quantised), logprobs(exact), rtol=0, atol=rounded)


def test_progress_counts_every_part_of_a_weight_and_nothing_is_left(tmp_path: Path) -> None:
    directory = write(tmp_path, SCHEMES["gptq"])
    seen: list[tuple[int, int]] = []
    config = RunnerConfig(directory, instruction_set=TORCH, num_blocks=4)
    load_runner(config, lambda done, total: seen.append((done, total)))
    stored = sum(tensor.nbytes for tensor in tensors_of(SCHEMES["gptq"])[0].values())
    assert seen[-1] == seen[-2] == (stored, stored)


def test_the_parts_of_a_weight_may_lie_in_several_files(tmp_path: Path) -> None:
    scheme = SCHEMES["awq"]
    stored, expected = tensors_of(scheme)
    write_model(tmp_path, stored, scheme.config)
    (tmp_path / "model.safetensors").unlink()
    files: dict[str, Tensors] = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, tensor) in enumerate(stored.items()):
        files["ab"[index % 2] + ".safetensors"][name] = tensor
    for file, tensors in files.items():
        save_file(tensors, tmp_path / file)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = weights_of(tmp_path).quantized(["model.layers.0.mlp.down_proj"], [64], 96)
    assert source is not None
    assert torch.equal(source.read().dequantize(), expected["model.layers.0.mlp.down_proj.weight"])


@pytest.mark.parametrize("name", ["w4a16", "gptq"])
def test_a_module_in_floating_point_among_quantised_ones_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    stored, expected = tensors_of(scheme)
    stored = {tensor: value for tensor, value in stored.items() if not tensor.startswith(QKV[0])}
    stored[f"{QKV[0]}.weight"] = expected[f"{QKV[0]}.weight"]
    weights = weights_of(write_model(tmp_path, stored, scheme.config))
    assert weights.quantized(QKV, [64, 32, 32], 64) is None
    fused = weights.fused([f"{module}.weight" for module in QKV], [64, 32, 32], 64)
    assert torch.equal(fused, torch.cat([expected[f"{module}.weight"] for module in QKV]))


def test_symmetric_gptq_may_hold_either_zero_point(tmp_path: Path) -> None:
    scheme = SCHEMES["gptq"]
    qzeros = f"{QKV[0]}.qzeros"
    v2 = torch.full_like(tensors_of(scheme)[0][qzeros], -0x77777778)  # 0x88888888: 8, though v1 stores 7
    source = weights_of(write(tmp_path, scheme, **{qzeros: v2})).quantized(QKV, [64, 32, 32], 64)
    assert source is not None
    expected = tensors_of(scheme)[1]
    assert torch.equal(source.read().dequantize(), torch.cat([expected[f"{module}.weight"] for module in QKV]))
    source = weights_of(write(tmp_path, scheme, **{qzeros: v2 + 1})).quantized(QKV, [64, 32, 32], 64)
    assert source is not None
    with pytest.raises(ConfigError, match=r"q_proj\.qzeros has zero points other than 7 and 8; .*sym says"):
        source.read()


def test_a_bias_of_zeros_that_the_model_does_not_have_is_ignored(tmp_path: Path) -> None:
    load(write(tmp_path, SCHEMES["gptq"], **{f"{QKV[0]}.bias": torch.zeros(64).half()}))
    with pytest.raises(ConfigError, match=r"q_proj\.bias is not part of this architecture"):
        load(write(tmp_path, SCHEMES["gptq"], **{f"{QKV[0]}.bias": torch.ones(64).half()}))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on linux only")
def test_shared_weights_of_a_quantised_checkpoint_are_those_of_a_private_copy(tmp_path: Path) -> None:
    directory = write(tmp_path, SCHEMES["w4a16"])
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    writer, reader = (load(directory, shared_weights=fd) for _ in range(2))
    os.close(fd)
    expected = logprobs(load(directory))
    assert torch.equal(logprobs(writer), expected) and torch.equal(logprobs(reader), expected)
    assert writer.loaded.note == reader.loaded.note == ""


W4A16, GPTQ, AWQ, W8A8 = (SCHEMES[name].config for name in ("w4a16", "gptq", "awq", "w8a8"))
WEIGHTS = ("config_groups", "group_0", "weights")
ACTIVATIONS = ("config_groups", "group_0", "input_activations")


@pytest.mark.parametrize(
    ("config", "path", "value", "message"),
    [
        (GPTQ, ("quant_method",), "bitsandbytes", "quant_method is 'bitsandbytes'; supported: compressed-tensors, gp"),
        (GPTQ, ("quant_method",), "hqq", "quant_method is 'hqq'; supported: compressed-tensors, gptq, awq, fp8, mod"),
        (GPTQ, ("bits",), 3, "bits is 3; supported: 8, 4"),
        (GPTQ, ("bits",), None, "bits is None; supported: a whole number"),
        (GPTQ, ("group_size",), 16, "group_size is 16; supported: -1 and multiples of 32"),
        (GPTQ, ("checkpoint_format",), "marlin", "checkpoint_format is 'marlin'; supported: gptq, gptq_v2"),
        (GPTQ, ("is_marlin_format",), True, "is_marlin_format is True; supported: False"),
        (GPTQ, ("dynamic",), {"+:.*down.*": {"bits": 8}}, "supported: modules that are not quantised (-:), no other"),
        (AWQ, ("bits",), 8, "bits is 8; supported: 4"),
        (AWQ, ("version",), "gemv", "version is 'gemv'; supported: gemm"),
        (AWQ, ("zero_point",), False, "zero_point is False; supported: True"),
        (W4A16, ("format",), "float-quantized", "config_groups.group_0.weights.type is 'int'; supported: float"),
        (W4A16, ("format",), "marlin-24", "format is 'marlin-24'; supported: pack-quantized"),
        (W4A16, ("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme is {'num_bits': 8}; supported: none"),
        (W4A16, ("transform_config",), {"config_groups": {}}, "transform_config is {'config_groups': {}}; supported"),
        (W4A16, ("sparsity_config",), {"format": "sparse-bitmask"}, "sparsity_config.format is 'sparse-bitmask'; supp"),
        (W4A16, ("config_groups",), {"a": {}, "b": {}}, "config_groups is {'a': {}, 'b': {}}; supported: one group"),
        (W4A16, ("config_groups",), {"W4A16": ["Linear"]}, "config_groups.W4A16 is ['Linear']; supported: an object"),
        (W4A16, (*WEIGHTS, "num_bits"), 2, "quantization_config.config_groups.group_0.weights.num_bits is 2; suppor"),
        (W4A16, (*WEIGHTS, "type"), "float", "weights.type is 'float'; supported: int"),
        (W4A16, (*WEIGHTS, "strategy"), "block", "weights.strategy is 'block'; supported: channel, group"),
        (W8A8, (*WEIGHTS, "num_bits"), 4, "weights.num_bits is 4; supported: 8"),
        (W8A8, (*ACTIVATIONS, "dynamic"), False, "input_activations.dynamic is False; supported: true: scales of act"),
        (W8A8, (*ACTIVATIONS, "type"), "float", "input_activations.type is 'float'; supported: int"),
        (W8A8, (*ACTIVATIONS, "num_bits"), 4, "input_activations.num_bits is 4; supported: 8"),
        (W8A8, (*ACTIVATIONS[:2], "output_activations"), {"num_bits": 8}, "output_activations is {'num_bits': 8}; su"),
    ],
)
def test_a_scheme_that_is_not_read_is_refused_by_field_and_value(
    config: dict[str, Any], path: tuple[str, ...], value: Any, message: str, tmp_path: Path
) -> None:
    check_scheme_is_refused(tmp_path, config, path, value, message)


@pytest.mark.parametrize(
    ("scheme", "part", "tensor", "message"),
    [
        ("gptq", "scales", None, r"tensor \S+q_proj\.scales is missing .* holds \S+q_proj\.qweight"),
        ("gptq", "scales", torch.ones(64, 2).half(), r"q_proj\.scales is F16 \[64, 2\]; .* BF16 or .* \[2, 64\]"),
        ("gptq", "qweight", torch.zeros(8, 64), r"q_proj\.qweight is F32 \[8, 64\]; .* must be I32 \[8, 64\]"),
        ("gptq", "qweight", torch.zeros(64), r"q_proj\.qweight has shape \[64\]; two dimensions"),
        ("gptq", "qweight", torch.zeros(6, 64, dtype=torch.int32), r"qweight has 48 columns; supported: a multiple of"),
        ("awq", "qzeros", torch.zeros(1, 8, dtype=torch.int32), r"q_proj\.qzeros is I32 \[1, 8\]; .* I32 \[2, 8\]"),
        ("w4a16", "weight_scale", torch.ones(64, 4), r"q_proj\.weight_scale is F32 \[64, 4\]; .* \[64, 2\]"),
        ("w8a8-asymmetric", "weight_zero_point", None, r"q_proj\.weight_zero_point is missing"),
        ("gptq", "g_idx", torch.arange(64).int() % 2, r"q_proj\.g_idx puts columns into groups out of order .*of 32 "),
        ("w4a16", "weight_g_idx", torch.zeros(64).int(), r"q_proj\.weight_g_idx puts columns into groups out of order"),
    ],
)
def test_a_tensor_that_contradicts_its_scheme_is_named_before_a_weight_is_read(
    scheme: str, part: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    directory = write(tmp_path, SCHEMES[scheme], **{f"{QKV[0]}.{part}": tensor})
    with pytest.raises(ConfigError, match=message):
        read_kv_geometry(directory, "auto", 16)  # as the front end does, too


def test_a_quantised_weight_of_the_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    weights = weights_of(write(tmp_path, SCHEMES["awq"]))
    with pytest.raises(ConfigError, match=r"q_proj\.weight has shape \[64, 64\]; the config asks for \[64, 128\]"):
        weights.quantized(QKV[:1], [64], 128)
