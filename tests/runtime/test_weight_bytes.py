"""What the weights take is known before they are read."""

import pytest
import torch

from diptych.control.errors import ConfigError
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.runtime.weights.weight_bytes import loaded_weight_bytes, memory_beside_weights, scratch_bytes
from diptych.runtime.weights.weight_memory import PrivateMemory
from tests.runtime.checkpoints import reference


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    "family", ["qwen2", "llama", "llama-tied-biased", "qwen3-moe", "granite-moe", "gpt-oss", "glm4-moe"]
)
def test_the_estimate_is_what_loading_takes(family: str, quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    new, keep = PrivateMemory.new, PrivateMemory.keep

    def counted_new(self: PrivateMemory, *arguments: object) -> torch.Tensor:
        tensor = new(self, *arguments)
        taken.append(tensor.nbytes)
        return tensor

    def counted_keep(self: PrivateMemory, tensor: torch.Tensor) -> torch.Tensor:
        taken.append(tensor.nbytes)
        return keep(self, tensor)

    monkeypatch.setattr(PrivateMemory, "new", counted_new)
    monkeypatch.setattr(PrivateMemory, "keep", counted_keep)
    directory = reference(family, "bfloat16").directory
    load_runner(RunnerConfig(directory, num_blocks=4, quantize=quantize))
    estimate = loaded_weight_bytes(directory, "auto", quantize)
    # packed weights have room behind them, and rows up to a multiple of 32 (8 KiB each: much for models this small)
    assert estimate <= sum(taken) <= 1.2 * estimate + 9000 * len(taken)


def test_fewer_bits_take_less() -> None:
    directory = reference("qwen2", "bfloat16").directory
    none, int8, int4 = (loaded_weight_bytes(directory, "auto", name) for name in ("none", "int8", "int4"))
    assert int4 < int8 < 0.55 * none
    assert loaded_weight_bytes(directory, "float32", "none") == 2 * none


def test_a_mixture_needs_room_for_what_each_expert_of_each_token_gives() -> None:
    directory = reference("olmoe", "bfloat16").directory
    assert scratch_bytes(directory, "auto", 100) == 100 * 5 * (64 + 64) * 2
    assert scratch_bytes(directory, "float32", 100) == 2 * scratch_bytes(directory, "auto", 100)
    assert scratch_bytes(reference("qwen2").directory, "auto", 100) == 0


def test_weights_that_do_not_fit_are_refused_with_the_sizes_and_a_cure() -> None:
    assert memory_beside_weights("some/model", 3, 10) == 7
    with pytest.raises(ConfigError, match=r"some/model take 7\.0 GiB; 5\.0 GiB .* int8 halves them"):
        memory_beside_weights("some/model", 7 * 2**30, 5 * 2**30)
