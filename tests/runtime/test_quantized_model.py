"""Models whose weights become whole numbers when they are loaded."""

import os
import sys

import pytest
import torch

from diptych.control.errors import ConfigError
from diptych.runtime.kernels.instruction_set import TORCH, available
from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig, load_runner
from tests.runtime.checkpoints import prompt_of, reference, runner
from tests.runtime.driving import chunks_of, generate, greedy

FASTEST = available(torch.bfloat16)[0]


def logprobs(shared: ModelRunner, prompt: list[int]) -> torch.Tensor:
    """Log probabilities of each token of the prompt but the first."""
    sampling = greedy(1, prompt_logprobs=0)
    _, results = generate(shared, prompt, [len(prompt)], sampling)
    [(_, entries)] = results[0].payload.prompt_logprobs.values()
    return torch.tensor([entry.logprob for entry in entries])


@pytest.mark.parametrize("instruction_set", [FASTEST, TORCH])
@pytest.mark.parametrize(("quantize", "tolerance"), [("int8", 0.05), ("int4", 0.5)])
@pytest.mark.parametrize("family", ["qwen2", "llama", "llama-tied-biased"])
def test_a_quantized_model_predicts_nearly_what_it_did(
    family: str, quantize: str, tolerance: float, instruction_set: str
) -> None:
    prompt = prompt_of(300)
    exact = logprobs(runner(family, instruction_set, "bfloat16"), prompt)
    rounded = logprobs(runner(family, instruction_set, "bfloat16", quantize=quantize), prompt)
    assert abs(float(rounded.mean() - exact.mean())) < tolerance * abs(float(exact.mean()))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_quantized_model_answers_the_same_however_its_prompt_is_cut(quantize: str) -> None:
    shared, prompt = runner("qwen3", FASTEST, "bfloat16", quantize=quantize), prompt_of(150)
    answers = [generate(shared, prompt, chunks_of(150, size), greedy(20))[0] for size in (150, 64, 7)]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on linux only")
@pytest.mark.parametrize("instruction_set", [FASTEST, TORCH])
@pytest.mark.parametrize(("family", "quantize"), [("qwen2", "int8"), ("llama", "int4")])
def test_workers_share_the_whole_numbers(family: str, quantize: str, instruction_set: str) -> None:
    fd, prompt = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), prompt_of(60)
    directory = reference(family, "bfloat16").directory
    config = RunnerConfig(
        directory, num_blocks=32, instruction_set=instruction_set, quantize=quantize, shared_weights=fd
    )
    writer, reader = load_runner(config), load_runner(config)
    expected = generate(runner(family, instruction_set, "bfloat16", quantize=quantize), prompt, [60], greedy(12))[0]
    for worker in (writer, reader):
        assert worker.loaded.note == "" and quantize in worker.loaded.weights
        assert generate(worker, prompt, [60], greedy(12))[0] == expected
    other = load_runner(RunnerConfig(directory, num_blocks=4, instruction_set=instruction_set, shared_weights=fd))
    assert "another model or dtype" in other.loaded.note and other.loaded.weights == "bfloat16"
    os.close(fd)


def test_the_formats_of_the_weights_are_named() -> None:
    assert runner("qwen2", FASTEST, "bfloat16", quantize="int8").loaded.weights == "int8"
    # 112 columns are no groups of 32: the layer has 8 bits
    assert runner("llama", FASTEST, "bfloat16", quantize="int4").loaded.weights == "int8, int4 in groups of 32"


def test_whole_numbers_are_for_cpus() -> None:
    with pytest.raises(ConfigError, match="quantize is 'int8' and device is meta; supported: cpu"):
        load_runner(RunnerConfig(reference("qwen2").directory, device="meta", quantize="int8"))
