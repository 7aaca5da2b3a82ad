"""The experts of a layer in one native call: experts.h computes them with the kernels of linear layers, and adds them
in the order of torch_experts.py, so that the same bits come out."""

import ctypes
from collections.abc import Sequence

import torch

from diptych.runtime.kernels.native import NativeKernels, NativeWeight
from diptych.runtime.ops.native_linear import NativeLinear
from diptych.runtime.ops.ops import Expert


class _Expert(ctypes.Structure):
    _fields_ = (("gate_up", NativeWeight), ("down", NativeWeight))


class _Experts(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("experts", "x", "chosen", "weights", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "count", "top_k", "hidden", "inner", "x_stride", "gate")),
    )


class NativeExperts:
    """RoutedExperts on the native kernels. layers: gate_up and down of each expert, which ``native_layers`` found."""

    def __init__(self, kernels: NativeKernels, layers: Sequence[tuple[NativeLinear, NativeLinear]]) -> None:
        self._kernels = kernels
        self._kept = layers  # whose tensors the records point to
        self._records = (_Expert * len(layers))(*(_Expert(gate_up.weight, down.weight) for gate_up, down in layers))
        first = layers[0][0]
        self._call = _Experts(
            experts=ctypes.addressof(self._records), count=len(layers), hidden=first.in_features,
            inner=first.out_features, gate=first.gate,
        )  # fmt: skip

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen, weights, y = chosen.contiguous(), weights.contiguous(), torch.empty_like(x)
        if not x.shape[0]:
            return y
        call = self._call
        call.rows, call.top_k, call.x_stride = *chosen.shape, x.stride(0)
        call.x, call.y, call.chosen, call.weights = x.data_ptr(), y.data_ptr(), chosen.data_ptr(), weights.data_ptr()
        self._kernels.functions.diptych_experts(self._kernels.handle, ctypes.addressof(call))
        return y


def native_layers(experts: Sequence[Expert]) -> list[tuple[NativeLinear, NativeLinear]] | None:
    """The layers of experts that all are packed for the kernels, with one activation; else None."""
    found = []
    for expert in experts:
        gate_up, down = expert.gate_up, expert.down
        if not isinstance(gate_up, NativeLinear) or not isinstance(down, NativeLinear):
            return None
        found.append((gate_up, down))
    gates = {gate_up.gate for gate_up, _ in found}
    return found if len(gates) == 1 and 0 not in gates else None
