"""The model that ships inside the package: its files, its size, its tokenizer."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).resolve().parent.parent / "src" / "diptych" / "bundled" / "stdlib-python"
FILES = [
    "LICENSE",
    "README.md",
    "config.json",
    "evaluation.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


def read_json(name: str) -> Any:
    """One of the model's JSON files."""
    return json.loads((MODEL / name).read_text(encoding="utf-8"))


def tensors() -> dict[str, Any]:
    """The header of the weights: for each tensor its dtype, shape and place in the file."""
    with (MODEL / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def expected_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """The tensors a Llama of this configuration has, embeddings tied."""
    d, f, hd = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
    layer = {
        "input_layernorm": [d],
        "post_attention_layernorm": [d],
        "self_attn.q_proj": [q, d],
        "self_attn.k_proj": [kv, d],
        "self_attn.v_proj": [kv, d],
        "self_attn.o_proj": [d, q],
        "mlp.gate_proj": [f, d],
        "mlp.up_proj": [f, d],
        "mlp.down_proj": [d, f],
    }
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], d], "model.norm.weight": [d]}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def test_directory_is_complete_and_small() -> None:
    assert sorted(p.name for p in MODEL.iterdir() if not p.name.startswith(".")) == FILES
    assert sum(p.stat().st_size for p in MODEL.iterdir()) <= 16 * 2**20


def test_config_is_a_plain_llama_with_a_long_context() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] >= 8192
    assert config["head_dim"] % 32 == 0
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_weights_are_the_configured_tensors_in_bfloat16() -> None:
    header = tensors()
    assert {name: t["shape"] for name, t in header.items()} == expected_shapes(read_json("config.json"))
    assert {t["dtype"] for t in header.values()} == {"BF16"}
    parameters = sum(math.prod(t["shape"]) for t in header.values())
    assert parameters <= 8_000_000
    assert parameters == read_json("evaluation.json")["parameters"]


def test_model_beats_its_baselines_as_recorded() -> None:
    figures = read_json("evaluation.json")
    bits = dict(figures["bits_per_byte"])
    model = bits.pop("model")
    assert all(0 < model < other < 8 for other in bits.values())
    by_position = figures["bits_per_token_by_position_eighth"]
    assert max(by_position[1:]) <= by_position[0]


def test_license_and_card_say_where_the_text_came_from() -> None:
    licence = (MODEL / "LICENSE").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert "standard library" in licence
    assert "standard library" in (MODEL / "README.md").read_text(encoding="utf-8")


def test_tokenizer_round_trips_anything() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tok = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    config = read_json("config.json")
    assert tok.get_vocab_size() == config["vocab_size"]
    rng = random.Random(0)
    texts = [
        "",
        " ",
        "def f(x):\n\n    return x\n",
        "\t \r\n\x00\x7f",
        "naïve Ω 漢字 👩‍🚀 e\u0301",
        "".join(map(chr, range(0x250))),
    ]
    texts += [
        "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xD800)))) for _ in range(99)) for _ in range(50)
    ]
    for text in texts:
        ids = tok.encode(text).ids
        assert all(0 <= i < config["vocab_size"] for i in ids)
        assert tok.decode(ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocab = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab()
    assert set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) <= set(vocab)


def test_special_tokens_agree_across_files() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tok = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    declared = read_json("tokenizer_config.json")
    for index, token in declared["added_tokens_decoder"].items():
        assert tok.token_to_id(token["content"]) == int(index)
        assert tok.encode(token["content"]).ids == [int(index)]
    config = read_json("config.json")
    assert tok.token_to_id(declared["eos_token"]) == config["eos_token_id"]
    assert config["eos_token_id"] in read_json("generation_config.json")["eos_token_id"]


def test_chat_template_makes_a_python_file() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(read_json("tokenizer_config.json")["chat_template"])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Reverse a list\nin place."},
        {"role": "assistant", "content": "def rev(x):\n    x.reverse()"},
        {"role": "user", "content": "Sort it."},
    ]
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text == (
        "<|endoftext|># Be brief.\n# Reverse a list\n# in place.\ndef rev(x):\n    x.reverse()\n\n\n# Sort it.\n"
    )
