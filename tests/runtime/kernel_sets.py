"""The instruction sets of this machine: tests of results run on each, so that every machine tests all it can use."""

import torch

from diptych.runtime.instruction_set import TORCH, available

FLOAT32 = available(torch.float32)
BFLOAT16 = available(torch.bfloat16)
EVERY = [*(("float32", name) for name in FLOAT32), *(("bfloat16", name) for name in BFLOAT16)]  # (dtype, set)
NATIVE = [(dtype, name) for dtype, name in EVERY if name != TORCH]
