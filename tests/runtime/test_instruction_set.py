"""One place decides which kernels compute, and says what it could have been."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from diptych.control.errors import ConfigError
from diptych.runtime.kernels import instruction_set
from diptych.runtime.kernels.instruction_set import AMX_EMULATED, AUTO, NATIVE_SETS, TORCH, TRITON, available, choose
from diptych.runtime.kernels.native import FEATURES, load_native
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.serving.link.engine_options import InstructionSetName
from tests.runtime.checkpoints import reference
from tests.runtime.kernel_sets import EVERY


@pytest.mark.parametrize(("dtype", "name"), EVERY)
def test_every_set_that_is_available_can_be_chosen(dtype: str, name: str) -> None:
    assert choose(getattr(torch, dtype), name) == name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_is_the_choice_and_torch_is_always_the_last(dtype: torch.dtype) -> None:
    assert choose(dtype) == available(dtype)[0]
    assert available(dtype)[-1] == TORCH


@pytest.mark.parametrize(
    ("num_features", "float32", "bfloat16"),
    [
        (1, ("avx2",), ("avx2",)),
        (2, ("avx512", "avx2"), ("avx512", "avx2")),
        (3, ("avx512", "avx2"), ("avx512_bf16", "avx512", "avx2")),
        (4, ("avx512", "avx2"), ("amx", "avx512_bf16", "avx512", "avx2")),
    ],
)
def test_a_processor_computes_with_what_it_has_the_fastest_first(
    num_features: int, float32: tuple[str, ...], bfloat16: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (library := load_native()) is None:
        pytest.skip("no native kernels here")
    monkeypatch.setattr(instruction_set, "load_native", lambda: replace(library, features=FEATURES[:num_features]))
    assert available(torch.float32) == (*float32, TORCH)
    assert available(torch.bfloat16) == (*bfloat16, TORCH)
    assert available(torch.float16) == (TORCH,)


def test_emulated_tiles_are_never_chosen_and_no_option() -> None:
    assert AMX_EMULATED not in available(torch.bfloat16)
    assert AMX_EMULATED not in get_args(InstructionSetName)


def test_every_set_of_this_processor_is_an_option() -> None:
    names = {name for sets in NATIVE_SETS.values() for name in sets}
    assert set(get_args(InstructionSetName)) == {AUTO, *names, TRITON, TORCH}


def test_a_set_that_is_not_available_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"instruction_set is 'neon'; available for torch\.float32 .*, torch$"):
        load_runner(RunnerConfig(reference("llama").directory, num_blocks=4, instruction_set="neon"))
