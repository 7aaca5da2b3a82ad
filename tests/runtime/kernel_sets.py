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
FASTEST = FLOAT32[0]
FASTEST_NATIVE = ("bfloat16", available(torch.bfloat16)[0])


def pairwise(things: Sequence[Any], sets: Sequence[Any], main: Any, each: int = 1) -> list[Any]:
    """Parameters (thing, set): every thing on the set ``main``, every other set on ``each`` things, which differ from
    set to set. The other combinations are cases, too, but slow ones: what a set does wrong it does wrong with most
    things, and the other way round."""
    others = [one for one in sets if one != main]
    cases = []
    for place, thing in enumerate(things):
        for one in sets:
            first = others.index(one) if one in others else 0
            met = {(first + number * len(things) // each) % len(things) for number in range(each)}
            marks = () if one == main or place in met else pytest.mark.slow
            cases.append(pytest.param(thing, one, marks=marks, id=f"{_name(thing)}-{_name(one)}"))
    return cases


def _name(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


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
