"""GGUF files: the model in one is the model that its checkpoint is, and whatever is wrong with one is said by name."""

import os
import random
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from diptych.cli.options import model_name, model_path
from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.gguf.ggml_types import GGML_TYPES
from diptych.runtime.gguf.gguf_config import HARMLESS, NEUTRAL, READ, GgufFields, read_gguf_fields
from diptych.runtime.gguf.gguf_decoding import read_float, read_quantized
from diptych.runtime.gguf.gguf_families import GGUF_FAMILIES
from diptych.runtime.gguf.gguf_file import GgufFile
from diptych.runtime.gguf.gguf_model import GgufModel
from diptych.runtime.kernels.instruction_set import TORCH
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.runtime.layers.rope import inverse_frequencies
from diptych.runtime.models import registry
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.runtime.weights.checkpoint import open_checkpoint
from diptych.runtime.weights.tensor_reader import make_reader
from diptych.serving.answers.tokenizer import Tokenizer
from tests import gguf_files
from tests.gguf_files import VOCABULARY, model_metadata, model_tensors, split_model, write_gguf
from tests.runtime import checkpoints
from tests.runtime.checkpoints import prompt_of, reference
from tests.runtime.driving import generate, greedy

EXACT = [  # whose file says what config.json says, digit by digit
    "llama", "llama-tied-biased", "llama-rope-llama3", "llama-rope-linear", "llama-rope-yarn", "mistral-window",
    "qwen2", "qwen3", "qwen3-biased", "phi3", "seed-oss",
]  # fmt: skip
OTHERS = ["gemma2", "gemma3", "granite", "ministral3", "olmo2", "olmo3", "phi3-longrope"]
WHOLE_NUMBERS = {number: kind for number, kind in GGML_TYPES.items() if kind.format is not None}
HALVES = {  # where in a block fp16 numbers lie; else at 0 and 2
    "Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [], "Q2_K": [80, 82],
    "Q3_K": [108],
}  # fmt: skip
REQUANTISED = ("Q2_K", "Q3_K", "Q6_K")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in fp32 with a vocabulary."""
    return write_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf", **VOCABULARY)


def write_model(path: Path, family: str = "llama", **changes: Any) -> Path:
    """The checkpoint of a family."""
    return gguf_files.write_model(path, reference(family).directory, **changes)


def load(path: Path, **changes: Any) -> Any:
    """A small runner."""
    return load_runner(RunnerConfig(path, num_blocks=16, instruction_set=TORCH, **changes))


def random_blocks(number: int, count: int) -> np.ndarray:
    """Blocks of a type with any bits, and sensible numbers where they are fp16."""
    kind, rng = GGML_TYPES[number], np.random.default_rng(number)
    assert kind.num_bytes is not None
    blocks = rng.integers(0, 256, (count, kind.num_bytes), dtype=np.uint8)
    for at in HALVES.get(kind.name, [0, 2]):
        blocks[:, at : at + 2] = rng.standard_normal((count, 1)).astype(np.float16).view(np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] %= 250  # exponents whose values fp32 holds
    return blocks


@pytest.mark.parametrize("number", WHOLE_NUMBERS, ids=lambda number: GGML_TYPES[number].name)
def test_every_type_is_decoded_as_the_reference_decodes_it(number: int) -> None:
    kind, rows, columns = GGML_TYPES[number], 300, 1024
    blocks = random_blocks(number, rows * columns // kind.values)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.reshape(rows, -1), Kind(number)))
    data = memoryview(bytearray(blocks.tobytes()))
    assert torch.equal(read_float(kind, data, columns), expected)
    weight = read_quantized(kind, data, columns)
    assert weight.format == kind.format and weight.values.shape == expected.shape
    if kind.name not in REQUANTISED:
        assert torch.equal(weight.dequantize(), expected)
        return
    lost = (weight.dequantize() - expected).view(rows, -1, 32).abs().amax(-1)
    assert bool((lost <= expected.view(rows, -1, 32).abs().amax(-1) / 250).all())


@pytest.mark.parametrize("family", EXACT)
def test_a_file_holds_the_config_and_the_tensors_of_its_checkpoint(family: str, tmp_path: Path) -> None:
    directory, path = reference(family).directory, write_model(tmp_path / "m.gguf", family)
    config, expected = read_model_config(path), read_model_config(directory)
    frequencies, wanted = (inverse_frequencies(c.ropes[0], c.attention.head_dim) for c in (config, expected))
    assert torch.allclose(frequencies[0], wanted[0], rtol=1e-6) and frequencies[1] == wanted[1]
    assert config.norm.eps == pytest.approx(expected.norm.eps)
    norms = ("norm", "before_norm", "after_norm", "qk_norm")
    same = {"path": path, "ropes": expected.ropes, **dict.fromkeys(norms)}
    assert replace(config, **same) == replace(expected, **same)
    checkpoint, other = open_checkpoint(config), open_checkpoint(expected)
    assert set(checkpoint.tensors) == set(other.tensors)
    for name in checkpoint.tensors:
        assert torch.equal(make_reader(checkpoint).read(name), make_reader(other).read(name)), name


@pytest.mark.parametrize("family", ["llama", "llama-rope-llama3", "phi3", "seed-oss", "lfm2", *OTHERS])
def test_a_file_answers_as_its_checkpoint(family: str, tmp_path: Path) -> None:
    prompt = prompt_of(40)
    tokens, _ = generate(load(write_model(tmp_path / "m.gguf", family)), prompt, [40], greedy(20))
    reference(family).check_greedy(prompt, tokens)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.MXFP4])
def test_quantised_rows_of_queries_and_keys_come_in_the_order_of_the_layers(kind: Kind, tmp_path: Path) -> None:
    config = read_model_config(write_model(tmp_path / "m.gguf", kind=kind))
    checkpoint, directory = open_checkpoint(config), open_checkpoint(read_model_config(reference("llama").directory))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        original = make_reader(directory).read(name).numpy()
        expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind))
        weight = make_reader(checkpoint).read_quantized(name)
        assert weight.format == checkpoint.tensors[name].format
        assert torch.equal(weight.dequantize(), expected)
        assert torch.equal(make_reader(checkpoint).read(name), expected)


def test_a_quantised_file_is_computed_in_bfloat16_and_loads_whole(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = RunnerConfig(write_model(tmp_path / "m.gguf", kind=Kind.Q8_0), num_blocks=16, instruction_set=TORCH)
    runner = load_runner(config, lambda done, total: seen.append((done, total)))
    assert runner.attention.dtype is torch.bfloat16 and seen[-1][0] == seen[-1][1]
    assert len(generate(runner, [1, 2, 3], [3], greedy(5))[0]) == 5


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.BF16, "bfloat16")])
def test_floating_point_is_read_in_its_own_dtype(kind: Kind, dtype: str, tmp_path: Path) -> None:
    config = read_model_config(write_model(tmp_path / "m.gguf", kind=kind))
    weight = make_reader(open_checkpoint(config)).read("lm_head.weight")
    original = make_reader(open_checkpoint(read_model_config(reference("llama").directory))).read("lm_head.weight")
    assert config.dtype == dtype
    assert torch.equal(weight, original.to(getattr(torch, dtype)))


def test_the_front_end_sizes_a_cache_from_a_file(model: Path) -> None:
    assert read_kv_geometry(model, "auto", 32) == read_kv_geometry(reference("llama").directory, "auto", 32)


def test_metadata_is_walked_through_once_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, walked = write_model(tmp_path / "m.gguf"), []

    def counting(path: Path) -> GgufFields:
        walked.append(path)
        return read_gguf_fields(path)

    monkeypatch.setattr(registry, "read_gguf_fields", counting)
    os.utime(path, (1e9, 1e9))
    expected = read_model_config(path)
    assert read_model_config(path) == expected and len(walked) == 1
    write_model(path, **{"llama.context_length": 128})
    assert [read_model_config(path).max_position_embeddings for _ in range(2)] == [128, 128]
    assert len(walked) == 3  # what was written just now may be written again at the same time
    os.utime(path, (2e9, 2e9))
    assert read_model_config(path).max_position_embeddings == 128 and len(walked) == 4


def test_stop_tokens_are_those_of_the_metadata_and_those_known_by_their_text(model: Path) -> None:
    assert read_model_config(model).eos_token_ids == (7, 5)


def test_a_stop_token_that_the_file_takes_for_text_is_a_control_token(tmp_path: Path) -> None:
    vocabulary = VOCABULARY | {"tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 4, 4, 3], "tokenizer.ggml.eot_token_id": 6}
    path = write_model(tmp_path / "m.gguf", **vocabulary)
    assert read_model_config(path).eos_token_ids == (7, 6, 5)
    assert Tokenizer(path).decode([0, 5, 1]) == "ab"


def test_truncated_files_are_refused_wherever_they_end(model: Path, tmp_path: Path) -> None:
    content, path = model.read_bytes(), tmp_path / "cut.gguf"
    header = min(tensor.start for tensor in GgufFile(model).tensors.values())
    for length in [*range(1, header, 37), header, len(content) // 2, len(content) - 64]:
        path.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf: .*(truncated|no GGUF file)"):
            GgufFile(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cut\.gguf: cannot be mapped"):
        GgufFile(path)


def test_damaged_files_are_read_or_refused_but_never_crash(model: Path, tmp_path: Path) -> None:
    content, path, rng = model.read_bytes(), tmp_path / "damaged.gguf", random.Random(0)
    header = min(tensor.start for tensor in GgufFile(model).tensors.values())
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 4))):
            damaged[rng.randrange(header)] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            open_checkpoint(read_model_config(path))
        except ConfigError as error:
            assert str(error).startswith(str(path)), error
            refused += 1
    assert refused > 50


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    """One entry of metadata."""
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(60), "is no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1; supported: versions 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian; supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "ends within a tensor's name"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "ends within a metadata key"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", HUGE), "ends within a metadata key"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"k", 9, struct.pack("<IQ", 8, 1 << 40)), "k claims 1099"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"k", 9, struct.pack("<IQ", 8, 5000)), "ends within k"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"k", 9, struct.pack("<IQ", 4, HUGE)), "ends within k"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"k", 9, struct.pack("<IQ", 9, 1)), "k has values of the unkn"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"k", 77, b""), "k has values of the unknown type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"\xff", 7, b"\1"), "a metadata key is not UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * entry(b"k", 7, b"\1"), "metadata k occurs twice"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<I", 9), "tensor t has 9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 33, 8, 0), "multiples of 32"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, HUGE, 0, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 8, 0, 3), "no multiple of 8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"general.alignment", 4, b"\3\0\0\0"), "alignment is 3"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 8, 16, 0), "of type IQ2_XXS; su"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 8, 99, 0), "of type number 99"),
    ],
)  # fmt: skip
def test_hostile_lengths_counts_and_types_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"hostile\.gguf: ") as error:
        GgufFile(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma4"}, "general.architecture is 'gemma4'; supported: gemma2, gemma3"),
        ({"general.architecture": 3}, "general.architecture is 3; supported: text"),
        ({"general.type": "adapter"}, "general.type is 'adapter'; supported: model"),
        ({"llama.expert_count": 8}, "llama.expert_used_count is None; supported: a whole"),
        ({"llama.block_count": None}, "llama.block_count is None; supported: a value"),
        ({"llama.block_count": 4_000_000_000}, "llama.block_count is 4000000000; supported: at most"),
        ({"llama.block_count": "3"}, "llama.block_count is '3'; supported: a whole number"),
        ({"llama.context_length": 0}, "llama.context_length is 0; supported: a whole number of at least 1"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0; supported: a divisor"),
        ({"llama.attention.head_count": [4, 8, 4]}, "llama.attention.head_count is 3 values; supported: the same"),
        ({"llama.attention.head_count_kv": 3}, "llama.attention.head_count_kv is 3; supported: a divisor"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8; supported: 16"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8; supported: 16"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'; supported: none, linear"),
        ({"llama.rope.scaling.factor": -2.0}, "llama.rope.scaling.factor is -2.0; supported: a positive number"),
        ({"llama.attention.layer_norm_rms_epsilon": True}, "epsilon is True; supported: a number"),
        ({"llama.logit_scale": 0.25}, "llama.logit_scale is 0.25; supported: 0.0 or 1.0"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False; supported: True"),
        ({"llama.rope.scaling.alpha": 2.0}, "llama.rope.scaling.alpha is 2.0; supported: no such key"),
        ({"llama.attention.sliding_window_pattern": [0, 1]}, "sliding_window_pattern is 2 values; supported: no such"),
        ({"llama.of_the_future": "x"}, "llama.of_the_future is 'x'; supported: no such key"),
        ({"tokenizer.ggml.tokens": ["x"] * 400}, "tokens has 400 entries; token_embd.weight has 384"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is 2 values; supported: an array of texts"),
        ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.eos_token_id": 9}, "eos_token_id is 9; supported: less"),
        ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1, 1]}, "token_type is 2 values; supported: 1"),
    ],
)  # fmt: skip
def test_what_the_engine_has_not_is_refused_by_the_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError if "entries" not in message else ConfigError) as error:
        read_model_config(write_model(tmp_path / "m.gguf", **changes))
    assert str(error.value).startswith(f"{tmp_path}/m.gguf: ") and message in str(error.value)


def keys_of_the_format(holder: type = gguf.Keys) -> set[str]:
    """The keys of an architecture that the gguf package knows, without its name."""
    found = set()
    for value in vars(holder).values():
        if isinstance(value, type):
            found |= keys_of_the_format(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            found.add(value.removeprefix("{arch}."))
    return found


def test_each_key_that_the_format_has_is_read_or_harmless_or_refused_by_its_name(tmp_path: Path) -> None:
    keys = keys_of_the_format()
    assert len(keys) > 90 and set(NEUTRAL) & keys
    for architecture, family in (("llama", "llama"), ("qwen3", "qwen3"), ("gemma3", "gemma3"), ("granite", "granite")):
        metadata = model_metadata(reference(family).directory)
        tensors = model_tensors(reference(family).directory)
        plain = read_model_config(write_gguf(tmp_path / "m.gguf", metadata, tensors))
        for key in sorted(keys - READ - GGUF_FAMILIES[architecture].read):
            name = f"{architecture}.{key}"
            for value in (*NEUTRAL.get(key, (0,)), ...):
                given = {name: 7 if value is ... else value}
                path = write_gguf(tmp_path / "m.gguf", metadata | given, tensors)
                if value is not ... or key in HARMLESS:
                    assert read_model_config(path) == plain
                    continue
                with pytest.raises(UnsupportedModelError, match=rf"m\.gguf: {re.escape(name)} is 7; supported: "):
                    read_model_config(path)


@pytest.mark.parametrize("key", ["rope.freq_base", "attention.layer_norm_rms_epsilon", "rope.scaling.factor"])
def test_what_a_key_says_is_read(key: str, tmp_path: Path) -> None:
    assert key in READ
    plain = read_model_config(write_model(tmp_path / "m.gguf"))
    assert read_model_config(write_model(tmp_path / "m.gguf", **{f"llama.{key}": 7.0})) != plain


def test_a_file_without_a_number_of_key_heads_has_as_many_as_heads(tmp_path: Path) -> None:
    for family in ("llama", "qwen2", "qwen3"):
        name = "llama" if family == "llama" else family
        path = write_model(tmp_path / "m.gguf", family, **{f"{name}.attention.head_count_kv": None})
        assert read_model_config(path).attention.num_kv_heads == 4


def test_uniform_counts_of_layers_are_one_count(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", **{"llama.attention.head_count_kv": [2, 2, 2]})
    assert read_model_config(path).attention.num_kv_heads == 2


def test_scaling_without_a_type_is_linear(tmp_path: Path) -> None:
    rope = read_model_config(write_model(tmp_path / "m.gguf", **{"llama.rope.scaling.factor": 4.0})).ropes[0]
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_tensors_that_are_not_of_the_architecture_or_missing_are_named(tmp_path: Path) -> None:
    directory = reference("llama").directory
    tensors = {**model_tensors(directory), "blk.0.ffn_gate_exps.weight": np.zeros((2, 32), np.float32)}
    path = write_gguf(tmp_path / "more.gguf", model_metadata(directory), tensors)
    with pytest.raises(UnsupportedModelError, match=r"more\.gguf: tensor blk\.0\.ffn_gate_exps\.weight is not part"):
        open_checkpoint(read_model_config(path))
    with pytest.raises(ConfigError, match=r"less\.gguf: tensor token_embd\.weight is missing"):
        read_model_config(write_model(tmp_path / "less.gguf", without="token_embd.weight"))
    with pytest.raises(ConfigError, match=r"down\.gguf: tensor model\.layers\.1\.mlp\.down_proj\.weight is missing"):
        load(write_model(tmp_path / "down.gguf", without="blk.1.ffn_down.weight"))


@pytest.mark.parametrize("no_first", [False, True])
def test_a_model_in_several_files_is_the_model_in_one(no_first: bool, model: Path, tmp_path: Path) -> None:
    paths = split_model(tmp_path, reference("llama").directory, no_first=no_first, **VOCABULARY)
    config, expected = read_model_config(paths[0]), read_model_config(model)
    assert replace(config, path=model) == expected
    checkpoint, whole = open_checkpoint(config), open_checkpoint(expected)
    assert list(checkpoint.files) == paths and checkpoint.num_bytes == whole.num_bytes
    assert {tensor.path for tensor in checkpoint.tensors.values()} == set(paths[no_first:])
    assert set(checkpoint.tensors) == set(whole.tensors)
    for name in checkpoint.tensors:
        assert torch.equal(make_reader(checkpoint).read(name), make_reader(whole).read(name)), name
        assert checkpoint.first_bytes(name, 8) == whole.first_bytes(name, 8)
    assert model_name(paths[0]) == "m"
    assert Tokenizer(paths[0]).decode([0, 1]) == Tokenizer(model).decode([0, 1])
    tokens, _ = generate(load(paths[0]), prompt_of(20), [20], greedy(5))
    assert tokens == generate(load(model), prompt_of(20), [20], greedy(5))[0]


def test_parts_that_are_missing_or_do_not_belong_together_are_named(tmp_path: Path) -> None:
    first, second, third = split_model(tmp_path, reference("llama").directory)
    with pytest.raises(ConfigError, match=r"-00002-of-00003\.gguf: is part 2 of 3 of a model; give the first: m-00001"):
        GgufModel(second)
    other = shutil.copy(first, tmp_path / "renamed.gguf")
    with pytest.raises(ConfigError, match=r"renamed\.gguf: is one of 3 parts .* must end in -00001-of-00003\.gguf"):
        GgufModel(Path(other))
    content = third.read_bytes()
    third.unlink()
    with pytest.raises(ConfigError, match=r"m-00003-of-00003\.gguf: no such file; m-00001\S+ is the first of 3"):
        GgufModel(first)
    shutil.copy(second, third)
    with pytest.raises(ConfigError, match=r"-00003-of-00003\.gguf: split\.no and split\.count are 1 and 3; .* 2 and 3"):
        GgufModel(first)
    same = next(iter(model_tensors(reference("llama").directory).items()))
    said = {"split.no": 2, "split.count": 3}
    write_gguf(third, said, dict([same]))
    with pytest.raises(ConfigError, match=rf"tensor {re.escape(same[0])} lies in both \S+-00001-\S+ and \S+-00003-"):
        GgufModel(first)
    write_gguf(third, said)
    with pytest.raises(
        ConfigError, match=r"m-00001-of-00003\.gguf: split\.tensors\.count is \d+; its 3 parts hold \d+"
    ):
        GgufModel(first)
    third.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"m-00003-of-00003\.gguf: .*truncated"):
        GgufModel(first)


def test_a_window_is_served_as_mistral_and_refused_for_qwen(tmp_path: Path) -> None:
    key = "qwen2.attention.sliding_window"
    with pytest.raises(UnsupportedModelError, match=f"{key} is 50; supported: none for qwen2"):
        read_model_config(write_model(tmp_path / "m.gguf", "qwen2", **{key: 50}))
    for unused in (0, 4096):
        config = read_model_config(write_model(tmp_path / "m.gguf", "qwen2", **{key: unused}))
        assert {layer.window for layer in config.attention.layers} == {None}


SMOLLM3 = {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}  # as every file of it is


def test_a_file_of_smollm3_rotates_all_layers_but_every_fourth(tmp_path: Path) -> None:
    model = checkpoints.make_model("SmolLM3", SMOLLM3)
    model.save_pretrained(tmp_path / "model")
    path = gguf_files.write_model(tmp_path / "m.gguf", tmp_path / "model")
    ours, expected = read_model_config(path), read_model_config(tmp_path / "model")
    assert [rope is None for rope in ours.ropes] == [False, False, False, True, False]  # type: ignore[attr-defined]
    assert [rope and rope.theta for rope in ours.ropes] == [rope and rope.theta for rope in expected.ropes]  # type: ignore[attr-defined]
    checkpoint, other = open_checkpoint(ours), open_checkpoint(expected)
    for name in checkpoint.tensors:
        assert torch.equal(make_reader(checkpoint).read(name), make_reader(other).read(name)), name


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("gemma3", {"gemma3.attention.sliding_window_pattern": None}, [40, 40, 40]),  # every sixth has none
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 2}, [40, None, 40]),
        ("gemma3", {"gemma3.attention.sliding_window": None}, [None, None, None]),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": None}, [40, None, 40]),
        ("gemma2", {"gemma2.attention.sliding_window": None}, [None, None, None]),  # 4096: no context is longer
        ("olmo3", {"olmo2.attention.sliding_window_pattern": None}, [40, 40, 40]),
        ("olmo3", {"olmo2.attention.sliding_window": None}, [None, None, None]),  # that is OLMo 2
    ],
)
def test_which_layers_have_a_window_where_a_file_does_not_say_it(
    family: str, changes: dict[str, Any], windows: list[int | None], tmp_path: Path
) -> None:
    config = read_model_config(write_model(tmp_path / "m.gguf", family, **changes))
    assert [layer.window for layer in config.attention.layers] == windows


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3", {"gemma3.attention.sliding_window_pattern": [True]}, "pattern is 1 values; supported: a whole"),
        ("gemma3", {"gemma3.attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; supported: 0.0"),
        ("gemma2", {"gemma2.rope.freq_base_swa": 5.0}, "freq_base_swa is 5.0; supported: rope.freq_base (10000.0)"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "finetuned is False; supported: true"),
        ("granite", {"granite.expert_count": 4}, "granite.expert_count is 4; supported: 0"),
        ("phi3", {"phi3.rope.dimension_count": 18}, "dimension_count is 18; supported: an even number of at most 16"),
        ("ministral3", {"mistral3.attention.temperature_scale": -1.0}, "scaling_beta is -1.0; supported: a pos"),
    ],
)  # fmt: skip
def test_what_a_family_does_not_compute_is_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read_model_config(write_model(tmp_path / "m.gguf", family, **changes))
    assert message in str(error.value)


def test_the_command_line_takes_a_file_and_names_the_model_after_it(model: Path, tmp_path: Path) -> None:
    assert model_path(model) == model and model_name(model) == "tiny"
    with pytest.raises(ConfigError, match=r"none\.gguf does not exist"):
        model_path(tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match="is not a model directory"):
        model_path(tmp_path)
