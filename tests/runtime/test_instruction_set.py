"""One place decides which kernels compute, and says what it could have been."""

from dataclasses import replace

import pytest
import torch

from diptych.control.errors import ConfigError
from diptych.runtime import instruction_set
from diptych.runtime.instruction_set import TORCH, available, choose
from diptych.runtime.model_runner import RunnerConfig, load_runner
from diptych.runtime.native import load_native
from tests.runtime.checkpoints import reference
from tests.runtime.kernel_sets import EVERY


@pytest.mark.parametrize(("dtype", "name"), EVERY)
def test_every_set_that_is_available_can_be_chosen(dtype: str, name: str) -> None:
    assert choose(getattr(torch, dtype), name) == name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_is_the_choice_and_torch_is_always_the_last(dtype: torch.dtype) -> None:
    assert choose(dtype) == available(dtype)[0]
    assert available(dtype)[-1] == TORCH


def test_a_processor_without_bf16_instructions_computes_fp32_in_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if (library := load_native()) is None:
        pytest.skip("no native kernels here")
    monkeypatch.setattr(instruction_set, "load_native", lambda: replace(library, has_bf16=False))
    assert available(torch.float32) == ("avx512", TORCH) and available(torch.bfloat16) == (TORCH,)


def test_a_set_that_is_not_available_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"instruction_set is 'neon'; available for torch\.float32 .*, torch$"):
        load_runner(RunnerConfig(reference("llama").directory, num_blocks=4, instruction_set="neon"))
