"""Text models beside models of images: served as what they are alone, and what is not known is refused by its name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.kernels.instruction_set import AUTO
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.runtime.weights.checkpoint import open_checkpoint
from tests.runtime.checkpoints import FAMILIES, Reference, make_model, prompt_of
from tests.runtime.driving import generate, greedy

WHOLES = [
    ("Gemma3", "gemma3"),
    ("Mistral3", "ministral3"),
    ("Mistral3", "mistral-full"),
    ("MuseGlimmer", "muse-glimmer"),
]
TEXT_PARTS = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
OLDER = ("language_model.model.", "language_model.lm_head.")
NEWER = ("model.language_model.", "lm_head.")


def write_whole(directory: Path, whole: str, family: str) -> Reference:
    """A checkpoint of a class that holds the family's text model beside another, and that class."""
    torch.manual_seed(3)
    model = make_model(*FAMILIES[family], whole=whole)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.3 if "embed" in name or "lm_head" in name else 0.15)
    model.save_pretrained(directory)
    return Reference(model, directory)


@pytest.mark.parametrize(("whole", "family"), WHOLES)
def test_the_text_model_answers_as_in_transformers(whole: str, family: str, tmp_path: Path) -> None:
    reference = write_whole(tmp_path, whole, family)
    runner, prompt = load_runner(RunnerConfig(tmp_path, "float32", instruction_set=AUTO, num_blocks=16)), prompt_of(90)
    tokens, _ = generate(runner, prompt, [50, 40], greedy(20))
    reference.check_greedy(prompt, tokens)
    assert f"{whole}ForConditionalGeneration is served as a model of text" in runner.loaded.note
    names = open_checkpoint(runner.model_config).tensors
    assert names and all(name.startswith(TEXT_PARTS) for name in names)


@pytest.mark.parametrize(("prefix", "head"), [OLDER, NEWER])
def test_names_of_older_and_newer_writers_are_known(prefix: str, head: str, tmp_path: Path) -> None:
    reference = write_whole(tmp_path, "MuseGlimmer", "muse-glimmer")
    file = tmp_path / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(file).items():
        renamed[name.replace(NEWER[0], prefix).replace(NEWER[1], head)] = tensor
    save_file(renamed, file)
    runner, prompt = load_runner(RunnerConfig(tmp_path, "float32", num_blocks=16)), prompt_of(30)
    reference.check_greedy(prompt, generate(runner, prompt, [30], greedy(8))[0])


def test_a_tensor_of_neither_part_is_named(tmp_path: Path) -> None:
    write_whole(tmp_path, "Mistral3", "ministral3")
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "audio_tower.weight": torch.zeros(2)}, file)
    with pytest.raises(ConfigError, match=r"tensor audio_tower\.weight is not part of this architecture"):
        load_runner(RunnerConfig(tmp_path, num_blocks=16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": {"model_type": "qwen3"}}, "text_config.model_type is 'qwen3'; supported: mistral, ministral3"),
        ({"text_config": None}, "text_config.model_type is None; supported: mistral, ministral3"),
        ({"model_type": "mistral4"}, "model_type is 'mistral4'; supported: mistral3, the type of Mistral3ForCond"),
        ({"audio_config": {"a": 1}}, "audio_config is {'a': 1}; supported: no such field beside text_config"),
        ({"text_config": {"model_type": "ministral3", "num_experts": 8}}, "text_config.num_experts is 8; supported: "),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.quant_method is 'hqq'; supported: com"),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "ministral3"}}
    (tmp_path / "config.json").write_text(json.dumps(whole | changes))
    with pytest.raises(UnsupportedModelError) as caught:
        read_model_config(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(("length", "max_model_len", "which"), [(30, 48, "short"), (60, 200, "long")])
def test_rotary_factors_are_those_for_the_longest_context_of_a_worker(
    length: int, max_model_len: int, which: str, tmp_path: Path
) -> None:
    """In transformers a sequence takes the long factors once it exceeds the original context, here of 48 tokens."""
    name, changes = FAMILIES["phi3-longrope"]
    model = make_model(name, changes | {"original_max_position_embeddings": 48, "sliding_window": None})
    model.save_pretrained(tmp_path)
    runner = load_runner(RunnerConfig(tmp_path, "float32", num_blocks=16, max_model_len=max_model_len))
    assert f"the rotary factors are the {which} ones" in runner.loaded.note
    prompt = prompt_of(length)
    tokens, _ = generate(runner, prompt, [length], greedy(8))
    Reference(model, tmp_path).check_greedy(prompt, tokens)
