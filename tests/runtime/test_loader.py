"""Reading checkpoints: single and sharded files, every dtype, and an error that names the tensor and the file."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.kernels.instruction_set import TORCH
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.runtime.weights.checkpoint import open_checkpoint
from diptych.runtime.weights.loader import Weights, resolve_dtype
from diptych.runtime.weights.safetensors_directory import SafetensorsDirectory
from diptych.runtime.weights.safetensors_file import SafetensorsFile
from diptych.runtime.weights.safetensors_reader import read_tensor
from diptych.runtime.weights.weight_bytes import loaded_weight_bytes
from tests.runtime.checkpoints import Reference, prompt_of, reference
from tests.runtime.driving import generate, greedy

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from make_random_model import make_model

CPU = torch.device("cpu")


def tensors_of(family: str = "llama") -> dict[str, torch.Tensor]:
    """The tensors of a random checkpoint."""
    return load_file(reference(family).directory / "model.safetensors")


def write(directory: Path, tensors: dict[str, torch.Tensor], family: str = "llama", **changes: Any) -> Path:
    """A model directory with these tensors."""
    config = json.loads((reference(family).directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def load(directory: Path, **changes: Any):
    """A small runner."""
    return load_runner(RunnerConfig(directory, num_blocks=16, instruction_set=TORCH, **changes))


def test_our_reader_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.randn(2, 2, 2).half(),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.entries) == set(tensors)
    for name, expected in tensors.items():
        assert torch.equal(read_tensor(file, name), expected) and read_tensor(file, name).dtype is expected.dtype
        file.release(name)
        assert torch.equal(read_tensor(file, name), expected)


def test_a_sharded_checkpoint_gives_the_same_tokens(tmp_path: Path) -> None:
    reference("qwen2").model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = prompt_of(40)
    tokens, _ = generate(load(tmp_path), prompt, [40], greedy(20))
    reference("qwen2").check_greedy(prompt, tokens)


def test_progress_goes_from_nothing_to_everything(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    directory = reference("qwen3").directory
    load_runner(
        RunnerConfig(directory, num_blocks=4, instruction_set=TORCH), lambda done, total: seen.append((done, total))
    )
    total = SafetensorsDirectory(directory).num_bytes
    done = [entry[0] for entry in seen]
    assert {entry[1] for entry in seen} == {total}
    assert done == sorted(done) and done[-1] == total and len(done) > 20


def test_a_float16_checkpoint_is_converted_with_a_note(tmp_path: Path) -> None:
    halves = {name: tensor.half() for name, tensor in tensors_of().items()}
    write(tmp_path, halves, dtype="float16")
    runner = load(tmp_path)
    assert runner.attention.dtype is torch.bfloat16
    assert runner.loaded.note == "the checkpoint is float16; converted to bfloat16"
    exact = load(tmp_path, dtype="float32")
    assert exact.attention.dtype is torch.float32 and "converted to float32" in exact.loaded.note
    assert torch.equal(exact.model.embed_tokens.weight, halves["model.embed_tokens.weight"].float())


def test_dtype_auto_is_the_checkpoints_own(tmp_path: Path) -> None:
    write(tmp_path, tensors_of(), dtype=None)
    config = read_model_config(tmp_path)
    checkpoint = open_checkpoint(config)
    assert resolve_dtype("auto", config, checkpoint) == (torch.float32, "")
    assert resolve_dtype("bfloat16", config, checkpoint) == (torch.bfloat16, "")
    with pytest.raises(ConfigError, match="dtype is 'int8'; auto, bfloat16 or float32"):
        resolve_dtype("int8", config, checkpoint)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = tensors_of()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(write(tmp_path, tensors))


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    tensors = tensors_of() | {"model.layers.0.extra": torch.zeros(1), "model.layers.1.extra": torch.zeros(1)}
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor model\.layers\.\d\.extra and 1 more is not"):
        load(write(tmp_path, tensors))


def test_buffers_of_old_exports_and_a_tied_head_are_ignored(tmp_path: Path) -> None:
    tensors = tensors_of("qwen2") | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    load(write(tmp_path, tensors, "qwen2"))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("stored", ["embedding", "both, equal", "both, different", "head"])
def test_a_tied_head_is_what_transformers_makes_of_the_tensors(stored: str, is_tied: bool, tmp_path: Path) -> None:
    tensors = tensors_of("qwen2")
    head = tensors["model.embed_tokens.weight"].clone()
    if stored != "embedding":
        tensors["lm_head.weight"] = head.flip(0).contiguous() if stored == "both, different" else head
    if stored == "head":
        del tensors["model.embed_tokens.weight"]
    write(tmp_path, tensors, "qwen2", tie_word_embeddings=is_tied)
    if not is_tied and not stored.startswith("both"):
        with pytest.raises(ConfigError, match=r"tensor (lm_head|model\.embed_tokens)\.weight is missing"):
            load(tmp_path)
        return
    theirs = Reference(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tmp_path)
    prompt = prompt_of(40)
    tokens, _ = generate(load(tmp_path), prompt, [40], greedy(20))
    theirs.check_greedy(prompt, tokens)
    num_bytes = loaded_weight_bytes(tmp_path, "float32", "none")
    vocabulary = 2 * head.numel() * 4  # rows to look up, and packed to multiply
    layers = [tensor for name, tensor in tensors.items() if "layers" in name or "model.norm" in name]
    assert num_bytes == vocabulary + sum(tensor.numel() * 4 for tensor in layers)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = tensors_of()
    tensors["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(16, 64)
    with pytest.raises(
        ConfigError,
        match=r"model\.safetensors: tensor model\.layers\.2\.self_attn\.k_proj\.weight has shape \[16, 64\]; "
        r"the config asks for \[32, 64\]",
    ):
        load(write(tmp_path, tensors))


def test_a_tensor_of_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    tensors = tensors_of()
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int64)
    with pytest.raises(UnsupportedModelError, match=r"tensor model\.norm\.weight has dtype I64; supported: BF16"):
        load(write(tmp_path, tensors))


OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@pytest.mark.skipif(
    not OVERCOMMIT.exists() or OVERCOMMIT.read_text().strip() == "2", reason="this system reserves memory for every map"
)
def test_a_file_that_is_larger_than_the_memory_of_the_machine_can_be_read(tmp_path: Path) -> None:
    size = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    entries = {"large": (0, size), "last": (size, size + 8)}
    header = {
        name: {"dtype": "F32", "shape": [(end - at) // 4], "data_offsets": [at, end]}
        for name, (at, end) in entries.items()
    }
    head = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)  # of which the disk keeps nothing
        file.seek(0, os.SEEK_END)
        file.write(bytes(range(8)))
    assert bytes(SafetensorsFile(tmp_path / "model.safetensors").data("last")) == bytes(range(8))


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_noticed(share: float, tmp_path: Path) -> None:
    path = write(tmp_path, tensors_of()) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ConfigError, match=r"model\.safetensors: .*(truncated|cannot be mapped)"):
        load(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
    ],
)
def test_a_header_that_makes_no_sense_is_refused(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(ConfigError, match="its header is not valid"):
        SafetensorsFile(path)


def test_a_directory_without_weights_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        SafetensorsDirectory(tmp_path)


def test_an_index_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(ConfigError, match=r"one\.safetensors: tensor b is missing"):
        SafetensorsDirectory(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "two.safetensors"}}))
    with pytest.raises(ConfigError, match=r"two\.safetensors: no such file"):
        SafetensorsDirectory(tmp_path)
    index.write_text("{}")
    with pytest.raises(ConfigError, match="has no valid weight_map"):
        SafetensorsDirectory(tmp_path)


def test_weights_are_fused_in_the_order_asked_for(tmp_path: Path) -> None:
    save_file({"k": torch.ones(2, 3), "q": torch.zeros(4, 3)}, tmp_path / "model.safetensors")
    weights = Weights(SafetensorsDirectory(tmp_path), torch.float32, CPU)
    assert weights.fused(["q", "k"], [4, 2], 3).sum(1).tolist() == [0, 0, 0, 0, 3, 3]
    weights.finish()


def test_a_context_longer_than_the_model_supports_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len is 5000; at least 2 and at most 4096"):
        load(reference("llama").directory, max_model_len=5000)
    with pytest.raises(ConfigError, match="kv_cache_bytes is 10 bytes; one block of this model takes 24 KiB"):
        load_runner(RunnerConfig(reference("llama").directory, kv_bytes=10, instruction_set=TORCH))


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_random_models_load_and_run(shape: str, tmp_path: Path) -> None:
    runner = load(make_model(shape, tmp_path, "bfloat16"))
    tokens, _ = generate(runner, [1, 2, 3], [3], greedy(5))
    assert len(tokens) == 5
