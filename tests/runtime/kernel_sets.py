"""The instruction sets of this machine: tests of results run on each, so that every machine tests all it can use, and
on the code of AMX over emulated tiles, so that every machine tests that, too."""

import torch

from diptych.runtime.kernels.instruction_set import AMX_EMULATED, TORCH, available
from diptych.runtime.kernels.native import load_native

FLOAT32 = available(torch.float32)
BFLOAT16 = (*([AMX_EMULATED] if load_native() else []), *available(torch.bfloat16))
EVERY = [*(("float32", name) for name in FLOAT32), *(("bfloat16", name) for name in BFLOAT16)]  # (dtype, set)
NATIVE = [(dtype, name) for dtype, name in EVERY if name != TORCH]
