"""The catalogue: published parameter counts, exact KV sizes, what fits, and errors that help."""

import pytest

from diptych.control.errors import ConfigError
from diptych.simulation.costs.collectives import all_reduce
from diptych.simulation.hardware import hardware_names, load_hardware
from diptych.simulation.model_catalogue import load_model, model_names
from diptych.simulation.models import device_weight_bytes, kv_bytes_per_gpu, kv_capacity_tokens
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.weight_precision import GPU_WEIGHTS

# Totals as their owners publish them (checkpoint indexes and model cards), in millions.
PUBLISHED_MILLIONS = {
    "llama-2-7b": 6_738.4,
    "llama-2-13b": 13_015.9,
    "llama-2-70b": 68_976.6,
    "llama-3-8b": 8_030.3,
    "llama-3-70b": 70_553.7,
    "llama-3.1-8b": 8_030.3,
    "llama-3.1-70b": 70_553.7,
    "llama-3.1-405b": 405_853.4,
    "qwen2.5-0.5b": 494.0,
    "qwen2.5-1.5b": 1_543.7,
    "qwen2.5-7b": 7_615.6,
    "qwen2.5-14b": 14_770.0,
    "qwen2.5-32b": 32_763.9,
    "qwen2.5-72b": 72_706.2,
    "qwen3-0.6b": 596.0,
    "qwen3-4b": 4_022.5,
    "qwen3-8b": 8_190.7,
    "qwen3-14b": 14_768.3,
    "qwen3-32b": 32_762.1,
    "qwen3-30b-a3b": 30_532.1,
    "qwen3-235b-a22b": 235_093.6,
    "mistral-7b": 7_241.7,
    "mixtral-8x7b": 46_702.8,
    "mixtral-8x22b": 140_630.1,
    "opt-13b": 12_853.5,
    "opt-66b": 65_720.0,
    "opt-175b": 174_600.0,
    "bloom-176b": 176_247.3,
    "yi-34b": 34_388.9,
    "falcon-180b": 179_522.6,
    "deepseek-v3": 671_026.4,
    "smollm2-135m": 134.5,
}


# Totals as rounded in papers and model cards, in billions; of models that see, of the part that writes text.
PUBLISHED_BILLIONS = {
    "kimi-k2": 1040.0,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "gemma-2-2b": 2.614,
    "gemma-2-9b": 9.242,
    "gemma-2-27b": 27.227,
    "gemma-3-1b": 1.0,
    "gemma-3-4b": 3.884,
    "gemma-3-12b": 11.771,
    "gemma-3-27b": 27.016,
    "glm-4-9b": 9.4,
    "glm-4.5": 355.0,
    "glm-4.5-air": 106.0,
    "llama-4-scout": 109.0,
    "llama-4-maverick": 400.0,
    "phi-3.5-moe": 41.9,
    "qwen3-next-80b-a3b": 80.0,
    "qwen3.5-27b": 27.0,
    "qwen3.5-35b-a3b": 35.0,
    "qwen3.5-397b-a17b": 397.0,
}


def test_parameter_counts_are_the_published_ones() -> None:
    assert {*PUBLISHED_MILLIONS, *PUBLISHED_BILLIONS} == set(model_names())
    for name, millions in PUBLISHED_MILLIONS.items():
        assert load_model(name).num_parameters / 1e6 == pytest.approx(millions, rel=0.001), name
    for name, billions in PUBLISHED_BILLIONS.items():
        assert load_model(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.02), name


@pytest.mark.parametrize(
    ("name", "billions", "without"),  # without: how many of embedding and lm_head the published count leaves out
    [
        ("qwen3-30b-a3b", 3.3, 0), ("qwen3-235b-a22b", 22.0, 0), ("mixtral-8x7b", 12.9, 0), ("deepseek-v3", 37.5, 0),
        ("kimi-k2", 32.6, 0), ("gpt-oss-20b", 3.61, 1), ("gpt-oss-120b", 5.13, 1), ("glm-4.5", 32.0, 2),
        ("glm-4.5-air", 12.0, 2), ("llama-4-scout", 17.0, 0), ("llama-4-maverick", 17.0, 0), ("phi-3.5-moe", 6.6, 0),
        ("qwen3.5-35b-a3b", 3.0, 1), ("qwen3.5-397b-a17b", 17.0, 0),
    ],
)  # fmt: skip
def test_active_parameters_of_mixtures_are_the_published_ones(name: str, billions: float, without: int) -> None:
    model = load_model(name)
    active = model.active_parameters - without * model.head_parameters
    assert active / 1e9 == pytest.approx(billions, rel=0.0205)


def test_kv_of_llama_70b_is_exact() -> None:
    model = load_model("llama-3.1-70b")
    assert model.kv_bytes_per_token() == 327_680
    assert 2048 * model.kv_bytes_per_token() == 671_088_640
    assert 128 * 1024 * model.kv_bytes_per_token() == 42_949_672_960
    assert model.kv_bytes_per_token(1) == 163_840


def test_latent_attention_caches_576_numbers_a_layer_on_every_gpu() -> None:
    model = load_model("deepseek-v3")
    assert model.kv_bytes_per_token() == 61 * (512 + 64) * 2
    assert kv_bytes_per_gpu(model, Parallelism(8)) == model.kv_bytes_per_token()


def test_kv_heads_are_split_over_gpus_and_copied_when_they_run_out() -> None:
    model = load_model("llama-3.1-70b")
    assert kv_bytes_per_gpu(model, Parallelism(4)) == model.kv_bytes_per_token() // 4
    assert kv_bytes_per_gpu(model, Parallelism(16)) == kv_bytes_per_gpu(model, Parallelism(8))


def test_capacity_is_close_to_what_an_engine_reported() -> None:
    # vLLM 0.19 on an RTX 4090, 2,048 tokens a step, utilisation 0.9: 41,408 tokens.
    tokens = kv_capacity_tokens(load_model("llama-3.1-8b"), load_hardware("rtx4090"))
    assert tokens == pytest.approx(41_408, rel=0.03)


def test_weights_that_do_not_fit_are_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigError, match=r"141\.1 GB .* 77\.0 GB") as error:
        kv_capacity_tokens(load_model("llama-3.1-70b"), load_hardware("h100"))
    assert error.value.param == "tensor_parallel"
    assert kv_capacity_tokens(load_model("llama-3.1-70b"), load_hardware("h100"), parallelism=Parallelism(4)) > 300_000


def test_a_device_of_a_pipeline_holds_the_layers_of_the_largest_stage() -> None:
    model = load_model("llama-3.1-405b")  # 126 layers: 32 in the largest of four stages
    whole, quarter = (device_weight_bytes(model, Parallelism(8, stages), GPU_WEIGHTS[16]) for stages in (1, 4))
    head = 2 * model.head_parameters
    assert quarter == pytest.approx((head + (8 * whole - 2 * head) * 32 / 126) / 8, rel=1e-9)
    assert kv_bytes_per_gpu(model, Parallelism(8, 4)) == 32 * 2 * model.head_dim * 2
    with pytest.raises(ConfigError, match="does not fit on 8 x h100-sxm"):
        kv_capacity_tokens(model, load_hardware("h100"), parallelism=Parallelism(8))
    for split in (Parallelism(8, 2), Parallelism(16)):
        assert kv_capacity_tokens(model, load_hardware("h100"), parallelism=split) > 100_000


def test_data_parallel_groups_copy_the_attention_share_the_experts_and_hold_their_own_sequences() -> None:
    model, hardware = load_model("deepseek-v3"), load_hardware("h200")
    routed = model.num_moe_layers * 256 * model.expert_parameters
    weights = device_weight_bytes(model, Parallelism(data=8), GPU_WEIGHTS[8])
    assert weights == pytest.approx(model.weight_bytes(GPU_WEIGHTS[8]) - routed * 7 / 8, rel=1e-6)
    one_group = kv_capacity_tokens(model, hardware, parallelism=Parallelism(8), weights=GPU_WEIGHTS[8])
    eight = kv_capacity_tokens(model, hardware, parallelism=Parallelism(data=8), weights=GPU_WEIGHTS[8])
    assert eight > 4 * one_group  # the latent lies on every device of a group whole
    assert eight % 8 == 0


@pytest.mark.parametrize(
    ("model", "split", "message"),
    [
        ("llama-3.1-8b", Parallelism(1, 33), "pipeline_parallel is 33; llama-3.1-8b has 32 layers"),
        ("llama-3.1-8b", Parallelism(1, data=2), "data_parallel is 2; llama-3.1-8b has no experts"),
        ("mixtral-8x7b", Parallelism(16, expert=16), "expert_parallel is 16; it must divide the 8 experts"),
    ],
)
def test_splits_that_a_model_does_not_have_are_refused(model: str, split: Parallelism, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_capacity_tokens(load_model(model), load_hardware("h200"), parallelism=split)


def test_heads_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(ConfigError, match="must divide the 14 heads"):
        kv_capacity_tokens(load_model("qwen2.5-0.5b"), load_hardware("h100"), parallelism=Parallelism(4))


def test_every_device_is_complete_and_plausible() -> None:
    assert len(hardware_names()) >= 10
    for name in hardware_names("gpu"):
        hardware = load_hardware(name)
        assert hardware.flops["bf16"] > 1e14
        assert hardware.idle_power_w < hardware.power_w
        assert hardware.price_per_hour > 0
        assert hardware.sources["paper"]
        assert "measured" in hardware.sources or "assumed" in hardware.sources
        two = all_reduce(hardware, 2)
        assert two.seconds(1e6) > two.latency_s > 0


@pytest.mark.parametrize(
    ("alias", "name"),
    [("h100", "h100-sxm"), ("H100", "h100-sxm"), ("a100", "a100-80gb"), ("rtx4090", "rtx-4090"), ("h200-sxm", "h200")],
)
def test_devices_have_the_names_that_people_type(alias: str, name: str) -> None:
    assert load_hardware(alias).name == name


def test_models_have_the_names_that_people_type() -> None:
    assert load_model("Llama3-8B").name == "llama-3-8b"
    assert load_model("meta-llama/Llama-3.1-8B-Instruct").name == "llama-3.1-8b"


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'h900' .*h100-sxm.*mi300x"):
        load_hardware("h900")
    with pytest.raises(ConfigError, match=r"'gpt-5' .*llama-3\.1-8b.*yi-34b"):
        load_model("gpt-5")
