"""A decode step in one native call is the parts of its layers, bit for bit."""

import pytest
import torch

from diptych.control.step import TokenLogprobs
from diptych.runtime.kernels.instruction_set import TORCH
from diptych.runtime.local_engine import engine_config
from tests.runtime.checkpoints import prompt_of, runner
from tests.runtime.driving import greedy
from tests.runtime.gathering_engine import GatheringEngine
from tests.runtime.kernel_sets import NATIVE, every_pair

LENGTHS = {"short": 5, "one segment": 256, "three segments": 520}


FAMILIES = [
    *("llama", "mistral-window", "qwen2-window", "qwen3-biased", "gemma2", "gemma3", "ministral3", "smollm3", "phi3"),
    *("phi3-longrope", "granite", "olmo2", "olmo3", "seed-oss", "muse-glimmer", "llama-tied-biased"),
    *("qwen3-moe", "mixtral", "olmoe", "granite-moe", "gpt-oss", "glm4-moe", "lfm2", "lfm2-biased"),
]
QUANTIZED = {
    "int8": ["qwen2", "gemma3", "gpt-oss"],
    "int4": ["llama", "muse-glimmer", "qwen3-moe", "glm4-moe", "lfm2"],
}
MODELS = [
    pytest.param(pair.values[0], quantize, *pair.values[1:], marks=pair.marks)
    for quantize, families in {"none": FAMILIES, **QUANTIZED}.items()
    for pair in every_pair(families, NATIVE)
]


@pytest.mark.parametrize(("family", "quantize", "dtype", "instruction_set"), MODELS)
def test_a_decode_step_gives_the_bits_of_its_parts_with_any_number_of_threads(
    family: str, quantize: str, dtype: str, instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = runner(family, instruction_set, dtype, quantize=quantize)
    assert shared.model.layers.native_step is not None

    def logprobs() -> dict[str, list[TokenLogprobs | None]]:
        engine = GatheringEngine(shared, engine_config(shared, enable_prefix_cache=False))
        for name, length in LENGTHS.items():
            engine.add(name, prompt_of(length), greedy(10, logprobs=4))
        return {name: generation.logprobs for name, generation in engine.run().items()}

    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5) if family == "llama" else (2,):  # more threads than cores are slow; the parts take one
            torch.set_num_threads(threads)
            results.append(logprobs())
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(shared.model.layers, "native_step", None)
    in_parts = logprobs()
    assert all(result == in_parts for result in results)


def test_a_model_with_a_part_that_has_no_kernel_takes_its_steps_in_parts() -> None:
    assert runner("phimoe").model.layers.native_step is None  # norms that subtract the mean
    assert runner("llama", TORCH).model.layers.native_step is None
