"""Weights of few bits: their bytes, laws that hold for every model, and settings that contradict each other."""

from itertools import pairwise
from pathlib import Path

import pytest

from diptych.control.config import CacheConfig
from diptych.control.errors import ConfigError
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.runtime.weights.weight_bytes import loaded_weight_bytes
from diptych.runtime.weights.weight_format import QUANTIZATIONS
from diptych.serving.link.engine_options import BUNDLED_MODEL
from diptych.simulation.costs.cost_choice import choose_cost
from diptych.simulation.costs.fitted import Calibration, FittedCost, write_calibration
from diptych.simulation.costs.roofline import RooflineCost
from diptych.simulation.hardware import hardware_names, load_hardware
from diptych.simulation.model_catalogue import load_model, model_names
from diptych.simulation.models import kv_capacity_tokens
from diptych.simulation.prepare import prepare
from diptych.simulation.settings import settings_from
from diptych.simulation.weight_precision import GPU_WEIGHTS, QUANTIZED, MatrixFormat, weight_precision

CPU = "cpu-epyc-9004-2c"
FEWER_AND_FEWER = [QUANTIZED[name] for name in ("none", "int8", "int4")]


def prompt(num_tokens: int) -> SchedulerOutput:
    features = StepFeatures(num_tokens, chunk_attention(0, num_tokens), 0, 0)
    chunk = ScheduledPrefill("r", 0, num_tokens, (), is_last=True)
    return SchedulerOutput(0, prefills=(chunk,), num_decodes=0, features=features)


def test_int8_is_a_byte_a_weight_and_four_an_output_channel() -> None:
    model = load_model("qwen2.5-0.5b")  # 24 layers of 896, 14 heads and 2 of KV of 64, MLP 4,864, 151,936 tokens, tied
    weights = 24 * (896 * 1152 + 896 * 896 + 3 * 896 * 4864) + 896 * 151_936
    channels = 24 * (1152 + 896 + 2 * 4864 + 896) + 151_936
    assert model.weight_bytes(QUANTIZED["int8"]) == weights + 4 * channels + 2 * model.vector_parameters


def test_int4_has_a_scale_for_32_weights_and_an_lm_head_of_8_bits() -> None:
    model = load_model("qwen2.5-0.5b")
    head = model.vocab * (model.hidden + 4)
    layers = model.layer_parameters() // 32 * (16 + 2)
    assert model.weight_bytes(QUANTIZED["int4"]) == layers + head + 2 * model.vector_parameters


@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_a_quantised_weight_has_the_bits_that_the_engine_gives_it(name: str) -> None:
    for matrix, kept in (
        (QUANTIZED[name].layers, QUANTIZATIONS[name].layers),
        (QUANTIZED[name].head, QUANTIZATIONS[name].vocabulary),
    ):
        if kept is None:
            assert matrix == MatrixFormat()
        else:
            scales = (32, 0) if kept.group_size is None else (0, 16 / kept.group_size)
            assert (matrix.scale_bits, matrix.bits) == (scales[0], kept.bits + scales[1])
            assert not kept.has_mins


@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_the_bytes_are_those_that_the_engine_counts_for_a_checkpoint(name: str) -> None:
    model = load_model(str(BUNDLED_MODEL))
    assert model.weight_bytes(QUANTIZED[name]) == loaded_weight_bytes(BUNDLED_MODEL, "bfloat16", name)


def test_weight_bits_keep_the_head_in_16_bits() -> None:
    model = load_model("llama-3.1-8b")
    others = model.num_parameters - model.layer_parameters()
    for bits, weights in GPU_WEIGHTS.items():
        assert model.weight_bytes(weights) == model.layer_parameters() * bits // 8 + 2 * others


@pytest.mark.parametrize("name", model_names())
def test_fewer_bits_are_never_more_bytes_and_never_slower(name: str) -> None:
    model = load_model(name)
    assert all(more.bits > fewer.bits for more, fewer in pairwise(FEWER_AND_FEWER))
    sizes = [model.weight_bytes(weights) for weights in FEWER_AND_FEWER]
    assert sizes == sorted(sizes, reverse=True)
    for hardware in hardware_names("cpu"):
        costs = [RooflineCost(model, load_hardware(hardware), weights=weights) for weights in FEWER_AND_FEWER]
        for num_tokens in (1, 32, 2048):
            line = [cost.decode_line(num_tokens, 512 * num_tokens).step_ns(512 * num_tokens) for cost in costs]
            assert line == sorted(line, reverse=True)
            chunk = [cost.step_ns(prompt(num_tokens)) for cost in costs]
            assert chunk == sorted(chunk, reverse=True)


def test_fewer_bits_never_leave_less_room_for_kv() -> None:
    hardware, room = load_hardware(CPU), []
    for weights in FEWER_AND_FEWER:
        room.append(kv_capacity_tokens(load_model("llama-3.1-8b"), hardware, weights=weights))
    assert room == sorted(set(room))


def test_a_prompt_takes_the_arithmetic_of_8_bits_and_a_decode_the_bytes() -> None:
    model, hardware = load_model("llama-3.1-8b"), load_hardware(CPU)
    wide, int8, int4 = (RooflineCost(model, hardware, weights=weights) for weights in FEWER_AND_FEWER)
    peak = hardware.flops["int8"] / hardware.flops["bf16"]
    assert wide.step_ns(prompt(512)) / int8.step_ns(prompt(512)) == pytest.approx(peak, rel=0.1)
    assert int4.step_ns(prompt(512)) / int8.step_ns(prompt(512)) > 0.99
    decodes = [cost.decode_line(1, 64).step_ns(64) for cost in (wide, int8, int4)]
    assert [time / decodes[0] for time in decodes[1:]] == pytest.approx([0.5, 0.3], abs=0.03)


@pytest.mark.parametrize(
    ("hardware", "weight_bits", "quantize", "param", "words"),
    [
        ("h100", 8, "int8", "quantize", "quantize is int8 and weight_bits is 8; set one of them"),
        (CPU, 4, "int8", "quantize", "quantize is int8 and weight_bits is 4; set one of them"),
        ("h100", 16, "int4", "quantize", "quantize is int4.*h100-sxm is a GPU: set weight_bits"),
        (CPU, 8, None, "weight_bits", f"weight_bits is 8.*{CPU} is a CPU: set quantize"),
        (CPU, 16, "int3", "quantize", "quantize is 'int3'; one of none, int8, int4"),
        ("h100", 3, None, "weight_bits", "weight_bits is 3; one of 16, 8, 4"),
    ],
)
def test_contradictions_name_the_field_and_the_cure(
    hardware: str, weight_bits: int, quantize: str | None, param: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        weight_precision(load_hardware(hardware), weight_bits, quantize)  # type: ignore[arg-type]
    assert error.value.param == param


def test_a_model_that_fits_only_quantised_is_simulated_when_it_is() -> None:
    raw = {"model": "llama-2-13b", "hardware": CPU, "workload": {"num_requests": 2}}
    with pytest.raises(ConfigError, match=r"26\.0 GB of each at 16 bits.*; set quantize"):
        prepare(settings_from(raw))
    prepared = prepare(settings_from(raw | {"quantize": "int8"}))
    assert "(weights int8, KV 16 bits)" in prepared.cost.words
    assert prepared.scenario.engine.cache.num_blocks > 0


def test_unknown_values_in_a_file_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="quantize is 'int2'; one of int4, int8, none"):
        settings_from({"quantize": "int2"})


@pytest.mark.parametrize(
    ("recorded", "measured"), [({}, "none"), ({"quantize": None}, "none"), ({"quantize": "int8"}, "int8")]
)
def test_a_calibration_says_what_was_measured_and_refuses_anything_else(
    tmp_path: Path, recorded: dict[str, str | None], measured: str
) -> None:
    path = tmp_path / "here.json"
    cost = FittedCost((1, 32), (1e6, 2e6), (10.0, 10.0), (1, 512), (1e5, 1e8), 1.0, "linear")
    cache = CacheConfig(num_blocks=100, block_size=32)
    write_calibration(
        path, Calibration(model="small", cost=cost, cache=cache, max_model_len=1024, settings=dict(recorded))
    )
    for quantize in (None, measured):
        choice = choose_cost(str(path), model=None, hardware=None, quantize=quantize)  # type: ignore[arg-type]
        assert ("int8 weights" in choice.words) == (measured == "int8")
    with pytest.raises(ConfigError, match=f"quantize is int4; here.json was measured with {measured}") as error:
        choose_cost(str(path), model=None, hardware=None, quantize="int4")
    assert error.value.param == "quantize"
