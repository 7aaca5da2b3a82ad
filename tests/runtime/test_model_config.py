"""config.json is read as transformers reads it, and what we lack is refused by name."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.layers.rope import cos_sin_table, inverse_frequencies
from diptych.runtime.models.decoder import DecoderConfig
from diptych.runtime.models.model_config import AttentionConfig, LayerAttention
from diptych.runtime.models.registry import read_model_config
from tests.runtime.checkpoints import LLAMA3_ROPE, YARN_ROPE

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def write(directory: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A directory with a config.json; a value of ... removes the field."""
    values = {name: value for name, value in (LLAMA | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_a_llama_config(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, eos_token_id=7, torch_dtype="bfloat16"))
    assert isinstance(config, DecoderConfig)
    assert config.attention == AttentionConfig(4, 2, 16, (LayerAttention(0.25),) * 4)
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.norm.eps) == (100, 64, 4, 1e-5)
    assert (config.dtype, config.eos_token_ids, config.tie_word_embeddings) == ("bfloat16", (7,), False)
    assert (config.ropes[0].kind, config.ropes[0].theta) == ("default", 10000.0)


def test_the_generation_config_has_the_last_word_on_the_end_of_sequence(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, {"eos_token_id": [1, 2]}, eos_token_id=7)).eos_token_ids == (1, 2)
    assert read_model_config(write(tmp_path, {"eos_token_id": 3}, eos_token_id=7)).eos_token_ids == (3,)
    assert read_model_config(write(tmp_path, {}, eos_token_id=[7])).eos_token_ids == (7,)
    assert read_model_config(write(tmp_path, {}, eos_token_id=None)).eos_token_ids == ()


def test_dtype_has_two_names(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, dtype="float16")).dtype == "float16"
    assert read_model_config(write(tmp_path)).dtype is None


ROPES = {
    "llama3": LLAMA3_ROPE,
    "yarn": YARN_ROPE,
    "yarn-factors": {**YARN_ROPE, "beta_fast": 32, "mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn-attention-factor": {**YARN_ROPE, "attention_factor": 1.3, "truncate": False},
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5},
    "default": {"rope_type": "default", "rope_theta": 77777.0},
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_frequencies_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    values = ROPES[name]
    newer = read_model_config(write(tmp_path, rope_parameters=values))
    older = {key: value for key, value in values.items() if key not in ("rope_theta", "rope_type")}
    older["type" if name == "linear" else "rope_type"] = values["rope_type"]
    older_config = write(tmp_path, rope_theta=values["rope_theta"], rope_scaling=older)
    assert read_model_config(older_config).ropes == newer.ropes
    theirs = transformers.LlamaConfig(**{**LLAMA, "rope_parameters": dict(values)})
    frequencies, scale = inverse_frequencies(newer.ropes[0], 16)
    if name == "default":
        expected, expected_scale = 77777.0 ** -(torch.arange(0, 16, 2) / 16), 1.0
    else:
        expected, expected_scale = ROPE_INIT_FUNCTIONS[values["rope_type"]](theirs, torch.device("cpu"))
    assert scale == pytest.approx(expected_scale)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)


def test_the_rotary_table_holds_cosines_then_sines(tmp_path: Path) -> None:
    rope = read_model_config(write(tmp_path)).ropes[0]
    table = cos_sin_table(rope, 16, 50, torch.device("cpu"))
    assert table.shape == (50, 16) and table.dtype is torch.float32
    torch.testing.assert_close(table[31, :2], torch.tensor([31.0, 31 * 10000 ** -(2 / 16)]).cos())
    torch.testing.assert_close(table[31, 8:10], torch.tensor([31.0, 31 * 10000 ** -(2 / 16)]).sin())


def test_head_dim_is_given_or_derived(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, head_dim=32)).attention.head_dim == 32
    assert read_model_config(write(tmp_path, head_dim=None)).attention.head_dim == 16
    qwen3 = write(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert read_model_config(qwen3).attention.head_dim == transformers.Qwen3Config().head_dim


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 9},
        {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1},
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
)
def test_sliding_windows_are_those_of_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, architectures=[f"{name}ForCausalLM"], **changes))
    theirs = getattr(transformers, f"{name}Config")(**{**LLAMA, **changes})
    expected = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert [layer.window for layer in config.attention.layers] == expected


def test_the_sliding_window_of_mistral(tmp_path: Path) -> None:
    def windows(**changes: Any) -> set[int | None]:
        path = write(tmp_path, architectures=["MistralForCausalLM"], max_position_embeddings=9000, **changes)
        return {layer.window for layer in read_model_config(path).attention.layers}

    assert windows(sliding_window=512) == {512}
    assert windows(sliding_window=None) == {None}
    assert windows() == {transformers.MistralConfig().sliding_window}
    assert windows(sliding_window=9000) == {None}  # no context is longer


def test_layers_of_mistral_are_all_alike_and_those_of_llama_have_no_window(tmp_path: Path) -> None:
    full, sliding = ["full_attention"] * 4, ["sliding_attention"] * 4
    for kinds, window, is_read in (
        (full, None, True),
        (sliding, 64, True),
        (sliding, 2048, True),
        (full, 64, False),
        ([*full[:2], *sliding[:2]], 64, False),
    ):
        path = write(tmp_path, architectures=["MistralForCausalLM"], layer_types=kinds, sliding_window=window)
        if is_read:
            read_model_config(path)
        else:
            with pytest.raises(
                UnsupportedModelError, match=r"layer_types is .*; supported: sliding_attention in every"
            ):
                read_model_config(path)
    for changes in ({"layer_types": full, "sliding_window": None}, {"sliding_window": 64, "use_sliding_window": False}):
        config = read_model_config(write(tmp_path, **changes))
        assert {layer.window for layer in config.attention.layers} == {None}
    for changes in ({"sliding_window": 64}, {"layer_types": sliding}):
        with pytest.raises(UnsupportedModelError, match=f"{next(iter(changes))} is .*; supported: "):
            read_model_config(write(tmp_path, **changes))


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_where_rotary_fields_are_said_twice_transformers_is_followed(kind: str, tmp_path: Path) -> None:
    rope = YARN_ROPE if kind == "yarn" else LLAMA3_ROPE
    linear = {"rope_type": "linear", "factor": 2.5}
    for changes in (
        {"rope_parameters": rope, "rope_scaling": linear},
        {"rope_parameters": rope, "rope_scaling": linear, "rope_theta": 50.0},
        {"rope_parameters": linear, "rope_scaling": rope},
        {"rope_parameters": rope, "rope_scaling": {}},
        {"rope_parameters": rope, "rope_scaling": None},
        {"rope_parameters": rope, "rope_theta": 50.0},
        {"rope_parameters": rope, "original_max_position_embeddings": 128},
        {"rope_parameters": None, "rope_scaling": rope, "original_max_position_embeddings": 128},
    ):
        ours = read_model_config(write(tmp_path, **changes)).ropes[0]
        theirs = transformers.LlamaConfig(**copy.deepcopy(LLAMA | changes))  # (which writes into what it is given)
        theirs.standardize_rope_params()  # as its models do when they compute the frequencies
        expected = {"rope_theta": ours.theta, "rope_type": ours.kind, "factor": ours.factor}
        if ours.kind != "linear":
            expected["original_max_position_embeddings"] = ours.original_max_positions
        assert expected.items() <= theirs.rope_parameters.items()


def test_null_in_truncate_is_false_and_mscale_may_be_nothing(tmp_path: Path) -> None:
    for changes, truncate in (({}, True), ({"truncate": None}, False), ({"truncate": True, "mscale": 0}, True)):
        rope = read_model_config(write(tmp_path, rope_parameters={**YARN_ROPE, **changes})).ropes[0]
        assert (rope.truncate, rope.mscale, rope.attention_factor) == (truncate, 0.0, None)


def test_biases_by_family(tmp_path: Path) -> None:
    def biases(family: str, **changes: Any) -> tuple[bool, bool, bool]:
        config = read_model_config(write(tmp_path, architectures=[f"{family}ForCausalLM"], head_dim=16, **changes))
        assert isinstance(config, DecoderConfig)
        return config.qkv_bias, config.output_bias, config.mlp_bias

    assert biases("Llama") == (False, False, False)
    assert biases("Llama", attention_bias=True, mlp_bias=True) == (True, True, True)
    assert biases("Mistral") == (False, False, False)
    assert biases("Qwen2") == (True, False, False)
    assert biases("Qwen3", attention_bias=True) == (True, True, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architectures is ['GemmaForCausalLM']; supported: one of Gemma2"),
        ({"architectures": ...}, "architectures is None; supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method is None; supported: compr"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is 'dynamic'; supported: default"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type is 'longrope'; supported: default"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "supported: one flat object for all layers"),
        ({"rope_parameters": {**YARN_ROPE, "attention_factor": 0}}, "attention_factor is 0; supported: a positive"),
        (
            {"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}},
            "high_freq_factor is 1.0; supported: a number a",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None; supported: a positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported: 1.0"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'; supported: bfloat16, float32, float16"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; supported: a divisor of num_attention_heads (4)"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads is 5; supported: a divisor of hid"),
        ({"hidden_size": "64"}, "hidden_size is '64'; supported: a whole number of at least 1"),
        ({"vocab_size": ...}, "vocab_size is None; supported: a whole number of at least 1"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'; supported: true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; supported: a token id or a list of them"),
    ],
)
def test_what_we_lack_is_refused_by_file_field_and_value(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_model_config(write(tmp_path, **changes))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert message in str(caught.value)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds list, not an object"):
        read_model_config(tmp_path)
