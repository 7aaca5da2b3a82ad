"""Fused element-wise operations and prepacked linear layers: one interface, a native and a torch implementation."""

import torch

from diptych.runtime.kernels.instruction_set import TORCH, TRITON
from diptych.runtime.kernels.native import load_native
from diptych.runtime.ops.native_ops import NativeOps
from diptych.runtime.ops.ops import Ops
from diptych.runtime.ops.torch_ops import TorchOps


def make_ops(dtype: torch.dtype, instruction_set: str) -> Ops:
    """The operations in ``dtype`` with the kernels that instruction_set.choose has named."""
    if instruction_set == TORCH:
        return TorchOps()
    if instruction_set == TRITON:
        from diptych.runtime.ops.triton_ops import TritonOps  # half a second, where it is used

        return TritonOps()
    library = load_native()
    assert library is not None, f"{instruction_set} was chosen, but no native kernel is here"
    return NativeOps(library.kernels(instruction_set, dtype))
