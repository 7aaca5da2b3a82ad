"""Models from config.json files: those of the catalogue come out, and what is not known is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.simulation.hub_config import model_from_config
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.models import LinearAttentionSpec, WindowSpec

QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "max_position_embeddings": 40960,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088, "attention_bias": True,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
GEMMA_3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262208,
        "sliding_window": 1024, "max_position_embeddings": 131072,
    },
}  # fmt: skip
LLAMA_4 = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "vocab_size": 202048, "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8192, "max_position_embeddings": 1048576, "no_rope_layers": [1, 1, 1, 0] * 12,
    },
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120, "vocab_size": 151936, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
}  # fmt: skip
GLM = {
    "model_type": "glm4_moe", "hidden_size": 5120, "num_hidden_layers": 92, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "vocab_size": 151552, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 160,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "max_position_embeddings": 131072,
}  # fmt: skip
KIMI = {
    "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
    "num_key_value_heads": 64, "head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "vocab_size": 163840, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
PHIMOE = {
    "model_type": "phimoe", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 6400, "vocab_size": 32064, "attention_bias": True,
    "num_local_experts": 16, "num_experts_per_tok": 2, "sliding_window": 131072, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (QWEN3_MOE, "qwen3-30b-a3b"), (GPT_OSS, "gpt-oss-120b"), (GEMMA_3, "gemma-3-27b"),
        (LLAMA_4, "llama-4-maverick"), (QWEN3_NEXT, "qwen3-next-80b-a3b"), (GLM, "glm-4.5"), (KIMI, "kimi-k2"),
        (PHIMOE, "phi-3.5-moe"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_config_json_gives_the_model_of_the_catalogue(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert replace(load_model(str(tmp_path)), name=name) == load_model(name)


def test_windows_are_counted_from_what_the_file_says() -> None:
    listed = {**GPT_OSS, "layer_types": ["sliding_attention"] * 30 + ["full_attention"] * 6}
    assert model_from_config(listed, "x").window == WindowSpec(128, 30)
    assert model_from_config({**GPT_OSS, "layer_types": None}, "x").window == WindowSpec(128, 18)
    mistral = {**PHIMOE, "model_type": "mistral", "num_local_experts": 0, "sliding_window": 4096}
    assert model_from_config(mistral, "x").window == WindowSpec(4096, 32)
    qwen = {**QWEN3_MOE, "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}
    assert model_from_config(qwen, "x").window == WindowSpec(4096, 20)


def test_linear_layers_are_counted_from_what_the_file_says() -> None:
    listed = {**QWEN3_NEXT, "layer_types": ["linear_attention"] * 40 + ["full_attention"] * 8}
    assert model_from_config(listed, "x").linear == LinearAttentionSpec(40, 16, 32, 128, 128)
    dense = {**QWEN3_NEXT, "model_type": "qwen3_5", "num_experts": None}
    assert model_from_config(dense, "x").moe is None


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8"}, (8, 0.0)),
        ({"quant_method": "gptq", "bits": 4}, (4, 0.0)),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}}}, (8, 0.0)),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 32}}},
                "ignore": ["re:.*self_attn.*", "lm_head"],
            },
            (16, 4.5),
        ),
    ],
)
def test_the_bits_of_a_published_checkpoint_are_read(quantization: dict[str, Any], bits: tuple[int, float]) -> None:
    model = model_from_config({**QWEN3_MOE, "quantization_config": quantization}, "x")
    assert (model.checkpoint_bits, model.expert_bits) == bits


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN3_MOE, "model_type": "mamba"}, "model_type is 'mamba'; known: llama"),
        ({**GEMMA_3, "text_config": {**GEMMA_3["text_config"], "model_type": "mamba"}}, "model_type is 'mamba'"),
        ({**QWEN3_MOE, "quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method is 'bitsandbytes'"),
        ({**QWEN3_NEXT, "shared_expert_intermediate_size": 700}, "700 wide, no multiple of moe_intermediate_size"),
        ({**QWEN3_NEXT, "layer_types": ["sparse_attention"] * 48}, "layers of x are sparse_attention; known"),
    ],
)
def test_what_is_not_known_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        model_from_config(config, "x")


@pytest.mark.parametrize("key", ["vocab_size", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_missing_dimension_is_an_error(key: str) -> None:
    config = {name: value for name, value in QWEN3_MOE.items() if name not in (key, "intermediate_size")}
    with pytest.raises(ConfigError, match=f"lacks {key}"):
        model_from_config(config, "x")
