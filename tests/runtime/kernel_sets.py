"""The instruction sets of this machine: tests of results run on each, so that every machine tests all it can use, and
on the code of AMX over emulated tiles, so that every machine tests that, too."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from diptych.runtime.kernels.instruction_set import AMX_EMULATED, TORCH, available
from diptych.runtime.kernels.native import load_native

FLOAT32 = available(torch.float32)
BFLOAT16 = (*([AMX_EMULATED] if load_native() else []), *available(torch.bfloat16))
EVERY = [*(("float32", name) for name in FLOAT32), *(("bfloat16", name) for name in BFLOAT16)]  # (dtype, set)
NATIVE = [(dtype, name) for dtype, name in EVERY if name != TORCH]


def every_pair(families: Iterable[str], sets: Sequence[Any]) -> list[Any]:
    """Parameters of a test: each family on each set. Marked slow, but for the first family on each set and each other
    one on one of them."""
    found = []
    for number, family in enumerate(families):
        for index, one in enumerate(sets):
            is_quick = number == 0 or index == number % len(sets)
            values = (family, *(one if isinstance(one, tuple) else (one,)))
            found.append(pytest.param(*values, marks=() if is_quick else pytest.mark.slow))
    return found
