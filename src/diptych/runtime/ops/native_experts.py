"""Mixtures of experts on the native kernels: the choice of experts in one call (routing.h), and the experts of a layer
in another (experts.h), which computes them with the kernels of linear layers, and adds them in the order of
torch_experts.py, so that the same bits come out. In decode steps both are parts of one call: see native_step.py.
"""

import ctypes
from collections.abc import Sequence

import torch

from diptych.runtime.kernels.native import NativeGate, NativeKernels, NativeWeight
from diptych.runtime.models.experts import ExpertRouting, Scoring
from diptych.runtime.ops.native_linear import NativeLinear
from diptych.runtime.ops.ops import Expert

SCORINGS: dict[Scoring, int] = {"softmax": 0, "softmax_of_top": 1, "sigmoid": 2, "sparsemixer": 3}  # as in kernels.h


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class NativeExpert(ctypes.Structure):
    """The gated MLP of one expert, as kernels.h has it."""

    _fields_ = _fields(NativeWeight, "gate_up down")


class NativeRouting(ctypes.Structure):
    """An ExpertRouting, as kernels.h has it."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "correction"),
        *_fields(ctypes.c_int64, "scoring count top_k is_normalized"),
        *_fields(ctypes.c_float, "scale jitter"),
    )


class _ExpertChoice(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_void_p, "logits"),
        *_fields(ctypes.c_int64, "is_wide rows"),
        ("routing", NativeRouting),
        *_fields(ctypes.c_void_p, "chosen weights"),
    )


class _Experts(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_void_p, "experts x chosen weights y"),
        *_fields(ctypes.c_int64, "rows count top_k hidden inner x_stride"),
        ("gate", NativeGate),
    )


class NativeMixture(ctypes.Structure):
    """The mixture of one layer in a decode step, as kernels.h has it."""

    _fields_ = (
        ("router", NativeWeight),
        ("routing", NativeRouting),
        ("experts", ctypes.c_void_p),
        ("shared", NativeExpert),
        *_fields(ctypes.c_int64, "router_is_wide inner shared_inner"),
        ("gate", NativeGate),
    )


def native_routing(routing: ExpertRouting, correction: torch.Tensor | None) -> NativeRouting:
    """A routing as the kernels take it. correction: [num_experts] fp32, which the caller keeps."""
    return NativeRouting(
        None if correction is None else correction.data_ptr(), SCORINGS[routing.scoring], routing.num_experts,
        routing.top_k, routing.is_normalized, routing.scale, routing.jitter,
    )  # fmt: skip


def choose_experts(
    kernels: NativeKernels, logits: torch.Tensor, routing: ExpertRouting, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: the contract is Ops.route."""
    rows, logits = logits.shape[0], logits.contiguous()
    chosen = torch.empty(rows, routing.top_k, dtype=torch.int64)
    weights = torch.empty(rows, routing.top_k, dtype=torch.float32)
    call = _ExpertChoice(
        logits.data_ptr(), logits.dtype is torch.float32, rows, native_routing(routing, correction),
        chosen.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    kernels.functions.diptych_choose(kernels.handle, ctypes.addressof(call))
    return chosen, weights


class NativeExperts:
    """RoutedExperts on the native kernels. layers: gate_up and down of each expert, which ``native_layers`` found."""

    def __init__(self, kernels: NativeKernels, layers: Sequence[tuple[NativeLinear, NativeLinear]]) -> None:
        self._kernels = kernels
        self._kept = layers  # whose tensors the records point to
        self.records = (NativeExpert * len(layers))(
            *(NativeExpert(gate_up.weight, down.weight) for gate_up, down in layers)
        )
        first = layers[0][0]
        self.inner, self.activation, self.gate = first.out_features, first.activation, first.gate
        self._call = _Experts(
            experts=ctypes.addressof(self.records), count=len(layers), hidden=first.in_features, inner=self.inner,
            gate=self.gate,
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
    activations = {gate_up.activation for gate_up, _ in found}
    return found if len(activations) == 1 and None not in activations else None
